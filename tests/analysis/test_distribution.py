"""Separation of stitched activations from the target's, on data with a known answer."""

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


def compared(stitched: np.ndarray, target: np.ndarray, trained: np.ndarray | None = None) -> Distribution:
    control = None if trained is None else rows(trained, trained)
    return compare_distributions(rows(stitched, target), control, resamples=200)


@pytest.fixture(scope="module")
def known() -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
    """Conditional mean of the target's activations given the source, and these activations, with a mean of 5."""
    g = np.random.default_rng(0)
    half = [g.standard_normal((N, D)) * SCALES for _ in range(2)]
    return 5 + 0.6 * half[0], 5 + 0.6 * half[0] + 0.8 * half[1], g


def test_the_target_s_own_activations_are_indistinguishable(known) -> None:
    _, y, _ = known
    found = compared(y, y, y)
    for score in (found.raw, found.compensated, found.separation, found.distance, found.control):
        assert (score.value, score.low, score.high) == (0.5, 0.5, 0.5)
    assert found.separated is False


def test_a_conditional_mean_is_in_distribution_although_it_is_shrunk(known) -> None:
    mean, y, _ = known
    found = compared(mean, y)
    assert found.raw.low > 0.8
    assert found.distance.high < 0.2
    assert 0.45 < found.compensated.value < 0.55
    assert (found.separated, found.side) == (False, "shrunk")


def test_the_mean_alone_is_in_distribution(known) -> None:
    _, y, _ = known
    assert compared(np.full_like(y, y.mean(0)), y).separated is False


def test_target_activations_of_other_samples_are_in_distribution(known) -> None:
    _, y, g = known
    found = compared(y[g.permutation(N)], y)
    assert found.compensated.low > 0.8
    assert found.raw.value == pytest.approx(0.5, abs=0.1)
    assert found.separated is False


@pytest.mark.parametrize(
    ("change", "side"),
    [
        (lambda y, g: 5 + 2 * (y - 5), "beyond"),
        (lambda y, g: 5 + 0.5 * (y - 5), "shrunk"),
        (lambda y, g: y + 2, "beyond"),
        (lambda y, g: 5 + (y - 5)[:, ::-1], "beyond"),  # swapped axes, and so swapped variances
        (lambda y, g: y + 0.5 * g.standard_normal(y.shape), "beyond"),
    ],
    ids=["twice", "half", "shifted", "rotated", "noisy"],
)
def test_activations_unlike_the_target_s_are_out_of_distribution(known, change, side: str) -> None:
    _, y, g = known
    found = compared(change(y, g).copy(), y, y)
    assert found.separated is True
    assert found.side == side


def test_a_rotation_that_preserves_all_distances_is_out_of_distribution(known) -> None:
    """Distances do not detect this rotation: the covariance is the target's with other correlations."""
    g = np.random.default_rng(1)
    z = g.standard_normal((N, 2))
    y = np.stack([z[:, 0], 0.9 * z[:, 0] + 0.44 * z[:, 1]], 1)
    white = np.linalg.cholesky(np.linalg.inv(np.cov(y.T)))
    stitched = (y @ white)[:, ::-1].copy()
    stitched[:, 0] *= np.sqrt(2)
    stitched[:, 1] *= np.sqrt(0.02)
    assert compared(stitched, y).separated is True


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 99), st.floats(0.1, 10), st.floats(-50, 50))
def test_scale_and_shift_of_both_sides_do_not_matter(seed: int, scale: float, shift: float) -> None:
    g = np.random.default_rng(seed)
    mean = g.standard_normal((200, 3))
    y = mean + g.standard_normal((200, 3))
    features = scale * np.array([1.0, 10.0, 0.1])
    before, after = compared(mean, y), compared(mean * features + shift, y * features + shift)
    for name in ("raw", "compensated", "distance"):
        assert getattr(after, name).value == pytest.approx(getattr(before, name).value, abs=1e-3)


def test_the_result_is_undecided_if_the_control_separates(known) -> None:
    _, y, _ = known
    found = compared(y, y, 5 + 3 * (y - 5))
    assert found.control.low > 0.64
    assert found.separated is None


def test_a_constant_feature_of_the_target_is_supported(known) -> None:
    mean, y, _ = known
    y = np.c_[y, np.full(N, 7.0)]
    assert compared(np.c_[mean, np.full(N, 7.0)], y).separated is False
    assert compared(np.c_[mean, np.full(N, 8.0)], y).separated is True


def test_too_few_rows_and_dead_layers_are_rejected() -> None:
    g = np.random.default_rng(0)
    y = g.standard_normal((20, D))
    with pytest.raises(ValueError, match=r"have 10 rows of 6 features.* at least 14 rows: give more samples"):
        compared(y, y)
    with pytest.raises(ValueError, match="all equal"):
        compared(np.ones((40, D)), np.ones((40, D)))


def test_the_auroc_matches_scikit_learn_with_ties_and_weights() -> None:
    from sklearn.metrics import roc_auc_score

    g = np.random.default_rng(0)
    up, down = g.integers(0, 9, 50).astype(float) + 2, g.integers(0, 9, 70).astype(float)
    drawn = _auroc(up, down, paired=False, resamples=60, seed=3)
    truth = np.r_[np.ones(50), np.zeros(70)]
    assert drawn[0] == pytest.approx(roc_auc_score(truth, np.r_[up, down]))
    first = [np.random.default_rng(seed) for seed in (3, 4)]
    weights = [r.multinomial(n, np.full(n, 1 / n), size=50)[0] for r, n in zip(first, (50, 70), strict=True)]
    assert drawn[1] == pytest.approx(roc_auc_score(truth, np.r_[up, down], sample_weight=np.concatenate(weights)))


def test_a_distribution_converts_to_json_and_back(known) -> None:
    mean, y, _ = known
    for found in (compared(mean, y), compared(mean, y, y)):
        assert decode(Distribution, json.loads(json.dumps(encode(found), allow_nan=False)), "a distribution") == found
