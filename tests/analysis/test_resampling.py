from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import cohen_kappa_score
from torch import nn

from hf_stitch import metrics
from hf_stitch.analysis import bootstrap, permutation_test
from hf_stitch.registry import registries

ROUTES = [
    ("linear_cka", 3), ("linear_cka", 15), ("linear_cka:debiased=True", 3), ("linear_cka:debiased=True", 15),
    ("minibatch_cka:batch_size=7", 3), ("procrustes:unit_norm=False", 3), ("procrustes", 15), ("pwcca", 3),
    ("linear_regression", 4), ("mutual_knn:k=3", 3), ("paired_cosine", 3), ("disagreement", 3),
]  # fmt: skip
"""Metrics with different routes (moments, debiased moments, rows), for narrow and wide layers."""


def related(samples: int, positions: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows with a large mean and a component shared within each sample, and the sample of each row."""
    g = np.random.default_rng(seed)
    shared = np.repeat(g.standard_normal((samples, width)), positions, 0)
    x, y = (shared + g.standard_normal(shared.shape) + 50 for _ in range(2))
    return x, y, np.repeat(np.arange(samples), positions)


def rearranged(y: np.ndarray, samples: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """Return the rows of y with sample i replaced by sample ``order[i]``."""
    other = np.empty_like(y)
    for place, sample in enumerate(order):
        other[samples == place] = y[samples == sample]
    return other


def random_network(seed: int) -> nn.Module:
    """Six convolutions; their zero padding has the same effect on all images near the border."""
    generator, layers, width = torch.Generator().manual_seed(seed), [], 3
    for _ in range(6):
        convolution = nn.Conv2d(width, 32, 3, padding=1)
        nn.init.normal_(convolution.weight, 0, (9 * width) ** -0.5, generator=generator)
        nn.init.normal_(convolution.bias, 0, 0.5, generator=generator)
        layers += [convolution, nn.Tanh()]
        width = 32
    return nn.Sequential(*layers)


@torch.no_grad()
def position_rows(network: nn.Module, images: torch.Tensor) -> torch.Tensor:
    return network(images).flatten(2).transpose(1, 2).flatten(0, 1)


# -- permutation tests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 10])
def test_independent_networks_are_at_chance_with_position_rows(seed: int) -> None:
    images = torch.randn(2, 64, 3, 7, 7, generator=torch.Generator().manual_seed(seed))
    samples = torch.arange(64).repeat_interleave(49)
    a, b = random_network(seed + 1), random_network(seed + 2)
    for inputs in (images[1], images[0]):  # other images; the same images, of which random networks keep little
        x, y = position_rows(a, images[0]), position_rows(b, inputs)
        null = permutation_test("linear_cka", x, y, samples=samples, debiased=True, permutations=99)
        assert null.observed > 0.7
        assert abs(null.calibrated) < 0.02
        if inputs is images[1]:
            assert null.p_value > 0.05
        by_row = permutation_test("linear_cka", x, y, debiased=True, permutations=99)
        assert by_row.chance < 0.01
        assert by_row.p_value == 0.01
        assert by_row.calibrated > 0.7


def test_p_values_are_uniform_without_similarity_unless_rows_are_permuted() -> None:
    by_sample, by_row = [], []
    for seed in range(200):
        g = np.random.default_rng(seed)
        x, y = (np.repeat(g.standard_normal((12, 2)), 4, 0) + 0.3 * g.standard_normal((48, 2)) for _ in range(2))
        for found, samples in ((by_sample, np.repeat(np.arange(12), 4)), (by_row, None))[: 1 + (seed < 60)]:
            null = permutation_test("linear_cka", x, y, samples=samples, permutations=9, seed=seed)
            found.append(round(null.p_value * 10))
    assert stats.chisquare(np.bincount(by_sample, minlength=11)[1:]).pvalue > 0.01
    assert np.mean(np.array(by_row) == 1) > 0.4


@pytest.mark.parametrize(("name", "width"), ROUTES)
def test_null_values_match_rearranged_samples(name: str, width: int) -> None:
    x, y, samples = related(5, 4, width)
    metric = registries.metrics.build(name)
    orders = itertools.permutations(range(5))
    exact = [metric.function(x, rearranged(y, samples, order), **metric.options) for order in orders]
    null = permutation_test(metric, x, torch.from_numpy(y), samples=samples, permutations=300)
    distances = np.abs(null.values[:, None] - np.array(exact))
    assert null.observed == pytest.approx(exact[0], rel=1e-10, abs=1e-12)
    assert distances.min(1).max() < 1e-10
    assert null.chance == pytest.approx(np.mean(exact), abs=4 * np.std(exact) / np.sqrt(300))
    sign = 1 if metric.higher_is_better else -1
    share = np.mean(sign * (np.array(exact) - exact[0]) >= -1e-10)
    assert null.p_value == pytest.approx(share, abs=4 * np.sqrt(share / 300) + 1 / 301)


def test_samples_exchange_only_with_samples_of_the_same_size() -> None:
    x, y, _ = related(14, 1, 2)
    samples = np.repeat(list("abcdef"), [2, 2, 2, 3, 3, 2])
    places = np.searchsorted(list("abcdef"), samples)
    allowed = [p for p in itertools.permutations(range(6)) if {p[3], p[4]} == {3, 4}]
    exact = np.array([metrics.linear_cka(x, rearranged(y, places, order)) for order in allowed])
    assert np.abs(permutation_test("linear_cka", x, y, samples=samples).values[:, None] - exact).min(1).max() < 1e-12


def test_mean_of_the_null_values_matches_the_rv_coefficient() -> None:
    """Kazi-Aoual et al. 1995: over all permutations ``E‖Sxy‖² = tr Sxx tr Syy / (n - 1)``."""
    x, y, _ = related(30, 1, 5)
    a, b = x - x.mean(0), y - y.mean(0)
    exact = (a**2).sum() * (b**2).sum() / 29 / np.linalg.norm(a.T @ a) / np.linalg.norm(b.T @ b)
    null = permutation_test("linear_cka", x, y, permutations=1000)
    error = null.values.std() / np.sqrt(1000)
    assert null.chance == pytest.approx(exact, abs=4 * error)
    assert null.z == pytest.approx((null.observed - exact) / null.values.std(), rel=0.1)


def test_calibrated_disagreement_is_cohens_kappa() -> None:
    g = np.random.default_rng(0)
    x = g.standard_normal((300, 4))
    y = x + g.standard_normal((300, 4))
    null = permutation_test("disagreement", x, y, permutations=1000)
    assert null.calibrated == pytest.approx(cohen_kappa_score(x.argmax(1), y.argmax(1)), abs=0.005)


@pytest.mark.parametrize("name", ["linear_cka", "procrustes", "mutual_knn"])
def test_a_copy_has_the_best_value_for_similarities_and_distances(name: str) -> None:
    x, _, _ = related(30, 1, 3)
    null = permutation_test(registries.metrics.get(name), x, x, permutations=49)
    assert null.calibrated == pytest.approx(1, abs=1e-6)
    assert null.p_value == 0.02
    assert null.z > 3


@pytest.mark.parametrize("name", ["linear_cka", "mutual_knn"])
def test_order_of_samples_does_not_matter(name: str) -> None:
    x, y, samples = related(10, 3, 2)
    shuffled = np.concatenate([np.flatnonzero(samples == s) for s in np.random.default_rng(1).permutation(10)])
    for estimate in (permutation_test, bootstrap):
        one = estimate(name, x, y, samples=samples)
        two = estimate(name, x[shuffled], y[shuffled], samples=torch.from_numpy(samples[shuffled]))
        np.testing.assert_allclose(one.values, two.values, atol=1e-10)


@pytest.mark.parametrize("repeats", [2, 40])
@pytest.mark.parametrize("name", ["linear_cka", "procrustes", "cca"])
def test_repeated_rows_do_not_count_as_more_samples(name: str, repeats: int) -> None:
    """Also compares the route from rows with the route from blocks, which is used for 40 rows per sample."""
    x, y, samples = related(20, 1, 3)
    for estimate in (permutation_test, bootstrap):
        once = estimate(name, x, y, samples=samples)
        often = estimate(name, *(np.repeat(side, repeats, 0) for side in (x, y)), samples=np.repeat(samples, repeats))
        np.testing.assert_allclose(often.values, once.values, rtol=1e-9, atol=1e-10)
        assert (often.samples, often.rows) == (20, 20 * repeats)


# -- bootstrap ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "excess", "covered"),
    [("cca", {}, 1.4, 36), ("linear_cka", {"debiased": True}, 1.4, 38), ("mutual_knn", {"k": 3}, 2.2, 40)],
)
def test_intervals_cover_the_expected_value_at_this_number_of_samples(
    name: str, options: dict[str, Any], excess: float, covered: int
) -> None:
    def draw(seed: int) -> tuple[np.ndarray, np.ndarray]:
        g = np.random.default_rng(seed)
        shared = g.standard_normal((60, 6))
        return shared + g.standard_normal((60, 6)), shared + g.standard_normal((60, 6))

    function = getattr(metrics, name)
    average = np.mean([function(*draw(seed), **options) for seed in range(1000, 1200)])
    found = [bootstrap(name, *draw(seed), resamples=40, **options) for seed in range(40)]
    count = sum(interval.low <= average <= interval.high for interval in found)
    assert abs(count - covered) <= 1  # another machine rounds otherwise
    spread = np.std([interval.value for interval in found])
    assert 0.8 < np.mean([interval.standard_error for interval in found]) / spread < excess


def test_standard_error_of_a_mean() -> None:
    g = np.random.default_rng(0)
    x, y = g.standard_normal((2, 101, 8))
    cosines = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
    interval = bootstrap("paired_cosine", x, y, resamples=2000)
    assert interval.value == pytest.approx(cosines.mean())
    assert interval.standard_error == pytest.approx(cosines.std(ddof=1) / np.sqrt(101), rel=0.05)
    assert (interval.high - interval.low) / interval.standard_error == pytest.approx(2 * 1.96, rel=0.06)
    narrow = bootstrap("paired_cosine", x, y, resamples=2000, confidence=0.5)
    assert (narrow.high - narrow.low) / narrow.standard_error == pytest.approx(2 * 0.674, rel=0.06)


@pytest.mark.parametrize("job", [permutation_test, bootstrap])
def test_another_seed_draws_others(job: Any) -> None:
    x, y = torch.randn(30, 3), torch.randn(30, 2)
    first, again, other = (job("linear_cka", x, y, seed=seed).values for seed in (0, 0, 1))
    assert np.array_equal(first, again) and not np.isin(first, other).all()


def test_samples_may_have_unequal_rows() -> None:
    counts = [3, 1, 4, 1, 5, 9, 2, 6]
    x, y, _ = related(sum(counts), 1, 2)
    samples = np.repeat(range(8), counts)
    halves = [np.isin(samples, chosen) for chosen in itertools.combinations(range(8), 4)]
    exact = np.array([metrics.linear_cka(x[half], y[half]) for half in halves])
    assert np.abs(bootstrap("linear_cka", x, y, samples=samples).values[:, None] - exact).min(1).max() < 1e-10


# -- results and errors ------------------------------------------------------------------------------------------------


def test_results_convert_to_text_tables_and_figures() -> None:
    x, y, _ = related(20, 1, 3)
    null, interval = permutation_test("procrustes", x, y), bootstrap("procrustes", x, y)
    for result, key in ((null, "observed"), (interval, "value")):
        row = result.to_pandas().iloc[0]
        assert len(result.to_pandas()) == 1 and len(result.values) == 200
        assert getattr(result, key) == row[key] == pytest.approx(metrics.procrustes(x, y))
        assert result.metric == row["metric"] == "Procrustes(squared=False, unit_norm=True)"
        assert (row["samples"], row["seed"]) == (20, 0)
    assert f"p = {null.p_value:.3g}" in str(null)
    assert f"[{interval.low:.3f}, {interval.high:.3f}]" in str(interval)
    np.testing.assert_allclose(null.plot().axes[0].lines[0].get_xdata(), [null.observed, null.chance])
    segments = [segment for drawn in null.plot().axes[0].collections for segment in drawn.get_segments()]
    np.testing.assert_allclose(segments[1][:, 0], np.quantile(null.values, [0.025, 0.975]))
    ((first, last),) = interval.plot().axes[0].collections[0].get_segments()
    assert (first[0], last[0]) == (interval.low, interval.high)


def test_a_null_without_variance_has_no_z_and_is_recorded() -> None:
    x, y = np.eye(4)[[0, 1] * 5], np.eye(4)[[2, 3] * 5]  # disagreement in any order
    null = permutation_test("disagreement", x, y, permutations=9)
    assert null.p_value == 1 and null.calibrated == 0 and np.isnan(null.z)
    assert json.loads(json.dumps(null.to_dict(), allow_nan=False))["z"] == "nan"


REFUSALS: list[tuple[Any, str, dict[str, Any], str]] = [
    (permutation_test, "linear_cka", {"samples": np.arange(11)}, r"one sample id per row, got the shape \(11,\)"),
    (
        permutation_test, "linear_cka", {"samples": np.repeat(range(4), [2, 2, 3, 5])},
        r"2 of 4 samples cannot be permuted, because their numbers of rows \(3, 5\)",
    ),
    (permutation_test, "linear_cka", {"samples": np.zeros(12)}, "1 of 1 samples cannot be permuted"),
    (permutation_test, "linear_cka", {"permutations": 1}, "permutations must be an integer >= 2, got 1"),
    (permutation_test, "linear_cka", {"sequential": 3}, "sequential must be True or False, got 3"),
    (permutation_test, "linear_cka", {"debaised": True}, "did you mean 'debiased'"),
    (bootstrap, "linear_cka", {"samples": np.repeat(range(3), 4)}, "at least 4 samples, got 3"),
    (bootstrap, "linear_cka", {"resamples": 0}, "resamples must be an integer >= 2, got 0"),
    (bootstrap, "linear_cka", {"confidence": 95}, "confidence must be a number > 0 and < 1, got 95"),
    (bootstrap, "mutual_knn", {"k": 8}, "mutual_knn is undefined on half of the samples: .*k"),
]  # fmt: skip


@pytest.mark.parametrize(("estimate", "name", "options", "message"), REFUSALS)
def test_what_cannot_be_drawn_is_refused(estimate: Any, name: str, options: dict[str, Any], message: str) -> None:
    x, y, _ = related(12, 1, 2)
    with pytest.raises((ValueError, TypeError), match=message):
        estimate(name, x, y, **options)
