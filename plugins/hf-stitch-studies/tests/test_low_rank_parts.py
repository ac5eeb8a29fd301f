"""The matcher of the low-rank example against least squares on rows that are approximated first."""

from __future__ import annotations

import importlib
from types import ModuleType

import numpy as np
import pytest
import torch

from hf_stitch.statistics import Moments

pytestmark = pytest.mark.slow


@pytest.fixture
def example() -> ModuleType:
    return importlib.import_module("how_not_to_stitch.low_rank_layers")


@pytest.fixture
def rows() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 6)) * [5, 3, 2, 1, 0.5, 0.1] + 7
    return x, x @ random.normal(size=(6, 5)) + random.normal(size=(200, 5)) - 3


def approximated(rows: np.ndarray, rank: int) -> np.ndarray:
    left, values, right = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    return (left[:, :rank] * values[:rank]) @ right[:rank] + rows.mean(0)


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_it_is_least_squares_between_approximations(
    example: ModuleType, rows: tuple[np.ndarray, np.ndarray], rank: int
) -> None:
    x, y = rows
    stitch = example.LowRankParts(rank=rank).fit(Moments(6, 5).update(*map(torch.from_numpy, rows)), torch.float64)
    low_x, low_y = approximated(x, rank), approximated(y, rank)
    design = np.column_stack([low_x, np.ones(len(x))])
    fitted = design @ np.linalg.lstsq(design, low_y, rcond=1e-9)[0]
    with torch.no_grad():
        mapped = stitch(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(mapped, fitted, atol=1e-8)  # rows of full rank: the map approximates them itself
    unexplained = ((fitted - low_y) ** 2).sum() / ((low_y - low_y.mean(0)) ** 2).sum()
    assert stitch.fitted["r2"] == pytest.approx(1 - unexplained, abs=1e-9)
    assert (stitch.fitted["rank_x"], stitch.fitted["rank_y"]) == (rank, rank)


def test_a_share_of_the_variance_chooses_the_rank_of_each_side(
    example: ModuleType, rows: tuple[np.ndarray, np.ndarray]
) -> None:
    stitch = example.LowRankParts(variance=0.9).fit(Moments(6, 5).update(*map(torch.from_numpy, rows)))
    for side, of_side in zip("xy", rows, strict=True):
        held = np.cumsum(np.linalg.svd(of_side - of_side.mean(0), compute_uv=False) ** 2)
        assert stitch.fitted[f"rank_{side}"] == int(np.argmax(held >= 0.9 * held[-1])) + 1


def test_random_directions_of_full_rank_are_all_directions(
    example: ModuleType, rows: tuple[np.ndarray, np.ndarray]
) -> None:
    moments = Moments(6, 5).update(*map(torch.from_numpy, rows))
    drawn = example.LowRankParts(rank=5, random=True)
    directions = drawn.directions(moments.syy, 3)
    torch.testing.assert_close(directions @ directions.T, torch.eye(5, dtype=torch.float64))
    first, second = (example.LowRankParts(rank=2, random=True, seed=seed).fit(moments).weight for seed in (0, 1))
    assert torch.linalg.matrix_rank(first) == 2 and not torch.allclose(first, second)
