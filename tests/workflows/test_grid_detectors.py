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
from hf_stitch.storage.checkpoint import Checkpoint
from hf_stitch.training import TaskLoss

from killing import killed_at_every_operation  # isort: skip
from tiny_networks import network  # isort: skip


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


@pytest.mark.filterwarnings("error", "ignore:.* not better than ")
def test_scores_are_kept_unless_a_fit_has_other_bits(
    images: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "due", lambda self, done: self.lasting)
    first = watched(tmp_path / "job", images).to_dict()
    assert watched(tmp_path / "job", images).to_dict() == first
    monkeypatch.setattr(Unsteady, "factor", -1.0)
    with pytest.warns(UserWarning, match="the detectors differ from the .* scored again"):
        again = watched(tmp_path / "job", images).to_dict()
    assert again == watched(tmp_path / "other", images).to_dict() != first


def test_a_grid_killed_at_any_operation_resumes_to_the_same_bits(images: Any, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    whole = watched(tmp_path / "whole", images)
    kills = 0
    for _ in killed_at_every_operation(lambda: watched(tmp_path / "killed", images), step=4):
        assert watched(tmp_path / "killed", images).to_dict() == whole.to_dict()
        kills += 1
        shutil.rmtree(tmp_path / "killed")
    assert kills >= 10
