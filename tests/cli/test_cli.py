from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import BertConfig, BertModel, T5Config

import hf_stitch
from hf_stitch.analysis import SimilarityAtlas
from hf_stitch.data import read_data
from hf_stitch.registry import registries

from calls import DIGITS, error_line, recorded, run, usage_error, words  # isort: skip
from two_tokenizers import LAYER, SENTENCES, decoder  # isort: skip


@pytest.fixture(scope="module")
def stitched(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Run ``hf-stitch stitch`` once, and return its output folder and its JSON record."""
    out = tmp_path_factory.mktemp("out") / "run"
    record = recorded(
        "stitch", folders["cnn"], folders["vit"], "--source-layer", "layer2.0", "--target-layer", "vit.layers.1",
        "--matcher", "low_rank:rank=4", *DIGITS, "--test-size", "40", "--out", out,
    )  # fmt: skip
    return out, record


# -- the command -------------------------------------------------------------------------------------------------------


def test_runs_as_a_module() -> None:
    shown = subprocess.run([sys.executable, "-m", "hf_stitch", "--version"], check=True, capture_output=True, text=True)
    assert shown.stdout == f"hf-stitch {hf_stitch.__version__}\n"


def test_debug_raises_the_error(tmp_path: Path) -> None:
    result = run("--debug", "layers", tmp_path)
    assert isinstance(result.exception, ValueError)
    assert "does not contain config.json" in str(result.exception)


# -- layers ------------------------------------------------------------------------------------------------------------


def test_layers_lists_the_layers_of_the_adapter(folders: dict[str, Path]) -> None:
    adapter = hf_stitch.load(str(folders["vit"]))
    result = run("layers", folders["vit"], "--json")
    record = json.loads(result.stdout)
    assert record["task"] == "image-classification"
    assert [e["layer"] for e in record["layers"]] == list(adapter.layers)
    first = record["layers"][0]
    assert first["spec"] == {"layout": "bnd", "width": 64, "grid": [4, 4], "prefix_tokens": 1}
    assert first["status"] == "verified"
    assert 0 < first["cost"] < record["layers"][-1]["cost"] <= 1
    (line,) = [line for line in result.stderr.splitlines() if "vit.layers.1" in line]
    assert all(word in line for word in ("bnd", "64", "4×4", "verified", "stubs"))


@pytest.mark.parametrize("command", ["layers", "doctor"])
def test_networks_run_in_another_dtype(command: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    own = hf_stitch.Adapter._run

    def noted(self: Any, inputs: Any, **trial: Any) -> Any:
        seen.append(inputs["pixel_values"].dtype)
        return own(self, inputs, **trial)

    monkeypatch.setattr(hf_stitch.Adapter, "_run", noted)
    assert run(command, folders["vit"], "--dtype", "float64", "--device", "cpu").exit_code == 0
    assert set(seen) == {torch.float64}


# -- list --------------------------------------------------------------------------------------------------------------


def test_list_shows_every_name() -> None:
    for kind in registries:
        result = run("list", kind, "--json")
        record = json.loads(result.stdout)
        assert [e["name"] for e in record] == list(registries[kind].names()) and result.stderr
        more = {"title", "direction", "range", "invariances"} if kind == "metrics" else set()
        assert all(set(e) == {"name", "origin", "source", "summary", *more} for e in record)
        if kind == "matchers":
            (entry,) = [e for e in record if e["name"] == "lstsq"]
            assert entry["origin"] == "built-in" and entry["summary"]
            assert entry["source"] == "hf_stitch.matchers.regression:Lstsq"


# -- compare, and what all commands share ------------------------------------------------------------------------------


def test_compare_prints_and_saves(folders: dict[str, Path], tmp_path: Path) -> None:
    call = ["compare", folders["cnn"], folders["cnn"], *DIGITS[:4], "--max-samples", "40"]
    call += ["--metric", "linear_cka:debiased=true", "--metric", "mutual_knn:k=3"]
    record = recorded(*call, "--out", tmp_path / "run")
    atlas = SimilarityAtlas.load(tmp_path / "run" / "atlas.json")
    assert list(record["values"]) == ["linear_cka(debiased=True)", "mutual_knn(k=3)"]
    assert all(record["values"][name] == atlas[name].tolist() for name in atlas.values)
    assert record["best_matches"]["mutual_knn(k=3)"] == {layer: layer for layer in atlas.layers_a}
    assert all(Path(path).is_file() for path in record["saved"].values()) and len(record["saved"]) == 3
    planned = recorded(*call, "--plan")
    assert {route["metric"] for route in planned["routes"] if route["chosen"]} == set(record["values"])
    for bad, what in (("mutual_knn:q=3", "got an unexpected option 'q'"), ("mutual_knn:q", "key=value")):
        assert what in usage_error(*call, "--metric", bad)
    unaligned = error_line(*call, "--metric", "rsa", "--rows", "positions", "--align", "offsets")
    assert "--align offsets requires texts, but sample" in unaligned


@pytest.mark.parametrize("command", ["compare", "stitch", "grid"])
def test_commands_plan_and_write_nothing(command: str, folders: dict[str, Path], tmp_path: Path) -> None:
    result = run(command, *folders.values(), *DIGITS, "--plan", "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["seconds"] > 0 and "networks" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("command", "result"), [("compare", "SimilarityAtlas"), ("stitch", "Evaluation")])
def test_a_page_is_written(
    command: str, result: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, pooling = tmp_path / "page.html", ["--pooling", "mean"] if command == "stitch" else []
    call = [command, *map(str, folders.values()), *DIGITS, "--out", str(tmp_path / "out"), "--report", str(place)]
    monkeypatch.setattr("sys.argv", ["hf-stitch", *call, *pooling])
    found = run(*call, *pooling)
    assert found.exit_code == 0, found.output
    (read,) = hf_stitch.load_report(place)
    names = " ".join(folder.name for folder in folders.values())
    assert type(read).__name__ == result and f"Again: <code>hf-stitch {command} {names} --data" in place.read_text()
    assert str(tmp_path.parent) not in place.read_text()


# -- stitch and evaluate -----------------------------------------------------------------------------------------------


def test_stitch_saves_everything_in_its_record(stitched: tuple[Path, dict[str, Any]]) -> None:
    out, record = stitched
    assert (record["source_layer"], record["target_layer"]) == ("layer2.0", "vit.layers.1")
    assert record["recipe"]["matcher"] == {"name": "low_rank", "rank": 4, "rcond": None}
    assert record["recipe"]["samples"] == 80
    assert record["evaluation"]["n"] == 40
    assert record["saved"].keys() == {"model", "stitcher", "evaluation", "plot"}
    assert all(Path(path).exists() for path in record["saved"].values())
    assert json.loads((out / "evaluation.json").read_text()) == record["evaluation"]
    Image.open(out / "evaluation.png").verify()
    for command in (["evaluate", out, *DIGITS], ["push", out, "me/it", "--private"]):
        assert f"name one of its subfolders: {out / 'model'}, {out / 'stitcher'}" in error_line(*command)


def test_evaluate_scores_both_artefacts_alike(stitched: tuple[Path, dict[str, Any]], folders: dict[str, Path]) -> None:
    """The stitched model and the stitcher have the same scores on samples that ``stitch`` did not use."""
    out, record = stitched
    data = ("--data", "sklearn:digits", "--split", "train", "--max-samples", 50)
    parents = ("--source", folders["cnn"], "--target", folders["vit"])
    model = recorded("evaluate", out / "model", *data, *parents)
    assert model == recorded("evaluate", out / "stitcher", *data, *parents)
    assert model["n"] == 50
    assert model["data"] != record["evaluation"]["data"]
    assert model["scores"].keys() == record["evaluation"]["scores"].keys()


def test_audit_tells_whether_states_are_like_those_of_the_target(
    stitched: tuple[Path, dict[str, Any]], folders: dict[str, Path], tmp_path: Path
) -> None:
    result = run(
        "audit", stitched[0] / "model", "--target", folders["vit"], "--data", "sklearn:digits", "--split", "train",
        "--max-samples", 300, "--train-data", "sklearn:digits:test", "--detector", "mahalanobis", "--detector",
        "knn:k=3", "--max-dose", 0.5, "--out", tmp_path / "out", "--json",
    )  # fmt: skip
    record, shown = json.loads(result.stdout), result.stderr
    assert record["evaluation"]["n"] == 300 and record["max_dose"] == 0.5
    assert list(record["detections"]["body"]) == ["mahalanobis", "knn(k=3)"]
    assert record["verdict"] in " ".join(shown.split()) and "mahalanobis" in shown and "mean_only" in shown
    assert {*record["saved"]} == {"audit.json", "audit.png"} == {path.name for path in (tmp_path / "out").iterdir()}


def test_decoders_with_two_tokenizers_and_samples_without_partners(tmp_path: Path) -> None:
    def written(name: str, sentences: list[str]) -> Path:
        (tmp_path / name).mkdir()
        lines = ["text", *(f'"{" ".join(each.split())}"' for each in sentences)]
        (tmp_path / name / "train.csv").write_text("\n".join(lines), encoding="utf-8")
        return tmp_path / name

    def stitched(source: str, target: str, data: Path, *options: object) -> hf_stitch.StitchedModel:
        call = ("stitch", tmp_path / source, tmp_path / target, "--data", data, "--out", tmp_path / "out" / data.name)
        result = run(*call, "--source-layer", LAYER[source], "--target-layer", LAYER[target], "--matcher", *options)
        assert result.exit_code == 0, result.output
        return hf_stitch.StitchedModel.from_pretrained(tmp_path / "out" / data.name / "model")

    for name in LAYER:
        adapter = decoder(name, torch.float32)
        adapter.model.save_pretrained(tmp_path / name)
        adapter.processor.save_pretrained(tmp_path / name)
    source, target = LAYER
    model = stitched(source, target, written("texts", SENTENCES), "ridge", "--align", "prefix", "--own")
    assert model.config.recipe["own"] is True and model.stitch.body.in_features == 16 + 12
    pairs, *unpaired = (
        written(name, some)
        for name, some in (("pairs", SENTENCES[:20]), ("left", SENTENCES[20:120]), ("right", SENTENCES[120:]))
    )
    recipe = stitched("llama", "llama", pairs, "seeded_refinement", "--unpaired", *unpaired).config.recipe
    assert len(recipe["unpaired"]) == 2 and recipe["fitted_samples"]["n"] == 16 + 100 + len(SENTENCES) - 120


# -- swap --------------------------------------------------------------------------------------------------------------


def test_swap_replaces_the_encoder_of_a_network_and_of_the_result(folders: dict[str, Path], tmp_path: Path) -> None:
    place = ("--encoder-layer", "layer4.0", "--max-samples", "60", "--out")
    record = recorded(
        "swap", folders["vit"], folders["cnn"], "--target-layer", "vit.layers.3", "--anchors", "90",
        *DIGITS[:4], *place, tmp_path / "one",
    )  # fmt: skip
    assert record["evaluation"]["n"] == 60
    everything = len(read_data("sklearn:digits", split="test"))
    same_split = recorded(
        "swap", folders["vit"], folders["cnn"], "--target-layer", "vit.layers.3", "--anchors", "90", "--encoder-layer",
        "layer4.0", "--matcher", "auto", *DIGITS[:4], "--anchor-split", "test", "--out", tmp_path / "same",
    )  # fmt: skip
    assert same_split["evaluation"]["n"] == everything - 90
    assert same_split["recipe"]["held_out_errors"] == record["recipe"]["held_out_errors"]
    assert {"stitched", "inverse_relative", "identity", "target", "chance"} <= record["evaluation"]["scores"].keys()
    errors = record["recipe"]["held_out_errors"]
    assert record["recipe"]["matcher"]["name"] == min(errors, key=errors.get)
    assert record["recipe"]["samples"] == 90
    again = recorded(
        "swap", record["saved"]["model"], folders["vit"], "--encoder-layer", "vit.layers.3", "--pooling", "cls",
        "--matcher", "ridge:ridge=0.1", *DIGITS[:4], "--max-samples", "60", "--out", tmp_path / "two",
    )  # fmt: skip
    assert again["recipe"]["anchors"] == record["recipe"]["anchors"]
    # The anchor set already contains this encoder, and the anchors are left out of scoring as before.
    back = run(
        "swap", again["saved"]["model"], folders["cnn"], "--encoder-layer", "layer4.0", "--pooling", "mean",
        *DIGITS[:4], "--out", tmp_path / "three", "--json",
    )  # fmt: skip
    assert json.loads(back.stdout)["evaluation"]["n"] == everything - 90
    assert f"90 of {everything} samples are anchors and left out of the scores; --anchor-split" in words(back.stderr)
    assert again["recipe"]["matcher"]["name"] == "ridge" and again["recipe"]["matcher"]["ridge"] == 0.1


# -- doctor ------------------------------------------------------------------------------------------------------------


def test_doctor_reports_cuts_and_inputs_or_exits_with_1(folders: dict[str, Path], tmp_path: Path) -> None:
    result = run("doctor", folders["vit"], "--json")
    record = json.loads(result.stdout)
    assert record["kind"] == "ViTForImageClassification"
    assert {e["status"] for e in record["layers"]} == {"verified"}
    assert "inputs pixel_values (image)" in words(result.stderr)  # the length of the path decides where lines break
    failed = run("doctor", tmp_path / "nothing")
    assert failed.exit_code == 1 and "could not be loaded" in failed.stdout


def test_doctor_examines_the_decoder_of_an_encoder_decoder_with_random_weights(tmp_path: Path) -> None:
    config = T5Config(
        d_model=16, num_layers=2, num_heads=2, d_ff=16, d_kv=8, vocab_size=50, decoder_start_token_id=0,
        architectures=["T5ForConditionalGeneration"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    record = recorded("doctor", tmp_path, "--random", "--content", "decoder_input_ids")
    assert [e["layer"] for e in record["layers"]] == ["decoder.block.0", "decoder.block.1"]


def test_doctor_silences_transformers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=9)
    BertModel(config).save_pretrained(tmp_path)
    capfd.readouterr()
    shown = run("doctor", tmp_path)
    assert not shown.stderr and not capfd.readouterr().err
    assert shown.stdout.startswith(str(tmp_path))


def test_grid_scores_every_layer_into_every_layer(folders: dict[str, Path], tmp_path: Path) -> None:
    shown = run(
        "grid", folders["cnn"], folders["vit"], "--layer-a", "layer1.0", "--layer-a", "layer2.0",
        "--layer-b", "vit.layers.1", "--matcher", "ridge:ridge=0.5", "--detector", "knn:k=3", "--out",
        tmp_path / "out", "--json", *DIGITS,
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output
    record = json.loads(shown.stdout)
    assert list(record["scores"]) == ["ridge(ridge=0.5)"] and record["n"] == 24
    assert len(record["detections"]["knn(k=3)"]["figures"]["ridge(ridge=0.5)"]["auroc"]) == 2
    assert all(Path(path).is_file() for path in record["saved"].values()) and "grid.json" in record["saved"]
    assert "1-ridge-dose(knn(k=3)).png" in record["saved"]


def test_samples_of_another_data_set_are_drawn_from_all_classes(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    from hf_stitch.cli.options import Shared

    rows = {"first": ["a"] * 60, "second": [f"text {i}" for i in range(60)], "label": [i // 20 for i in range(60)]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "train.parquet")
    options = Shared(text="second", image="pixels")
    drawn = options.read_other(str(tmp_path), 12, 3)
    assert sorted(drawn.labels or []) == [0] * 4 + [1] * 4 + [2] * 4
    assert next(iter(drawn.batches(12))).samples == [f"text {i}" for i in drawn.ids]
    assert options.read_other(str(tmp_path), 12, 4).ids != drawn.ids
    assert len(options.read_other(str(tmp_path), 99, 3)) == 60


@pytest.mark.parametrize("command", ["stitch", "swap"])
def test_a_failed_command_leaves_no_empty_folder(command: str, folders: dict[str, Path], tmp_path: Path) -> None:
    kept, empty = tmp_path / "kept", tmp_path / "empty"
    kept.mkdir(), empty.mkdir()
    cut = ("--target-layer", "layer2.0", "--encoder-layer", "wrong") if command == "swap" else ()
    for out in (tmp_path / "new" / "run", kept / "run"):
        error_line(command, folders["cnn"], empty, *cut, *DIGITS, "--out", out)
    assert sorted(tmp_path.iterdir()) == [empty, kept] and not list(kept.iterdir())


# -- errors ------------------------------------------------------------------------------------------------------------

OF_DIGITS = "--data sklearn:digits --split test"
STITCH = f"stitch {{cnn}} {{vit}} --source-layer layer2.0 --target-layer vit.layers.1 --out {{out}} {OF_DIGITS}"
SWAP = f"swap a b --encoder-layer x {OF_DIGITS} --out {{out}}"
GRID = f"grid {{cnn}} {{vit}} {OF_DIGITS} --max-samples 120 --test-size 40"
ERRORS = {
    "layers {empty}": "does not contain config.json",
    # before data are read
    "compare timm:nosuch timm:nosuch --data {empty}/nodata": "nosuch",
    "evaluate {empty} --data {empty}/nodata": "is not a stitcher",
    "layers timm:resnet_18": r"did you mean 'resnet18'\?",
    f"evaluate {{vit}} {OF_DIGITS}": "not of a stitched",
    f"audit {{model}} --target {{vit}} {OF_DIGITS} --max-samples 300": "pass held-out samples to audit it",
    f"{STITCH} --source-layer layer9": "layer9",
    f"{STITCH} --max-samples 1000": "at most 359",
    f"swap {{model}} {{cnn}} --encoder-layer layer4.0 {OF_DIGITS} --out {{out}}": "lacks anchors",
    # messages name options, not arguments of Python
    f"{GRID} --detector energy": "pass --auxiliary-data, different from --far-data",
    f"{GRID} --layer-a layer2.0 --layer-a layer2.0": "^error: --layer-a contains 'layer2.0' more than once; name each",
    f"{GRID} --far-data sklearn:digits:train": "--far-data requires detectors; pass --detector, or",
    # which of both, depends on the processor
    f"stitch {{cnn}} {{cnn}} --source-layer layer2.0 --target-layer layer2.0 --max-samples 120 {OF_DIGITS} "
    "--matcher task_loss:lr=1e37,max_steps=20 --out {out}": "diverged: the loss is (nan|inf) at step",
}
USAGE = {
    "nosuch": "nosuch",
    "layers": "Missing argument",
    "layers a --device nowhere": "torch cannot use device 'nowhere'",
    "layers a --dtype int8": "must be a floating-point dtype of torch (float32, float64,",
    "compare a b --data d --metric linear_cka:debiased=7": "debiased",
    "compare a b --data d --rows nosuch": "nosuch",
    "compare a b --data d --rows positions --permutations 9": "permutations",
    f"{STITCH} --matcher ridge:rigde=1": "did you mean 'ridge'",
    f"{STITCH} --matcher low_rank": "requires the option 'rank'",
    f"{STITCH} --matcher procustes": "did you mean 'procrustes'?",
    f"{STITCH} --matcher ridge:ridge=-1": "ridge",
    f"{STITCH} --matcher ridge:rank": "must have the form key=value",
    f"{STITCH} --pooling all": "is not one of 'none'",
    f"{STITCH} --test-size 1.5": "must be a share below 1",
    f"{SWAP} --anchors 9": "requires --target-layer",
    f"{SWAP} --selection random": "requires --target-layer",
    f"{SWAP} --task image-classification": "requires --target-layer",
    f"{GRID} --detector knm": "did you mean 'knn'",
    f"{GRID} --report {{empty}}/no/page.html": "does not exist or cannot be written",
    **{
        f"compare timm:nosuch timm:nosuch --metric weight_cosine {option} {value}": f"{option} require"
        for option, value in (("--split", "nope"), ("--max-samples", "5"), ("--label", "q"), ("--text", "t"))
    },
}


@pytest.fixture
def places(stitched: tuple[Path, Any], folders: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "empty").mkdir()
    return {**folders, "model": stitched[0] / "model", "empty": tmp_path / "empty", "out": tmp_path / "out"}


@pytest.mark.parametrize("command", ERRORS)
def test_an_error_is_one_line(command: str, places: dict[str, Path]) -> None:
    assert re.search(ERRORS[command], error_line(*command.format(**places).split()))
    assert not places["out"].exists()


@pytest.mark.parametrize("command", USAGE)
def test_wrong_usage_is_told_before_any_work(command: str, tmp_path: Path) -> None:
    places = dict.fromkeys(("cnn", "vit", "model", "empty"), tmp_path) | {"out": tmp_path / "out"}
    assert USAGE[command] in usage_error(*command.format(**places).split())
    assert not places["out"].exists()
