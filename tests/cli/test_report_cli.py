"""``--report``: a page with the command."""

from __future__ import annotations

from pathlib import Path

import pytest

import hf_stitch

from calls import DIGITS, run  # isort: skip


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
