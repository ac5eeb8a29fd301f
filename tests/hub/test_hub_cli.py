"""``hf-stitch push``, ``pull`` and ``info``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from make_fixtures import FIXTURES
from server import Hub
from typer.testing import CliRunner, Result

from hf_stitch.cli import app

NEWEST = sorted(FIXTURES.iterdir())[-1]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], prog_name="hf-stitch")


def recorded(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("kind", ["stitcher", "model"])
def test_pushed_and_pulled_it_is_the_same(kind: str, hub: Hub, tmp_path: Path) -> None:
    pushed = recorded("push", NEWEST / kind, "alice/one", "--private", "--message", "First")
    assert hub.models["alice/one"].private
    pulled = recorded("pull", "alice/one", "--out", tmp_path / "here")
    assert pulled["commit"] == pushed["commit"] == hub.models["alice/one"].refs["main"]
    for path in (NEWEST / kind).iterdir():
        if path.name != "README.md":
            assert (tmp_path / "here" / path.name).read_bytes() == path.read_bytes()
    assert recorded("info", "alice/one") == recorded("info", tmp_path / "here")
    assert "alice/one" in (tmp_path / "here" / "README.md").read_text()


def test_info_shows_parents_map_and_scores(hub: Hub) -> None:
    shown = run("info", NEWEST / "model").stdout
    for word in ("source", "target", "cut behind vit.layers.0", "lstsq", "linear, 8 → 8", "stitched", "chance"):
        assert word in shown
    assert "ridge" in run("info", NEWEST / "stitcher").stdout


def test_what_is_missing_or_wrong_is_told(hub: Hub, tmp_path: Path) -> None:
    for arguments, words in (
        (("info", "alice/none"), "the Hub has no such model"),
        (("info", tmp_path), "holds no stitcher and no stitched model"),
        (("push", tmp_path, "alice/one"), "holds no stitcher and no stitched model"),
        (("pull", "alice/none", "--out", tmp_path / "out"), "the Hub has no such model"),
    ):
        result = run(*arguments)
        assert result.exit_code == 1
        assert words in result.stderr
    assert not (tmp_path / "out").exists()
