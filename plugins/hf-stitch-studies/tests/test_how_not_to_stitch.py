"""Every experiment runs from the command line to its record, on random images and untrained networks."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from study_scripts import run_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write random images and texts, and three untrained networks."""
    made, random = tmp_path_factory.mktemp("experiment"), np.random.default_rng(0)
    (made / "cifar10").mkdir()
    (made / "networks").mkdir()
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)})
    for split, n in (("train", 150), ("test", 140)):
        images = list(random.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8))
        columns = {"img": images, "label": [i % 10 for i in range(n)]}
        datasets.Dataset.from_dict(columns, features).to_parquet(made / "cifar10" / f"{split}.parquet")
    (made / "fashion_mnist").mkdir()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)})
    for split, drawn in (("test", random), ("train", np.random.default_rng(1))):
        images = list(drawn.integers(0, 256, (60, 28, 28), dtype=np.uint8))
        grey = {"image": images, "label": [i % 10 for i in range(60)]}
        datasets.Dataset.from_dict(grey, features).to_parquet(made / "fashion_mnist" / f"{split}.parquet")
    words = ["who", "what", "where", "when", "how", "river", "king", "year", "city", "many"]
    (made / "trec").mkdir()
    names = ["ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"]
    features = datasets.Features({"text": datasets.Value("string"), "coarse_label": datasets.ClassLabel(names=names)})
    for split, n in (("train", 150), ("test", 60)):
        lines = [f"{' '.join(random.choice(words, 4))} {split} {i} ?" for i in range(n)]
        columns = {"text": lines, "coarse_label": [i % 6 for i in range(n)]}
        datasets.Dataset.from_dict(columns, features).to_parquet(made / "trec" / f"{split}.parquet")
    (made / "tatoeba_en_es_fr_ja").mkdir()
    spanish = {"id": list(range(60)), "es": [f"El río número {i}." for i in range(60)]}
    datasets.Dataset.from_dict(spanish).to_parquet(made / "tatoeba_en_es_fr_ja" / "test.parquet")
    from dr_frankenstein import networks

    for seed in range(3):
        torch.manual_seed(seed)
        save_file(networks.Tiny10().state_dict(), made / "networks" / f"in{seed}-gn{seed}.safetensors")
    return made


def study(script: str, folder: Path, *options: object, networks: bool = True) -> None:
    found = ["--networks", folder / "networks"] if networks else []
    run_script(f"how_not_to_stitch.{script}", "--data-dir", folder, *options, *found)


def test_layer_identification_writes_its_page_and_record(folder: Path, tmp_path: Path) -> None:
    study("layer_identification", folder, "--preset", "test", "--out", tmp_path)
    (one,) = json.loads((tmp_path / "layer_identification.json").read_text())["families"].values()
    assert one["networks"] == ["in0", "in1", "in2"] and len(one["widths"]) == 8
    identified = one["identified"]
    assert set(identified) == {"trained", "untrained", "noise", "mixed", "depth"}
    assert identified["depth"]["depth only"]["a"]["hit"] == 3 * 8
    for rows in ("trained", "mixed"):
        for axes in identified[rows].values():
            assert all(
                sum(axis[name] for name in ("hit", "tie", "miss", "undefined")) == 3 * 8 for axis in axes.values()
            )
    assert identified["trained"]["PWCCA"]["a"]["undefined"] == 3 * 3  # 60 images are too few for 64 channels
    assert "3 networks, 3 pairs, 8 layers" in (tmp_path / "layer_identification.md").read_text()


def test_kinds_of_rows_write_their_page_and_record(folder: Path, tmp_path: Path) -> None:
    study("which_rows", folder, "--preset", "test", "--out", tmp_path)
    (one,) = json.loads((tmp_path / "which_rows.json").read_text())["families"].values()
    assert set(one["found"]["Procrustes"]) == {"mean", "flat", "positions", "tokens", "resized", "paper's"}
    assert "flat" not in one["found"]["PWCCA"]  # more features than images
    assert one["found"]["linear CKA"]["paper's"] == one["found"]["linear CKA"]["flat"]
    chances = {rows: axes["a"]["chance"] for rows, axes in one["found"]["Procrustes"].items()}
    assert chances["mean"] == chances["resized"] == 1 / 8 < chances["positions"]
    assert one["itself"]["linear CKA"]["a"]["value"] == one["itself"]["Procrustes"]["b"]["value"] == 1
    from how_not_to_stitch.which_rows import contrast

    assert contrast(one["found"]["PWCCA"], 3) == {}  # 60 images are too few for 64 channels
    largest = contrast(one["found"]["Procrustes"], 3)
    assert largest["low"] <= largest["value"] <= largest["high"]
    assert "3 networks, 8 layers" in (tmp_path / "which_rows.md").read_text()


def test_grids_of_all_layers_write_their_page_and_record(folder: Path, tmp_path: Path) -> None:
    study("layer_grids", folder, "--preset", "test", "--out", tmp_path)
    found = json.loads((tmp_path / "layer_grids.json").read_text())["architectures"]["networks"]
    assert found["networks"] == ["in0", "in1", "in2"] and np.shape(found["mean"]["lstsq, structural"]) == (8, 8)
    assert all(len(counts) == 3 for counts in found["distant"].values())
    assert found["itself"]["lstsq, structural"]["a"]["value"] == 1
    assert "3 networks, 3 pairs" in (tmp_path / "layer_grids.md").read_text()


