from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

import hf_stitch
from hf_stitch.cli import app, quickstart


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    """Run the quickstart on one network of each kind with two matchers: output folder, stderr and JSON record."""
    out = tmp_path_factory.mktemp("quickstart")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart, "NETWORKS", {"cnn-0": ("cnn", 0), "vit-0": ("vit", 0)})
        patch.setattr(quickstart, "PAIRS", (("vit-0", "cnn-0"),))
        patch.setattr(quickstart, "MATCHERS", {"identity": ("identity", {}), "rank 4": ("low_rank", {"rank": 4})})
        result = CliRunner().invoke(
            app, ["quickstart", "--out", str(out), "--epochs", "4", "--max-samples", "700", "--json"]
        )
    assert result.exit_code == 0, result.output
    return out, result.stderr, json.loads(result.stdout)


def test_every_layer_is_scored_with_every_matcher(ran: tuple[Path, str, dict[str, Any]]) -> None:
    results = ran[2]["results"]
    assert [(r["source_layer"], r["target_layer"]) for r in results[::2]] == [
        (f"vit.layers.{i}", f"layer{i + 1}.0") for i in range(4)
    ]
    assert [r["matcher"] for r in results] == ["identity", "rank 4"] * 4
    for r in results[::2]:
        scores = r["evaluation"]["scores"]
        assert scores["stitched"] == scores["identity"], "the matcher and the baseline are the same map"
        assert scores["target"]["accuracy"]["value"] > 0.5


def test_best_follows_the_rule(ran: tuple[Path, str, dict[str, Any]]) -> None:
    _, output, record = ran
    last = record["results"][-1]["target_layer"]
    figures = [
        r["evaluation"]["scores"]["stitched"]["relative_accuracy"]["value"]
        for r in record["results"]
        if r["matcher"] != "identity" and r["target_layer"] != last
    ]
    best = record["best"]["evaluation"]["scores"]
    assert best["stitched"]["relative_accuracy"]["value"] == max(figures)
    for baseline in ("identity", "mean_only", "chance"):
        assert best["stitched"]["relative_accuracy"]["low"] > best[baseline]["relative_accuracy"]["high"]
    assert record["rule"] in output
    assert "bit-identical logits on all 359 held-out images" in output


def test_files_contain_the_results(ran: tuple[Path, str, dict[str, Any]]) -> None:
    out, _, record = ran
    assert all(Path(path).exists() for path in record["saved"].values())
    assert json.loads((out / "results.json").read_text()) == record["results"]
    with (out / "results.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    figures = [r["evaluation"]["scores"]["stitched"]["relative_accuracy"]["value"] for r in record["results"]]
    assert [float(line["relative_accuracy"]) for line in lines] == figures
    Image.open(out / "results.png").verify()


def test_networks_load_from_their_folders(ran: tuple[Path, str, dict[str, Any]]) -> None:
    saved = ran[2]["saved"]
    assert hf_stitch.load(saved["cnn-0"]).library == "timm"
    assert hf_stitch.load(saved["vit-0"]).library == "transformers"


def test_data_without_labelled_images_is_rejected(tmp_path: Path) -> None:
    import datasets

    for split in ("train", "test"):
        datasets.Dataset.from_dict({"text": ["a", "b"]}).to_parquet(tmp_path / f"{split}.parquet")
    result = CliRunner().invoke(app, ["quickstart", "--out", str(tmp_path / "out"), "--dataset", str(tmp_path)])
    assert result.exit_code == 1
    assert "needs images with labels, got Samples(2 x text)" in result.stderr
