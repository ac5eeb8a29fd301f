"""``hf-stitch push``, ``pull`` and ``info``."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from fixture_networks import FIXTURES
from server import Hub
from typer.testing import CliRunner, Result

from hf_stitch import ModelReference, StitchedModel, Stitcher
from hf_stitch.cli import app
from hf_stitch.relative import RelativeProjection
from hf_stitch.representation import RepresentationSpec
from hf_stitch.stitches import StitchingLayer

NEWEST = sorted(FIXTURES.glob("*/model"))[-1].parent


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], prog_name="hf-stitch")


def recorded(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("kind", ["stitcher", "model"])
def test_pushed_and_pulled_artefacts_are_equal(kind: str, hub: Hub, tmp_path: Path) -> None:
    pushed = recorded("push", NEWEST / kind, "alice/one", "--private", "--message", "First")
    assert hub.models["alice/one"].private
    assert not [each for each in hub.requests if "/None/" in each], "a network without a name was looked up"
    pulled = recorded("pull", "alice/one", "--out", tmp_path / "here")
    assert pulled["commit"] == pushed["commit"] == hub.models["alice/one"].refs["main"]
    for path in (NEWEST / kind).iterdir():
        here = (tmp_path / "here" / path.name).read_bytes()
        assert here == hub.files("alice/one")[path.name]
        if path.suffix == ".safetensors":
            assert here == path.read_bytes()
    before, after = (recorded("layers", folder) for folder in (NEWEST / kind, tmp_path / "here"))
    assert before == after
    assert recorded("layers", "alice/one") == recorded("layers", tmp_path / "here")
    card = tmp_path / "here" / "README.md"
    assert "alice/one" in card.read_text()
    card.write_text(card.read_text() + "\nMy note.\n")
    recorded("push", tmp_path / "here", "alice/one")
    assert b"My note." in hub.files("alice/one")["README.md"]


def test_layers_of_an_artefact_shows_networks_map_and_scores_and_no_commands(hub: Hub, tmp_path: Path) -> None:
    shown = run("layers", NEWEST / "model").stdout
    for word in ("source", "target", "cut after vit.layers.0", "lstsq", "linear, 8 → 8", "stitched", "chance"):
        assert word in shown
    folder = Path(shutil.copytree(NEWEST / "stitcher", tmp_path / "stitcher"))
    record = json.loads((folder / "stitcher.json").read_text())
    harm = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
    record["recipe"]["matcher"] |= {"schedule": {"warmup": 0.1}, f"by{harm}": harm}
    record["source"]["reference"]["summary"] = "Net, 2 layers"
    (folder / "stitcher.json").write_text(json.dumps(record))
    shown = run("layers", folder).stdout
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", shown)
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines[1].startswith("┏") and lines[2] == "┃ entry ┃ value ┃"
    for row in ("│ source │ Net, 2 layers, cut after 1 │", "│ matcher │ ridge │", "│ fitted on │ 48 samples │"):
        assert row in lines, row


def test_a_pull_replaces_another_artefact(hub: Hub, tmp_path: Path) -> None:
    model = StitchedModel.from_pretrained(NEWEST / "model")
    old = model.push_to_hub("alice/one", max_shard_size="2KB").oid
    model.push_to_hub("alice/one")
    Stitcher.from_pretrained(NEWEST / "stitcher").push_to_hub("alice/two")
    for id, *options in (("alice/two",), ("alice/one", "--revision", old), ("alice/one",)):
        recorded("pull", id, "--out", tmp_path, *options)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == ["model.safetensors"]
    assert recorded("layers", tmp_path)["kind"] == "stitched model"


def test_layers_of_an_artefact_without_recorded_widths_and_with_incomplete_scores(hub: Hub, tmp_path: Path) -> None:
    spec, end = RepresentationSpec("bnd", 8), ModelReference("alice/a", "torch")
    layer = StitchingLayer(spec, RepresentationSpec("bnd", 6), "none", RelativeProjection(8, 6))
    Stitcher(layer, end, "x", end, "y").save_pretrained(tmp_path)
    assert "relative, 8 → 6" in run("layers", tmp_path).stdout
    record = json.loads((NEWEST / "model" / "config.json").read_text())
    del record["scores"]["n"]
    (tmp_path / "stitcher.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(record))
    result = run("layers", tmp_path)
    assert result.exit_code == 1
    assert "config.json is damaged" in result.stderr


def test_missing_artefacts_are_reported(hub: Hub, tmp_path: Path) -> None:
    network = tmp_path / "network"
    network.mkdir()
    (network / "config.json").write_text('{"architecture": "resnet18"}')
    for arguments, words in (
        (("push", network, "alice/one"), "config.json is the config of another network, not of a stitched model"),
        (("push", tmp_path, "alice/one"), "is not a stitcher or stitched model"),
        (("pull", "alice/none", "--out", tmp_path / "out"), "does not exist on the Hub"),
    ):
        result = run(*arguments)
        assert result.exit_code == 1
        assert words in result.stderr
    assert not (tmp_path / "out").exists()
