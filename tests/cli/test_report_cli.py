"""``--report``: a page with the command, checked before any work."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import hf_stitch
from hf_stitch.cli import app


@pytest.mark.parametrize(("command", "result"), [("compare", "SimilarityAtlas"), ("stitch", "Evaluation")])
def test_a_page_is_written(
    command: str, result: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = map(str, folders.values())
    place = tmp_path / "page.html"
    call = [command, a, b, "--data", "sklearn:digits", "--split", "test", "--max-samples", "100"]
    call += ["--out", str(tmp_path / "out"), "--report", str(place)]
    if command == "stitch":
        call += ["--pooling", "mean"]
    monkeypatch.setattr("sys.argv", ["hf-stitch", *call])
    found = CliRunner().invoke(app, call)
    assert found.exit_code == 0, found.output
    (read,) = hf_stitch.load_report(place)
    names = " ".join(folder.name for folder in folders.values())
    assert type(read).__name__ == result and f"Again: <code>hf-stitch {command} {names} --data" in place.read_text()
    assert str(tmp_path.parent) not in place.read_text()
