"""The jackknife of similarities: values without a group, standard errors, and the size of its tests."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import kstest, t
from torch import Tensor

from hf_stitch import metrics as M
from hf_stitch.analysis.comparison.jackknife import differences_from_best, groups_of
from hf_stitch.analysis.resampling import not_rejected
from hf_stitch.metrics import Metric
from hf_stitch.registry import registries

METRICS = ["linear_cka", "linear_cka:debiased=True", "procrustes", "cca", "pwcca", "pwcca:directions=all", "rsa"]


def layers(n: int, seed: int, noise: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """Three layers of two networks of different widths, related to each other in no order."""
    g = torch.Generator().manual_seed(seed)
    common = torch.randn(n, 4, generator=g, dtype=torch.float64)
    found = [
        [
            3
            + common @ torch.randn(4, width, generator=g).double()
            + noise * torch.randn(n, width, generator=g).double()
            for width in widths
        ]
        for widths in ((5, 3, 6), (4, 6, 3))
    ]
    return found[0], found[1]


def values_of(metric: Metric, x: list[Tensor], y: list[Tensor]) -> np.ndarray:
    return np.array([[metric.function(a, b, **metric.options).item() for b in y] for a in x])


def p_value(difference: float, replicates: np.ndarray) -> float:
    """Two-sided, from the definition of the jackknife."""
    count = len(replicates)
    variance = (count - 1) / count * ((replicates - replicates.mean()) ** 2).sum()
    return float(2 * t(count - 1).sf(abs(difference) / np.sqrt(variance)))


@pytest.mark.parametrize("name", METRICS)
def test_p_values_follow_from_values_without_each_group(name: str) -> None:
    metric = registries.metrics.build(name)
    x, y = layers(61, seed=1)
    values, groups = values_of(metric, x, y), groups_of(61, 7, seed=3)
    found = differences_from_best(metric, x, y, values, groups)
    rests = [np.setdiff1d(np.arange(61), group) for group in groups]
    left = np.array([values_of(metric, [a[rest] for a in x], [b[rest] for b in y]) for rest in rests])
    better = values if metric.higher_is_better else -values
    computed = 0
    for axis, (which, all_left) in enumerate(((better, left), (better.T, left.transpose(0, 2, 1)))):
        for i, row in enumerate(which):
            p_values, best = (found[0, i], found[1, :, i])[axis], int(row.argmax())
            if best == i:
                assert np.isnan(p_values).all()
                continue
            computed += 1
            for j, p in enumerate(p_values):
                if j == best:
                    assert p == 1
                else:
                    difference = row[best] - row[j]
                    assert p == pytest.approx(p_value(difference, all_left[:, i, best] - all_left[:, i, j]), rel=1e-6)
    assert computed


def test_groups_are_a_partition() -> None:
    groups = groups_of(43, 8, seed=0)
    assert sorted(np.concatenate(groups)) == list(range(43))
    assert {len(group) for group in groups} == {5, 6}
    assert any((a != b).any() for a, b in zip(groups_of(40, 8, 0), groups_of(40, 8, 1), strict=True))


def test_p_values_of_equally_similar_layers_are_uniform() -> None:
    """Two candidates with the same distribution; the corresponding layer is the less similar one."""
    metric, found = registries.metrics.build("linear_cka"), []
    for seed in range(50):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(120, 3, generator=g, dtype=torch.float64)
        y = [x + torch.randn(120, 3, generator=g).double() for _ in range(2)]
        y.sort(key=lambda rows: M.linear_cka(x, rows).item())
        values = values_of(metric, [x, x], y)
        found.append(differences_from_best(metric, [x, x], y, values, groups_of(120, 12, seed))[0, 0, 0])
    assert kstest(found, "uniform").pvalue > 0.01


def test_undefined_pairs_take_no_part() -> None:
    metric = registries.metrics.build("cca")
    x, y = layers(61, seed=2)
    y[1] = torch.full_like(y[1], 0.5)
    values = np.full((3, 3), np.nan)
    values[:, [0, 2]] = values_of(metric, x, [y[0], y[2]])
    values[0] = 0.3, np.nan, 0.9
    found = differences_from_best(metric, x, y, values, groups_of(61, 5, 0))
    assert np.isnan(found[:, :, 1]).all() and np.isnan(found[0, 1]).all()
    assert found[0, 0, 2] == 1 and 0 <= found[0, 0, 0] < 1


def test_a_resample_that_determines_nothing_is_refused() -> None:
    x, y = layers(9, seed=0)
    metric = registries.metrics.build("cca")
    values = np.roll(np.eye(3), 1, 0)
    with pytest.raises(ValueError, match=r"cca is undefined without one of 3 groups of samples: .*more samples"):
        differences_from_best(metric, x, y, values, groups_of(9, 3, 0))


def test_holm_is_the_closed_test_of_bonferroni() -> None:
    """Marcus, Peritz and Gabriel (1976): a difference is rejected if every set of differences with it is."""
    g = np.random.default_rng(0)
    for _ in range(50):
        p_values = g.random(5) ** 4
        sets = [some for size in range(1, 6) for some in itertools.combinations(range(5), size)]
        rejected = [all(p_values[[*some]].min() <= 0.05 / len(some) for some in sets if i in some) for i in range(5)]
        with_best = np.insert(p_values, 2, 1.0)
        assert (np.delete(not_rejected(with_best[None], 0.05)[0], 2) == np.logical_not(rejected)).all()
