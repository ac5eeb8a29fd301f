"""``--plan`` of every command that takes long: a table or a record, and no files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calls import DIGITS, run  # isort: skip


@pytest.mark.parametrize("command", ["compare", "stitch", "grid"])
def test_commands_plan_and_write_nothing(command: str, folders: dict[str, Path], tmp_path: Path) -> None:
    result = run(command, *folders.values(), *DIGITS, "--plan", "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["seconds"] > 0 and "networks" in result.stderr
    assert not (tmp_path / "out").exists()
