"""The metrics conform, have the values of other implementations, and refuse what is undefined."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import scipy.spatial.distance as sd
import torch
from hf_stitch_metrics import correlation_matching, frechet, soft_matching
from hypothesis import given, settings, strategies as st

import hf_stitch
from hf_stitch import Activations, Moments, registries
from hf_stitch.analysis import SimilarityAtlas, permutation_test
from hf_stitch.analysis.permutation import maximum_test
from hf_stitch.metrics import direct_matching
from hf_stitch.registry import UnknownNameError

from tests.metrics.metric_rows import case, centred, related  # isort: skip

METRICS: list[tuple[str, dict[str, Any]]] = [
    ("correlation_matching", {}), ("correlation_matching", {"assignment": "soft"}), ("distance_correlation", {}),
    ("frechet", {}), ("soft_matching", {}), ("soft_matching", {"compare": "distance"}),
]  # fmt: skip
ORACLES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("oracles.json").read_text())
"""Values of ReSi and netrep, and the recipes of their rows."""
ORACLE_OF: dict[str, tuple[str, dict[str, Any]]] = {
    "distance_correlation": ("distance_correlation", {}),
    "correlation_matching_hard": ("correlation_matching", {}),
    "correlation_matching_soft": ("correlation_matching", {"assignment": "soft"}),
}


X, Y = related(60, 6, 4)


def test_it_is_used_by_name_with_its_paper() -> None:
    assert registries.metrics.entry("frechet").origin == "plugin hf-stitch-metrics 0.1.0"
    assert {name for name, _ in METRICS} <= {*registries.metrics}
    assert all(registries.metrics.get(name).papers for name, _ in METRICS)


# -- values ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("recipe", "key", "value"),
    [(each["recipe"], *pair) for each in ORACLES.values() for pair in each["values"].items()],
)
def test_values_of_independent_implementations(recipe: dict[str, Any], key: str, value: float) -> None:
    name, options = ORACLE_OF[key]
    x, y = (side[: 600 if name == "distance_correlation" else None] for side in case(**recipe))
    metric = registries.metrics.build(name, **options)
    dense = metric.function(x, y, **metric.options)
    assert dense == pytest.approx(value, rel=1e-6)
    for start in range(0, len(x), 7):
        metric.update(x[start : start + 7], y[start : start + 7])
    assert metric.compute() == pytest.approx(dense, rel=1e-8)


def test_the_frechet_distance_is_that_of_the_matrix_square_root() -> None:
    g = np.random.default_rng(0)
    x, y = X @ g.standard_normal((X.shape[1], Y.shape[1])) + 1, Y
    cov_x, cov_y = np.cov(x.T, bias=True), np.cov(y.T, bias=True)
    root = scipy.linalg.sqrtm(cov_x @ cov_y).real
    apart = np.sum((x.mean(0) - y.mean(0)) ** 2) + np.trace(cov_x + cov_y - 2 * root)
    assert frechet(x, y) == pytest.approx(apart / (y**2).sum() * len(y), rel=1e-8)
    assert frechet(g.permutation(y), y) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("rank_x", "rank_y"), [(2, 10), (10, 2), (2, 2), (1, 3)])
def test_the_frechet_distance_of_low_rank_is_the_same_from_rows_and_moments(rank_x: int, rank_y: int) -> None:
    g = np.random.default_rng(1)
    x, y = (g.standard_normal((300, rank)) @ g.standard_normal((rank, 10)) + 1 for rank in (rank_x, rank_y))
    moments = Moments(10, 10).update(torch.from_numpy(x), torch.from_numpy(y))
    # The nuclear norm of the n x n product of centred rows needs neither roots nor eigenvalues.
    centred_x, centred_y = x - x.mean(0), y - y.mean(0)
    overlap = np.linalg.svd(centred_x @ centred_y.T, compute_uv=False).sum()
    apart = len(x) * np.sum((x.mean(0) - y.mean(0)) ** 2) + (centred_x**2).sum() + (centred_y**2).sum() - 2 * overlap
    for found in (frechet(x, y), registries.metrics.build("frechet").from_moments(moments)):
        assert float(found) == pytest.approx(apart / (y**2).sum(), abs=1e-9)


def test_the_frechet_distance_is_at_most_the_residual_of_any_order() -> None:
    g = np.random.default_rng(0)
    for _ in range(20):
        rank = g.integers(1, Y.shape[1] + 1)
        x = g.standard_normal((len(Y), rank)) @ g.standard_normal((rank, Y.shape[1]))
        assert frechet(x, Y) <= direct_matching(g.permutation(x), Y) + 1e-12


def test_the_frechet_distance_has_a_gradient_where_activations_do_not_vary() -> None:
    x = torch.zeros(40, 3, dtype=torch.float64, requires_grad=True)
    frechet(x, torch.randn(40, 3, dtype=torch.float64) + 1).backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())


@pytest.mark.parametrize("widths", [(3, 3), (2, 4), (4, 6), (3, 5)], ids=str)
def test_soft_matching_of_replicated_units(widths: tuple[int, int]) -> None:
    """Uniform masses 1/p and 1/q: split every unit into equal parts, and the plan is a permutation of parts."""
    x, y = related(40, *widths)
    both = np.corrcoef(x.T, y.T)[: widths[0], widths[0] :]
    parts = math.lcm(*widths)
    split = both.repeat(parts // widths[0], 0).repeat(parts // widths[1], 1)
    rows, columns = scipy.optimize.linear_sum_assignment(-split)
    assert soft_matching(x, y) == pytest.approx(split[rows, columns].mean(), rel=1e-9)
    costs = sd.cdist(centred(x).T, centred(y).T, "sqeuclidean")
    split = costs.repeat(parts // widths[0], 0).repeat(parts // widths[1], 1)
    rows, columns = scipy.optimize.linear_sum_assignment(split)
    assert soft_matching(x, y, compare="distance") == pytest.approx(math.sqrt(split[rows, columns].mean()), rel=1e-9)


def test_hard_correlation_matching_is_the_best_permutation() -> None:
    x, y = related(40, 4, 4)
    both = np.corrcoef(x.T, y.T)[:4, 4:]
    best = max(both[range(4), order].mean() for order in map(list, itertools.permutations(range(4))))
    assert correlation_matching(x, y) == pytest.approx(best, rel=1e-10)
    # Of unequal widths the units that match best count.
    assert correlation_matching(x, y[:, 1:]) == pytest.approx(
        max(
            both[list(rows), list(columns)].mean()
            for rows in itertools.permutations(range(4), 3)
            for columns in [(1, 2, 3)]
        )
    )


@settings(max_examples=20, deadline=None)
@given(n=st.integers(20, 60), dx=st.integers(2, 6), dy=st.integers(2, 6), seed=st.integers(0, 10**6))
def test_the_best_partners_correlate_at_least_as_the_best_plan(n: int, dx: int, dy: int, seed: int) -> None:
    x, y = related(n, dx, dy, seed=seed)
    assert correlation_matching(x, y, assignment="soft") >= soft_matching(x, y) - 1e-12


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), widths=st.tuples(*[st.integers(2, 6)] * 3))
def test_triangle_inequality_of_soft_matching(seed: int, widths: tuple[int, int, int]) -> None:
    g = np.random.default_rng(seed)
    x, y, z = (np.exp(2 * g.standard_normal()) * g.standard_normal((30, width)) for width in widths)
    of_xz, of_xy, of_yz = (soft_matching(*pair, compare="distance") for pair in ((x, z), (x, y), (y, z)))
    assert of_xz <= of_xy + of_yz + 1e-9


@pytest.mark.parametrize("deviations", [30.0, 300.0])
@pytest.mark.parametrize("name", ["distance_correlation", "correlation_matching", "soft_matching"])
def test_a_far_mean_in_float32_changes_little(name: str, deviations: float) -> None:
    function = registries.metrics.get(name).function
    x, y = (torch.from_numpy(side / side.std(0)).float() for side in related(200, 6, 5, mean=0.0))
    near, far = function(x, y).item(), function(x + deviations, y - deviations).item()
    assert far == pytest.approx(near, rel=1e-7 * deviations, abs=1e-7 * deviations)


# -- permutation tests -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["correlation_matching", "distance_correlation", "frechet"])
def test_null_values_equal_those_of_a_computation_anew(name: str) -> None:
    metric, random = registries.metrics.build(name), np.random.default_rng(5)
    for x, y in [related(60, 12, 12), related(60, 9, 14)] if name != "frechet" else [related(60, 12, 12)]:
        found = permutation_test(name, x, y, permutations=40, seed=5)
        random = np.random.default_rng(5)
        anew = [metric.function(x, y[random.permutation(60)]) for _ in range(40)]
        np.testing.assert_allclose(found.values, anew, rtol=1e-9, atol=1e-11)
        assert found.observed == pytest.approx(metric.function(x, y), rel=1e-12)


def test_the_test_of_the_best_pair_equals_a_computation_anew() -> None:
    metric, random = registries.metrics.build("distance_correlation"), np.random.default_rng(3)
    orders = [np.arange(40), *(random.permutation(40) for _ in range(19))]
    x, y = [related(40, width, 3, width)[0] for width in (5, 8, 6)], [related(40, 3, width, 1)[1] for width in (7, 9)]
    values = np.array([[[metric.function(a, b[order]) for b in y] for a in x] for order in orders])
    scores = (values - values.mean(0)) / values.std(0)
    sides = [[torch.from_numpy(layer) for layer in side] for side in (x, y)]
    found = maximum_test(metric, *sides, permutations=19, seed=3, memory=2**30)
    np.testing.assert_allclose(found.chance, values.mean(0), rtol=1e-10)
    np.testing.assert_allclose(found.scores, scores[0], rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(found.maxima, scores[1:].max((1, 2)), rtol=1e-7, atol=1e-8)


def test_a_copy_has_the_best_value() -> None:
    null = permutation_test("distance_correlation", X, X, permutations=49)
    assert null.calibrated == pytest.approx(1, abs=1e-6)
    assert (null.p_value, null.z > 3) == (0.02, True)


# -- what is undefined -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["correlation_matching", "soft_matching"])
def test_constant_features_are_refused(name: str) -> None:
    x, y = related(60, 5, 5)
    x[:, 3] = 0.1
    with pytest.raises(ValueError, match=rf"{name}: 1 of 5 features of x are constant \(the first: 3\)"):
        registries.metrics.get(name).function(x, y)
    constant = torch.randn(40, 3)
    constant[:, 1] = 0.5
    partly = Activations({"partly": constant}, range(40))
    with pytest.raises(ValueError, match=rf"{name} is undefined for all .* layer 'partly' .* 1 of 3 features of x"):
        hf_stitch.compare(partly, partly, metrics=[name], progress=False)


@pytest.mark.parametrize("side", ["x", "y"])
def test_rows_that_are_all_equal_are_refused(side: str) -> None:
    pair = (np.tile(0.1 + np.arange(5.0), (60, 1)), related(60, 5, 5)[1])
    with pytest.raises(ValueError, match=rf"distance_correlation: all 60 rows of {side} are equal"):
        registries.metrics.get("distance_correlation").function(*(pair if side == "x" else pair[::-1]))


# -- without the plugin ------------------------------------------------------------------------------------------------
def test_what_was_saved_is_read_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Activations({"l": torch.randn(40, 3)}, range(40))
    atlas = hf_stitch.compare(layers, layers, metrics=["frechet", "soft_matching"], permutations=9, progress=False)
    atlas.save(tmp_path / "atlas.json")
    hf_stitch.report([atlas], tmp_path / "page.html")
    monkeypatch.setitem(vars(registries.metrics), "_plugins", {})
    assert "frechet" not in registries.metrics
    (paged,) = hf_stitch.load_report(tmp_path / "page.html")
    for read in (SimilarityAtlas.load(tmp_path / "atlas.json"), paged):
        assert list(read.values) == ["frechet", "soft_matching"]
        assert read["frechet"].item() == atlas["frechet"].item()
        assert "frechet" in str(read) and read.to_dict() == atlas.to_dict()
    with pytest.raises(UnknownNameError, match=r"'frechet'.* comes with hf-stitch-metrics: pip install"):
        hf_stitch.compare(layers, layers, metrics=["frechet"], progress=False)