def test_the_bench_writes_its_page_and_record(folder: Path, tmp_path: Path) -> None:
    study("bench", folder, "--preset", "test", "--out", tmp_path)
    of = json.loads((tmp_path / "bench.json").read_text())["architectures"]["networks"]
    assert of["networks"] == 3 and list(of["accuracies"]) == of["layers"]
    assert {"procrustes", "lstsq, functional", "depth only", "rank only"} <= of["scores"]["specificity"].keys()
    assert "lstsq, functional" in of["scores"]["sensitivity"]
    assert "## 3 networks" in (tmp_path / "bench.md").read_text()


def test_strange_activations_write_their_page_and_record(folder: Path, tmp_path: Path) -> None:
    detectors = "--detectors", "mahalanobis", "energy"  # the classifier takes minutes
    study("strange_activations", folder, "--preset", "test", *detectors, "--out", tmp_path)
    found = json.loads((tmp_path / "strange_activations.json").read_text())["networks"]
    assert {"in0 -> in1", "in0 -> in0"} <= found.keys()
    one = found["in0 -> in1"]["matchers"]["task loss, 2 steps"]
    assert all(np.shape(one[detector]["auroc"]) == (8, 8) for detector in ("mahalanobis", "energy"))
    assert "1 pair of networks" in (tmp_path / "strange_activations.md").read_text()


def test_the_gate_of_detectors_writes_its_page_and_record(folder: Path, tmp_path: Path) -> None:
    study("detector_gate", folder, "--preset", "test", "--detectors", "knn", "--out", tmp_path)
    (one,) = json.loads((tmp_path / "detector_gate.json").read_text())["families"].values()
    ((target, found),) = one["targets"].items()
    assert target == "in1" and found.keys() == {"knn", "energy, Fashion-MNIST", "energy, superposed images"}
    assert list(found["knn"]) == one["layers"] and all(set(each) == {"noise", "far", "train", "why"}
                                                       for each in found["knn"].values())  # fmt: skip
    assert "| in1 | knn | noise |" in (tmp_path / "detector_gate.md").read_text()


def test_task_loss_by_steps_writes_its_page_and_record(folder: Path, tmp_path: Path) -> None:
    published = tmp_path / "published"
    published.mkdir()
    (published / "drfrankenstein_tiny10").symlink_to(folder / "networks")
    options = "--data-dir", folder, "--published", published, "--cache", tmp_path, "--out", tmp_path
    run_script("how_not_to_stitch.task_loss_steps", "--preset", "test", *options)
    record = json.loads((tmp_path / "task_loss_steps.json").read_text())
    assert record["pairs"] == [["in0", "in1"], ["in0", "in0"]] and record["common"] == 2
    start = record["identified"]["within"]["structural"]["0"]
    assert all(axis["score"]["value"] == 1 and axis["hit"] == 8 for axis in start.values())  # the identity
    assert record["identified"]["between"]["bn8 and later"].keys() == {"0", "2", "4"}
    assert record["float32"] <= 0.1
    assert "1 disjoint pairs" in (tmp_path / "task_loss_steps.md").read_text()


def test_the_cause_writes_its_page_and_record(folder: Path, tmp_path: Path) -> None:
    study("cause", folder, "--preset", "test", "--out", tmp_path)
    (one,) = json.loads((tmp_path / "cause.json").read_text())["pairs"].values()
    assert {"lstsq", "task loss", "residual 1", "moments 1"} <= one["matchers"].keys()
    assert "**undecided**" in (tmp_path / "cause.md").read_text()  # untrained networks are not accurate


def test_the_audit_of_texts_writes_its_page_and_record(folder: Path, tmp_path: Path) -> None:
    study("text_audit", folder, "--preset", "test", "--out", tmp_path, networks=False)
    found = json.loads((tmp_path / "text_audit.json").read_text())
    assert len(found["audits"]) == 2 * 2 * 2 * 4 + 2  # sources, layers, layers, matchers; and the target into itself
    assert found["accuracy"].keys() == {"source", "target", "untrained twin", "most frequent class", "chance"}
    assert all(one["doses"].keys() | one["left_out"].keys() == {"mahalanobis", "knn"} for one in found["audits"])
    assert "a control fails" in (tmp_path / "text_audit.md").read_text()  # a class cannot be read off random words


def test_low_rank_layers_write_their_page_and_record(folder: Path, tmp_path: Path) -> None:
    study("low_rank_layers", folder, "--preset", "test", "--out", tmp_path)
    found = json.loads((tmp_path / "low_rank_layers.json").read_text())
    one = found["pairs"]["in0 -> in1"]
    assert list(one["parts"]) == found["layers"] and np.shape(one["itself"]["recoloured"]) == (8, 8)
    assert one["parts"]["bn8"]["principal"]["8"]["rank_x"] == 8 and "8" in one["parts"]["bn8"]["random"]
    assert np.shape(found["lack"]["trained"]["3"]) == np.shape(found["lack"]["untrained"]["3"]) == (2, 2, 3)
    assert "1 pairs without a network in common" in (tmp_path / "low_rank_layers.md").read_text()
