from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import BertConfig, BertModel, T5Config
from typer.testing import CliRunner, Result

import hf_stitch
from hf_stitch.cli import app, listing
from hf_stitch.data import read_data
from hf_stitch.registry import registries

DIGITS = ("--data", "sklearn:digits", "--split", "test", "--max-samples", "120")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], prog_name="hf-stitch")


def error_line(*arguments: object) -> str:
    """Run a command that fails and return its one-line error message."""
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert not result.stdout
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in result.stderr
    return line


def recorded(*arguments: object) -> Any:
    """Run a command with ``--json`` and parse stdout, which contains nothing but JSON."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


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
    assert "no config.json" in str(result.exception)


# -- layers ------------------------------------------------------------------------------------------------------------


def test_layers_lists_the_layers_of_the_adapter(folders: dict[str, Path]) -> None:
    adapter = hf_stitch.load(str(folders["vit"]))
    record = recorded("layers", folders["vit"])
    assert record["task"] == "image-classification"
    assert [e["layer"] for e in record["layers"]] == list(adapter.layers)
    first = record["layers"][0]
    assert first["spec"] == {"layout": "bnd", "width": 64, "grid": [4, 4], "prefix_tokens": 1}
    assert first["status"] == "verified"
    assert 0 < first["cost"] < record["layers"][-1]["cost"] <= 1


def test_layers_prints_a_table(folders: dict[str, Path]) -> None:
    result = run("layers", folders["cnn"])
    assert result.exit_code == 0
    (line,) = [line for line in result.stdout.splitlines() if "layer2.0" in line]
    assert all(word in line for word in ("bchw", "32", "4×4", "verified", "stubs"))


def test_layers_rejects_a_folder_without_a_model_and_suggests_the_nearest_architecture(tmp_path: Path) -> None:
    assert "no config.json" in error_line("layers", tmp_path)
    assert "did you mean 'resnet18'?" in error_line("layers", "timm:resnet_18")


# -- list --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(registries))
def test_list_shows_every_name(kind: str) -> None:
    result = run("list", kind, "--json")
    record = json.loads(result.stdout)
    assert [e["name"] for e in record] == list(registries[kind].names()) and result.stderr
    more = {"title", "direction", "range", "invariances"} if kind == "metrics" else set()
    assert all(set(e) == {"name", "origin", "source", "summary", *more} for e in record)


def test_list_shows_source_and_summary_of_a_matcher() -> None:
    (entry,) = [e for e in recorded("list", "matchers") if e["name"] == "lstsq"]
    assert entry["origin"] == "built-in"
    assert entry["source"] == "hf_stitch.matchers.regression:Lstsq"
    assert entry["summary"]


def test_list_check_shows_what_plugins_declare() -> None:
    pytest.importorskip("hf_stitch_diagonal")
    assert "least-squares line" in listing.imported("matchers", "diagonal")["summary"]


# -- stitch and evaluate -----------------------------------------------------------------------------------------------


def test_stitch_saves_everything_in_its_record(stitched: tuple[Path, dict[str, Any]]) -> None:
    out, record = stitched
    assert record["recipe"]["matcher"] == {"name": "low_rank", "rank": 4, "rcond": None}
    assert record["recipe"]["samples"] == 80
    assert record["evaluation"]["n"] == 40
    assert record["saved"].keys() == {"model", "stitcher", "evaluation", "plot"}
    assert all(Path(path).exists() for path in record["saved"].values())
    assert json.loads((out / "evaluation.json").read_text()) == record["evaluation"]
    Image.open(out / "evaluation.png").verify()


def test_evaluate_scores_both_artefacts_the_same(
    stitched: tuple[Path, dict[str, Any]], folders: dict[str, Path]
) -> None:
    """The stitched model and the stitcher have the same scores on samples that ``stitch`` did not use."""
    out, record = stitched
    data = ("--data", "sklearn:digits", "--split", "train", "--max-samples", 50)
    parents = ("--source", folders["cnn"], "--target", folders["vit"])
    model = recorded("evaluate", out / "model", *data, *parents)
    stitcher = recorded("evaluate", out / "stitcher", *data, *parents)
    assert model == stitcher
    assert model["n"] == 50
    assert model["data"] != record["evaluation"]["data"]
    assert model["scores"].keys() == record["evaluation"]["scores"].keys()


def test_audit_tells_whether_states_are_like_those_of_the_target(
    stitched: tuple[Path, dict[str, Any]], folders: dict[str, Path], tmp_path: Path
) -> None:
    arguments = ("audit", stitched[0] / "model", "--target", folders["vit"], "--data", "sklearn:digits", "--split")
    result = run(
        *arguments, "train", "--max-samples", 300, "--train-data", "sklearn:digits:test", "--out", tmp_path / "out",
        "--json",
    )  # fmt: skip
    record, shown = json.loads(result.stdout), result.stderr
    assert record["evaluation"]["n"] == 300
    assert set(record["detections"]["body"]) == {"mahalanobis", "knn"}
    assert record["verdict"] in " ".join(shown.split()) and "mahalanobis" in shown and "mean_only" in shown
    assert {*record["saved"]} == {"audit.json", "audit.png"} == {path.name for path in (tmp_path / "out").iterdir()}
    found = recorded(
        *arguments, "train", "--max-samples", 300, "--detector", "knn:k=3", "--max-dose", 0.5, "--far-data",
        "sklearn:digits:test",
    )  # fmt: skip
    assert list(found["detections"]["body"]) == ["knn(k=3)"] and found["max_dose"] == 0.5
    assert "far" in found["detections"]["body"]["knn(k=3)"]["controls"]
    line = error_line(*arguments, "test", "--max-samples", 300)
    assert "on which an audit shows nothing" in line


def test_evaluate_warns_about_samples_used_for_fitting(
    stitched: tuple[Path, dict[str, Any]], folders: dict[str, Path]
) -> None:
    arguments = ("evaluate", stitched[0] / "model", "--target", folders["vit"], "--data", "sklearn:digits", "--split")
    assert "was fitted to" in run(*arguments, "test", "--max-samples", 120).stderr
    assert "was fitted to" not in run(*arguments, "train", "--max-samples", 20).stderr


def test_evaluate_requires_networks_from_local_folders(stitched: tuple[Path, dict[str, Any]]) -> None:
    for folder, option in (("model", "--target"), ("stitcher", "--source")):
        result = run("evaluate", stitched[0] / folder, *DIGITS)
        assert result.exit_code == 2
        assert option in result.stderr


def test_evaluate_rejects_an_ordinary_model(folders: dict[str, Path]) -> None:
    assert "not of a stitched" in error_line("evaluate", folders["vit"], *DIGITS)


def stitch_arguments(folders: dict[str, Path], out: Path, *options: object) -> tuple[object, ...]:
    return (
        "stitch", folders["cnn"], folders["vit"], "--source-layer", "layer2.0", "--target-layer", "vit.layers.1",
        "--out", out, *DIGITS, *options,
    )  # fmt: skip


def test_stitch_rejects_an_unknown_layer_and_more_samples_than_available(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    assert "layer9" in error_line(*stitch_arguments(folders, tmp_path, "--source-layer", "layer9"))
    assert "at most 359" in error_line(*stitch_arguments(folders, tmp_path, "--max-samples", 1000))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--matcher", "ridge:rigde=1"), "did you mean 'ridge'"),
        (("--matcher", "low_rank"), "needs the option 'rank'"),
        (("--matcher", "procustes"), "did you mean 'procrustes'?"),
        (("--matcher", "ridge:ridge=-1"), "ridge"),
        (("--matcher", "ridge:rank"), "are written key=value"),
        (("--pooling", "all"), "is not one of 'none'"),
        (("--test-size", "1.5"), "must be a share below 1"),
    ],
)
def test_stitch_rejects_wrong_options(
    folders: dict[str, Path], tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    result = run(*stitch_arguments(folders, tmp_path / "out", *options))
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


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
    drawn_again = recorded(
        "swap", folders["vit"], folders["cnn"], "--target-layer", "vit.layers.3", "--anchors", "90", "--seed", "1",
        *DIGITS[:4], *place, tmp_path / "drawn",
    )["recipe"]["anchors"]  # fmt: skip
    assert drawn_again != record["recipe"]["anchors"]
    assert same_split["recipe"]["held_out_errors"] == record["recipe"]["held_out_errors"]
    shown = run(
        "swap", record["saved"]["model"], folders["cnn"], "--encoder-layer", "layer4.0", *DIGITS[:4],
        "--max-samples", "20", "--out", tmp_path / "shown",
    )  # fmt: skip
    assert f"90 of {everything} samples are anchors and left out of the scores; --anchor-split takes" in " ".join(
        shown.output.split()
    )
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
    back = recorded(
        "swap", again["saved"]["model"], folders["cnn"], "--encoder-layer", "layer4.0", "--pooling", "mean",
        *DIGITS[:4], "--out", tmp_path / "three",
    )  # fmt: skip
    assert back["evaluation"]["n"] == everything - 90
    assert again["recipe"]["matcher"] == {"name": "ridge", "ridge": 0.1, **{
        key: value for key, value in again["recipe"]["matcher"].items() if key not in ("name", "ridge")
    }}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--anchors", "9"), "which need --target-layer"),
        (("--selection", "random"), "which need --target-layer"),
        (("--task", "image-classification"), "which need --target-layer"),
        (("--target-layer", "x", "--selection", "kmeans"), "is not one of 'random', 'stratified'"),
    ],
)
def test_swap_rejects_options_without_effect(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    result = run("swap", "a", "b", "--encoder-layer", "x", *DIGITS[:4], "--out", tmp_path / "out", *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_swap_rejects_a_stitched_model_without_anchors(
    stitched: tuple[Path, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    place = ("--encoder-layer", "layer4.0", *DIGITS[:4], "--out", tmp_path / "x")
    assert "contains no anchors" in error_line("swap", stitched[0] / "model", folders["cnn"], *place)


# -- doctor ------------------------------------------------------------------------------------------------------------


def test_doctor_reports_cuts_and_inputs(folders: dict[str, Path]) -> None:
    record = recorded("doctor", folders["vit"])
    assert record["kind"] == "ViTForImageClassification"
    assert {e["status"] for e in record["layers"]} == {"verified"}
    shown = run("doctor", folders["vit"]).stdout
    assert "takes pixel_values (image)" in " ".join(shown.split())  # the length of the path decides where lines break


def test_doctor_exits_with_1_if_loading_fails(tmp_path: Path) -> None:
    result = run("doctor", tmp_path / "nothing")
    assert result.exit_code == 1
    assert "could not be loaded" in result.stdout


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
    wrong = run("grid", folders["cnn"], folders["vit"], "--detector", "knm", *DIGITS)
    assert wrong.exit_code == 2 and "did you mean 'knn'" in wrong.output


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


def test_messages_name_options_not_arguments_of_python(folders: dict[str, Path]) -> None:
    several = ("grid", folders["cnn"], folders["vit"], *DIGITS, "--test-size", "40")
    line = error_line(*several, "--detector", "energy")
    assert "pass --auxiliary-data, other samples than --far-data" in line and "auxiliary_data" not in line
    line = error_line(*several, "--layer-a", "layer2.0", "--layer-a", "layer2.0")
    assert line == "error: --layer-a contains 'layer2.0' more than once; name each layer once"
    line = error_line(*several, "--far-data", "sklearn:digits:train")
    assert "--far-data is a control of detectors, but none are named: pass --detector, or leave" in line


@pytest.mark.parametrize("command", ["stitch", "swap"])
def test_a_failed_command_leaves_no_empty_folder(command: str, folders: dict[str, Path], tmp_path: Path) -> None:
    kept, empty = tmp_path / "kept", tmp_path / "empty"
    kept.mkdir(), empty.mkdir()
    cut = ("--target-layer", "layer2.0", "--encoder-layer", "wrong") if command == "swap" else ()
    for out in (tmp_path / "new" / "run", kept / "run"):
        error_line(command, folders["cnn"], empty, *cut, *DIGITS, "--out", out)
    assert sorted(tmp_path.iterdir()) == [empty, kept] and not list(kept.iterdir())


def test_training_that_diverges_is_an_error_line(folders: dict[str, Path], tmp_path: Path) -> None:
    line = error_line(
        "stitch", folders["cnn"], folders["cnn"], "--source-layer", "layer2.0", "--target-layer", "layer2.0", *DIGITS,
        "--matcher", "task_loss:lr=1e37,max_steps=20", "--out", tmp_path / "out",
    )  # fmt: skip
    assert re.search("diverged, as the loss is (nan|inf) at step", line)  # which, depends on the processor
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("idle", [("--split", "nope"), ("--max-samples", 5), ("--label", "q"), ("--text", "t")])
def test_options_of_data_without_data_are_refused(idle: tuple[str, object]) -> None:
    failed = run("compare", "timm:nosuch", "timm:nosuch", "--metric", "weight_cosine", *idle)
    assert failed.exit_code == 2 and " ".join(failed.stderr.split()).find(f"{idle[0]} choose") > 0
