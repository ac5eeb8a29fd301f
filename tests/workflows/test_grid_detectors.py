"""Detectors in grids: resumed jobs, and what the grid shows of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import hf_stitch
from hf_stitch.analysis.grid import StitchGrid
from hf_stitch.detectors import Scorer
from hf_stitch.detectors.gaussian import Mahalanobis
from hf_stitch.representation import Representation
from hf_stitch.scoring.passing import Scoring
from hf_stitch.storage.checkpoint import Checkpoint
from hf_stitch.training import TaskLoss

from killing import killed_at_every_operation  # isort: skip
from tiny_networks import network  # isort: skip


class Interrupted(BaseException):
    """As by a keyboard; pytest would end at a ``KeyboardInterrupt`` that a test does not expect."""


class _Times(Scorer):
    def __init__(self, scorer: Scorer, factor: float) -> None:
        self.scorer, self.factor = scorer, factor

    def score(self, activations: Representation) -> torch.Tensor:
        return self.factor * self.scorer.score(activations)


@dataclass(frozen=True)
class Unsteady(Mahalanobis):
    """Its fit depends on more than its activations, as training does on the number of threads."""

    factor: ClassVar[float] = 1.0

    def _fit(self, activations: Iterable[Representation]) -> Scorer:
        return _Times(super()._fit(activations), self.factor)


def watched(folder: Any, images: Any) -> StitchGrid:
    a, b = (network("cnn", seed, "float64") for seed in (0, 1))
    data = hf_stitch.Samples.of([{**row, "image": row["image"].double()} for row in images[:48]])
    return hf_stitch.stitch_grid(
        a, b, data, layers_a=["layer1.0"], layers_b=["layer1.0"],
        matchers=["lstsq", TaskLoss(max_steps=2, batch_size=16)], detectors=[Unsteady(), "likelihood_ratio"],
        test_size=16, batch_size=8, checkpoint_dir=folder, resamples=5, progress=False,
    )  # fmt: skip


@pytest.fixture
def stops_after_one_batch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of batches that are still scored before the job is interrupted; -1: it is not."""
    monkeypatch.setattr(Checkpoint, "due", lambda self, done: self.lasting)
    left, original = [-1], Scoring._measure

    def measure(self: Scoring, batch: Any, twin: Any) -> Any:
        if left[0] == 0:
            raise Interrupted
        left[0] -= 1
        return original(self, batch, twin)

    monkeypatch.setattr(Scoring, "_measure", measure)
    return left


@pytest.mark.filterwarnings("error", "ignore:.* no better than ")
def test_what_was_scored_is_kept_unless_a_fit_has_other_bits(
    images: Any, tmp_path: Any, stops_after_one_batch: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = stops_after_one_batch
    left[0] = 1
    with pytest.raises(Interrupted):
        watched(tmp_path / "job", images)
    shutil.copytree(tmp_path / "job", tmp_path / "half")
    left[0] = 1  # 16 samples are scored, in two batches: one is left
    resumed = watched(tmp_path / "job", images)
    left[0] = 0
    assert watched(tmp_path / "job", images).to_dict() == resumed.to_dict()  # nothing is left to do
    left[0] = -1
    assert watched(tmp_path / "whole", images).to_dict() == resumed.to_dict()
    monkeypatch.setattr(Unsteady, "factor", -1.0)
    expected = watched(tmp_path / "other", images).to_dict()
    for name in ("job", "half"):
        with pytest.warns(UserWarning, match="the detectors differ from those .* scored anew"):
            assert watched(tmp_path / name, images).to_dict() == expected


def test_a_grid_killed_at_any_operation_resumes_to_the_same_bits(images: Any, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    whole = watched(tmp_path / "whole", images)
    kills = 0
    for _ in killed_at_every_operation(lambda: watched(tmp_path / "killed", images), step=2):
        assert watched(tmp_path / "killed", images).to_dict() == whole.to_dict()
        kills += 1
        shutil.rmtree(tmp_path / "killed")
    assert kills >= 20
