"""Permutation tests share factorisations and stop early: compared with a computation anew for every permutation."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from hf_stitch.analysis import permutation_test
from hf_stitch.analysis.permutation import maximum_test
from hf_stitch.registry import registries

Array = np.ndarray

METRICS = [
    *("procrustes", "procrustes:squared=True", "procrustes:unit_norm=False", "shape_distance"),
    *("shape_distance:distance=euclidean", "linear_cka", "linear_cka:debiased=True", "rbf_cka", "rsa"),
    *("rsa:distance=euclidean,compare=pearson", "rsa:distance=cosine", "relative_cosine"),
    *("mutual_knn", "mutual_knn:distance=euclidean,k=3", "jaccard", "cca:ridge=0.1", "svcca:variance=0.6"),
]
"""Metrics that are defined for layers of any width."""
NARROW = [
    *("cca", "cca:squared=True", "svcca", "pwcca", "pwcca:directions=all", "shape_distance:alpha=0.3"),
    "linear_regression",
]
"""Metrics that take more samples than features."""


def rows(n: int, width: int, seed: int) -> Array:
    """Activations: a part that all networks share, noise of falling variance, a ReLU and a mean."""
    g, shared = np.random.default_rng(seed), np.random.default_rng(99).standard_normal((n, 6))
    noise = g.standard_normal((n, width)) * np.logspace(0, -2, width)
    return np.maximum(shared @ g.standard_normal((6, width)) / 4 + noise, -0.5) + 3


def anew(name: str, x: Array, y: Array, orders: list[Array]) -> Array:
    """The null values, each computed from the rows by the function of the metric."""
    metric = registries.metrics.build(name)
    return np.array([metric.function(x, y[order], **metric.options) for order in orders])


def permutations(n: int, count: int, seed: int) -> list[Array]:
    random = np.random.default_rng(seed)
    return [random.permutation(n) for _ in range(count)]


def check(name: str, x: Array, y: Array, count: int = 40) -> None:
    found = permutation_test(name, x, y, permutations=count, seed=5)
    values, (observed,) = anew(name, x, y, permutations(len(x), count, 5)), anew(name, x, y, [np.arange(len(x))])
    np.testing.assert_allclose(found.values, values, rtol=1e-9, atol=1e-11)
    assert found.observed == pytest.approx(observed, rel=1e-12)
    sign = 1 if registries.metrics.build(name).higher_is_better else -1
    assert found.p_value == (1 + (sign * (values - observed) >= -1e-12 * abs(observed)).sum()) / (1 + count)


@pytest.mark.parametrize("name", [*METRICS, *NARROW])
def test_null_values_equal_those_of_a_computation_anew(name: str) -> None:
    wide = [(30, 100, 70), (30, 40, 20), (30, 8, 90)]  # more features than samples
    for n, of_x, of_y in [(60, 12, 12), (60, 9, 14), *(wide if name in METRICS else [])]:
        check(name, rows(n, of_x, 0), rows(n, of_y, 1))


@pytest.mark.parametrize("name", ["procrustes", "shape_distance", "procrustes:unit_norm=False"])
def test_products_whose_singular_values_are_lost_in_rounding_keep_their_digits(name: str) -> None:
    """What a Gram matrix squares: falling spectra, dead and repeated features, repeated samples, an outlier."""
    g = np.random.default_rng(0)
    falling = [g.standard_normal((80, 30)) * np.logspace(0, -power, 30) for power in (4, 8, 12)]
    turned = [side @ np.linalg.qr(g.standard_normal((30, 30)))[0] for side in falling]
    coded = [np.eye(25)[g.integers(25, size=80)] for _ in range(2)]
    dead = g.standard_normal((80, 30)) * (np.arange(30) % 3 > 0)
    repeated, often = np.repeat(g.standard_normal((80, 10)), 3, 1), np.repeat(g.standard_normal((16, 90)), 5, 0)
    outlier = g.standard_normal((80, 30)) * np.where(np.arange(80) == 3, 1e6, 1)[:, None]
    low = (g.standard_normal((80, 4)) @ g.standard_normal((4, 30))).astype(np.float32).astype(float)
    sides = [*falling, *turned, *coded, dead, repeated, often, outlier, low]
    for x, y in zip(sides, [*sides[1:], sides[0]], strict=True):
        check(name, x, y, 12)


@pytest.mark.parametrize("name", ["procrustes", "cca", "mutual_knn:k=2", "rsa"])
def test_p_values_count_orders_that_give_the_same_rows(name: str) -> None:
    """Many permutations of repeated samples are the observed order, up to rounding."""
    x, y = rows(4, 2, 0), rows(4, 2, 1)
    samples = np.repeat(np.arange(4), 6)
    noise = np.random.default_rng(2).standard_normal((2, 24, 2))
    x, y = (np.repeat(side, 6, 0) + each for side, each in zip((x, y), noise, strict=True))
    found = permutation_test(name, x, y, samples=samples, permutations=120, seed=1)
    random = np.random.default_rng(1)
    orders = [np.concatenate([np.flatnonzero(samples == place) for place in random.permutation(4)]) for _ in range(120)]
    same = np.array([np.array_equal(order, np.arange(24)) for order in orders])
    assert same.any() and not same.all()
    assert np.abs(found.values[same] - found.observed).max() <= 1e-12 * abs(found.observed)
    values = anew(name, x, y, orders)
    sign = 1 if found.higher_is_better else -1
    assert found.p_value == (1 + (sign * (values - found.observed) >= -1e-12).sum()) / 121


@pytest.mark.parametrize(
    "name",
    ["procrustes", "cca", "pwcca", "mutual_knn", "svcca", "linear_cka:debiased=True", "rbf_cka", "rsa:compare=pearson"],
)
def test_the_test_of_the_best_pair_equals_a_computation_anew(name: str) -> None:
    metric, orders = registries.metrics.build(name), [np.arange(40), *permutations(40, 19, 3)]
    x, y = [rows(40, width, width) for width in (5, 8, 6)], [rows(40, width, width) for width in (7, 9)]
    values = np.moveaxis(np.array([[anew(name, a, b, orders) for b in y] for a in x]), 2, 0)
    scores = (values - values.mean(0)) / values.std(0) * (1 if metric.higher_is_better else -1)
    sides = [[torch.from_numpy(layer) for layer in side] for side in (x, y)]
    for memory in (2**30, 8 * 40**2 * 12):  # all layers of x at once; one at a time
        found = maximum_test(metric, *sides, permutations=19, seed=3, memory=memory)
        np.testing.assert_allclose(found.chance, values.mean(0), rtol=1e-10)
        np.testing.assert_allclose(found.scores, scores[0], rtol=1e-7, atol=1e-8)
        np.testing.assert_allclose(found.maxima, scores[1:].max((1, 2)), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", ["procrustes", "cca", "pwcca", "shape_distance"])
def test_each_layer_is_factorised_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def counted(function: str) -> Any:
        own = getattr(torch.linalg, function)

        def call(matrix: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            calls[function] += len(matrix) == 50 or matrix.shape[-1] == 50 or function == "cholesky"
            return own(matrix, *arguments, **options)

        return call

    for function in ("qr", "svd", "cholesky"):
        monkeypatch.setattr(torch.linalg, function, counted(function))
    wide = 1 if name in ("cca", "pwcca") else 10  # features in units of 8
    sides = [[torch.from_numpy(rows(50, 8 * wide + each, each)) for each in range(3)] for _ in range(2)]
    maximum_test(registries.metrics.build(name), *sides, permutations=30, seed=0, memory=2**30)
    assert 0 < calls.total() <= 2 * 6


# -- sequential tests --------------------------------------------------------------------------------------------------


def test_a_sequential_test_stops_at_its_tenth_value_as_similar_as_observed() -> None:
    x, y = rows(30, 4, 0), np.random.default_rng(1).standard_normal((30, 5))
    whole = permutation_test("procrustes", x, y, permutations=500, seed=2)
    short = permutation_test("procrustes", x, y, permutations=500, seed=2, sequential=True)
    hits = np.flatnonzero(whole.values <= whole.observed)
    assert len(hits) > 10 and len(short.values) == hits[9] + 1 < 500
    np.testing.assert_array_equal(short.values, whole.values[: hits[9] + 1])
    assert short.p_value == 10 / len(short.values) and short.enough == 10 and whole.enough is None
    related = permutation_test("procrustes", x, x + 0.1, permutations=99, sequential=True)
    assert len(related.values) == 99 and related.p_value == 0.01


def test_sequential_p_values_are_valid_without_similarity() -> None:
    """Besag and Clifford 1991: of all p, at most a share of p is as low, and each that can occur exactly so often."""
    found, sizes = [], []
    for seed in range(400):
        x, y = np.random.default_rng(seed).standard_normal((2, 10, 2))
        null = permutation_test("procrustes", x, y, permutations=39, seed=seed, sequential=True)
        found.append(null.p_value)
        sizes.append(len(null.values))
    p_values = np.array(found)
    for level in (0.025, 0.05, 0.1, 0.25, 0.5, 1.0):  # 1 / 40, …, 10 / 40; then 10 / the number of permutations
        assert stats.binomtest(int((p_values <= level + 1e-12).sum()), len(p_values), level).pvalue > 1e-3
    assert np.mean(sizes) < 25  # of 39


@pytest.mark.parametrize("name", ["mutual_knn", "mutual_knn:distance=euclidean", "jaccard"])
def test_equal_rows_are_no_evidence(name: str) -> None:
    """The numbers of the samples decide between neighbours at equal distances, on both sides of the observed value."""
    x, y = (np.eye(4)[np.random.default_rng(seed).integers(0, 4, 80)] for seed in (0, 1))
    check(name, x, y, 20)


@pytest.mark.parametrize(
    "name", ["cca:ridge=0.1", "cca", "svcca", "linear_cka", "procrustes", "shape_distance:alpha=0.3"]
)
def test_a_tiny_feature_counts_as_in_the_metric(name: str) -> None:
    x, y = rows(60, 3, 0) * np.array([1, 1, 1e-13]), rows(60, 4, 1)
    metric = registries.metrics.build(name)
    try:
        metric.function(x, y, **metric.options)
    except ValueError as error:
        with pytest.raises(ValueError, match=str(error)[:20]):
            permutation_test(name, x, y, permutations=5)
        return
    check(name, x, y, 5)
