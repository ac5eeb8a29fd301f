"""The score that tells stitched representations from real ones, where the truth is known."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_stitch.analysis.distribution import Distribution, Rows, _auroc, compare_distributions
from hf_stitch.results import decode, encode
from hf_stitch.statistics import Moments

N, D = 1200, 6
SCALES = np.array([3.0, 2.0, 1.5, 1.0, 0.5, 0.3])


def rows(stitched: np.ndarray, target: np.ndarray) -> Rows:
    halves = [
        Moments(stitched.shape[1], target.shape[1]).update(
            torch.from_numpy(stitched[h::2].copy()), torch.from_numpy(target[h::2].copy())
        )
        for h in (0, 1)
    ]
    return Rows({"stitched": stitched, "target": target}, halves)


def told(stitched: np.ndarray, target: np.ndarray, trained: np.ndarray | None = None) -> Distribution:
    control = None if trained is None else rows(trained, trained)
    return compare_distributions(rows(stitched, target), control, resamples=200)


@pytest.fixture(scope="module")
def known() -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
    """What the source knows of the target's representation, and the whole of it, about a mean of 5."""
    g = np.random.default_rng(0)
    half = [g.standard_normal((N, D)) * SCALES for _ in range(2)]
    return 5 + 0.6 * half[0], 5 + 0.6 * half[0] + 0.8 * half[1], g


def test_the_target_s_own_representations_cannot_be_told(known) -> None:
    _, y, _ = known
    found = told(y, y, y)
    for score in (found.raw, found.compensated, found.separation, found.distance, found.control):
        assert (score.value, score.low, score.high) == (0.5, 0.5, 0.5)
    assert found.separated is False


def test_a_conditional_mean_is_in_distribution_though_it_has_shrunk(known) -> None:
    mean, y, _ = known
    found = told(mean, y)
    assert found.raw.low > 0.8
    assert found.distance.high < 0.2
    assert 0.45 < found.compensated.value < 0.55
    assert (found.separated, found.side) == (False, "shrunk")


def test_the_mean_alone_is_the_conditional_mean_of_who_knows_nothing(known) -> None:
    _, y, _ = known
    assert told(np.full_like(y, y.mean(0)), y).separated is False


def test_other_real_representations_are_in_distribution_whichever_sample_they_are_of(known) -> None:
    _, y, g = known
    found = told(y[g.permutation(N)], y)
    assert found.compensated.low > 0.8
    assert found.raw.value == pytest.approx(0.5, abs=0.1)
    assert found.separated is False


@pytest.mark.parametrize(
    ("change", "side"),
    [
        (lambda y, g: 5 + 2 * (y - 5), "beyond"),
        (lambda y, g: 5 + 0.5 * (y - 5), "shrunk"),
        (lambda y, g: y + 2, "beyond"),
        (lambda y, g: 5 + (y - 5)[:, ::-1], "beyond"),  # the axes swapped: wide where the target is narrow
        (lambda y, g: y + 0.5 * g.standard_normal(y.shape), "beyond"),
    ],
    ids=["twice", "half", "shifted", "rotated", "noisy"],
)
def test_what_the_target_never_says_is_out(known, change, side: str) -> None:
    _, y, g = known
    found = told(change(y, g).copy(), y, y)
    assert found.separated is True
    assert found.side == side


def test_a_rotation_that_keeps_every_distance_is_out(known) -> None:
    """One-dimensional distances see nothing: of the target's own covariance, correlations turned round."""
    g = np.random.default_rng(1)
    z = g.standard_normal((N, 2))
    y = np.stack([z[:, 0], 0.9 * z[:, 0] + 0.44 * z[:, 1]], 1)
    white = np.linalg.cholesky(np.linalg.inv(np.cov(y.T)))
    stitched = (y @ white)[:, ::-1].copy()
    stitched[:, 0] *= np.sqrt(2)
    stitched[:, 1] *= np.sqrt(0.02)
    assert told(stitched, y).separated is True


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 99), st.floats(0.1, 10), st.floats(-50, 50))
def test_scale_and_shift_of_both_sides_change_nothing(seed: int, scale: float, shift: float) -> None:
    g = np.random.default_rng(seed)
    mean = g.standard_normal((200, 3))
    y = mean + g.standard_normal((200, 3))
    features = scale * np.array([1.0, 10.0, 0.1])
    before, after = told(mean, y), told(mean * features + shift, y * features + shift)
    for name in ("raw", "compensated", "distance"):
        assert getattr(after, name).value == pytest.approx(getattr(before, name).value, abs=1e-3)


def test_where_the_control_separates_nothing_can_be_told(known) -> None:
    _, y, _ = known
    found = told(y, y, 5 + 3 * (y - 5))
    assert found.control.low > 0.64
    assert found.separated is None


def test_a_feature_that_the_target_never_varies_counts_and_breaks_nothing(known) -> None:
    mean, y, _ = known
    y = np.c_[y, np.full(N, 7.0)]
    assert told(np.c_[mean, np.full(N, 7.0)], y).separated is False
    assert told(np.c_[mean, np.full(N, 8.0)], y).separated is True


def test_too_few_rows_and_dead_layers_are_refused() -> None:
    g = np.random.default_rng(0)
    y = g.standard_normal((20, D))
    with pytest.raises(ValueError, match=r"have 10 rows of 6 features.* take 14: give more samples"):
        told(y, y)
    with pytest.raises(ValueError, match="all equal"):
        told(np.ones((40, D)), np.ones((40, D)))


def test_the_auroc_is_that_of_scikit_learn_with_ties_and_with_weights() -> None:
    from sklearn.metrics import roc_auc_score

    g = np.random.default_rng(0)
    up, down = g.integers(0, 9, 50).astype(float) + 2, g.integers(0, 9, 70).astype(float)
    drawn = _auroc(up, down, paired=False, resamples=60, seed=3)
    truth = np.r_[np.ones(50), np.zeros(70)]
    assert drawn[0] == pytest.approx(roc_auc_score(truth, np.r_[up, down]))
    first = [np.random.default_rng(seed) for seed in (3, 4)]
    weights = [r.multinomial(n, np.full(n, 1 / n), size=50)[0] for r, n in zip(first, (50, 70), strict=True)]
    assert drawn[1] == pytest.approx(roc_auc_score(truth, np.r_[up, down], sample_weight=np.concatenate(weights)))


def test_it_goes_through_json(known) -> None:
    mean, y, _ = known
    for found in (told(mean, y), told(mean, y, y)):
        assert decode(Distribution, json.loads(json.dumps(encode(found), allow_nan=False)), "a distribution") == found
