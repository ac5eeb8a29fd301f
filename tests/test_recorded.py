"""Recorded jobs: every bit of a result has a place, and what differs is told."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import recorded


def run(monkeypatch: pytest.MonkeyPatch, action: str, folder: Path, **jobs: Any) -> int:
    monkeypatch.setattr(recorded, "JOBS", jobs)
    monkeypatch.setattr(sys, "argv", ["recorded", action, str(folder)])
    return recorded.main()


def test_values_keep_every_bit() -> None:
    nested = {"figures": (0.1, math.nan, 1, True, None, "1"), "empty": [], "versions": {"torch": "2"}, 3: "x"}
    assert dict(recorded.values(nested)) == {
        "/figures/0": "0x1.999999999999ap-4", "/figures/1": "nan", "/figures/2": "1", "/figures/3": "True",
        "/figures/4": "None", "/figures/5": "'1'", "/empty": "[]", "/3": "'x'",
    }  # fmt: skip
    zeros = [torch.zeros(2), -torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, dtype=torch.bfloat16), torch.tensor(0)]
    assert len({dict(recorded.values(each))[""] for each in zeros}) == len(zeros)


def test_a_stitched_model_is_recorded_with_scores_recipe_and_weights() -> None:
    found = recorded.run("stitch-ridge")
    assert found["/saved/config.json/recipe/matcher/name"] == "'ridge'" and "error" not in found
    assert found["/saved/model.safetensors/stitch.body.weight"].startswith("torch.float32 (32, 32) ")
    assert "/evaluation/scores/stitched/accuracy/value" in found and not any("versions" in place for place in found)


def test_check_tells_each_value_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before: Any = {"same": lambda: [0.5], "other": lambda: {"score": 0.1, "gone": 1}}
    after = {**before, "other": lambda: {"score": math.nextafter(0.1, 1), "new": 2}}
    assert run(monkeypatch, "write", tmp_path, **before) == 0
    assert json.loads((tmp_path / "same.json").read_text()) == {"/0": "0x1.0000000000000p-1"}
    assert run(monkeypatch, "check", tmp_path, **before) == 0
    capsys.readouterr()
    assert run(monkeypatch, "check", tmp_path, **after) == 1
    told = capsys.readouterr().out
    assert "/score: 0x1.999999999999ap-4 -> 0x1.999999999999bp-4" in told
    assert "/gone: 1 -> absent" in told and "/new: absent -> 2" in told and "1 of 2 jobs differ" in told


def test_a_job_that_fails_is_told_and_never_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for action in ("write", "check"):
        assert run(monkeypatch, action, tmp_path, fails=lambda: [].pop()) == 1
        assert "IndexError: pop from empty list" in capsys.readouterr().out
