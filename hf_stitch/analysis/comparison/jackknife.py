"""Paired tests of differences from the most similar layer, by a jackknife over samples.

A similarity is a statistic of all samples. The delete-a-group jackknife (Shao and Wu 1989, "A general theory for
jackknife variance estimation") recomputes it without each of several random groups of samples. The spread of these
values estimates its standard error at the full number of samples. Samples are not duplicated, which would increase
metrics that compare samples. With moments, the jackknife does not require another pass over the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from hf_stitch.analysis.comparison.sides import Networks
from hf_stitch.analysis.resampling import Array, Places, SampleMoments, SampleRows
from hf_stitch.metrics import Metric
from hf_stitch.metrics.base import MomentsMetric
from hf_stitch.printing import progress_bar
from hf_stitch.running import Run

LeftOut = Callable[[int, int], list[float]]
"""Values of a pair of layers without each of the groups."""


class Jackknife:
    """Test of all pairs of networks with equally many layers, leaving out groups of samples.

    The call receives the rows of all layers and the values of each metric, and stores the p-values of each metric.
    """

    def __init__(self, metrics: Mapping[str, Metric], networks: Networks, resamples: int, run: Run) -> None:
        n, counts = len(networks.ids), {len(layers) for layers in networks.by_network.values()}
        if not 2 <= resamples <= n:
            raise ValueError(
                f"resamples must be 0 (no test) or from 2 to the number of samples, {n}, got {resamples}; 40 are enough"
            )
        if len(counts) > 1:
            raise ValueError(
                f"resamples requires networks with equally many layers, got {sorted(counts)}; pass layers, or "
                "resamples=0"
            )
        self._metrics, self._networks, self._run = metrics, len(networks.by_network), run
        self._groups = groups_of(n, resamples, run.seed)
        self.p_values: dict[str, Array] = {}

    def __call__(self, rows: Sequence[Tensor], values: Mapping[str, Array]) -> None:
        """Test the differences from the most similar layer."""
        blocks = [slice(block[0], block[-1] + 1) for block in np.split(np.arange(len(rows)), self._networks)]
        self.p_values = {label: np.full((2, len(rows), len(rows)), np.nan) for label in self._metrics}
        jobs = [(label, a, b) for label in self._metrics for a, b in combinations(blocks, 2)]
        with progress_bar(self._run.shown("resampling"), len(jobs), "pair") as bar:
            for label, a, b in jobs:
                p = differences_from_best(self._metrics[label], rows[a], rows[b], values[label][a, b], self._groups)
                self.p_values[label][:, a, b] = p
                bar.update()


def differences_from_best(
    metric: Metric, x: Sequence[Tensor], y: Sequence[Tensor], values: Array, groups: Sequence[Places]
) -> Array:
    """Test whether each candidate differs from the best, if the corresponding layer is not the best.

    Layer i of x corresponds to layer i of y. The test is a two-sided t-test of the paired difference, with a jackknife
    over groups of samples. The best is chosen on the same samples, so p-values of close rivals are slightly too small.

    Returns (2, layers, layers) float64 p-values. First, of the difference of each layer of y from the best one for the
    same layer of x; second, with x and y exchanged. 1 for the best candidate. NaN where the metric is undefined, and
    for layers with a corresponding layer that is the best.
    """
    better = np.where(np.isnan(values), -np.inf, values if metric.higher_is_better else -values)
    best_y, best_x = better.argmax(1), better.argmax(0)
    same = np.arange(len(values))
    valid = ~np.isnan(np.diag(values))
    rows, columns = (np.flatnonzero(valid & (best_y != same)), np.flatnonzero(valid & (best_x != same)))
    is_tested = np.zeros(values.shape, bool)
    is_tested[rows] = is_tested[:, columns] = True
    left_out = np.full((len(groups), *values.shape), np.nan)
    without = _without_groups(metric, x, y, groups)
    for i, j in np.argwhere(is_tested & ~np.isnan(values)):
        left_out[:, i, j] = without(int(i), int(j))
    p_values = np.full((2, *values.shape), np.nan)
    for i in rows:
        p_values[0, i] = _p_values(values[i], left_out[:, i], best_y[i])
    for j in columns:
        p_values[1, :, j] = _p_values(values[:, j], left_out[:, :, j], best_x[j])
    return p_values


def groups_of(n: int, count: int, seed: int) -> list[Places]:
    """Divide samples at random into groups with sizes that differ by at most one."""
    order = np.random.default_rng(seed).permutation(n)
    return [np.sort(indices) for indices in np.array_split(order, count)]


def _p_values(values: Array, left_out: Array, best: int) -> Array:
    """Test the differences of all candidates from the best one: (candidates,)."""
    from scipy.stats import t

    count = len(left_out)
    difference, replicates = values[best] - values, left_out[:, [best]] - left_out
    error = np.sqrt((count - 1) / count * ((replicates - replicates.mean(0)) ** 2).sum(0))
    with np.errstate(divide="ignore", invalid="ignore"):
        p_values: Array = 2 * t.sf(np.abs(difference) / error, count - 1)
    return np.where(difference == 0, 1.0, p_values)


def _without_groups(metric: Metric, x: Sequence[Tensor], y: Sequence[Tensor], groups: Sequence[Places]) -> LeftOut:
    of_x = cache(lambda i: SampleRows(x[i], groups))
    of_y = cache(lambda j: SampleRows(y[j], groups))
    remaining = [torch.from_numpy(np.setdiff1d(np.arange(len(x[0])), group)) for group in groups]

    def values(i: int, j: int) -> list[float]:
        if isinstance(metric, MomentsMetric) and metric.statistic == "moments":
            moments = SampleMoments(of_x(i), of_y(j))
            return [metric.from_moments(moments.without(group)) for group in range(len(groups))]
        return [metric.function(x[i][rest], y[j][rest], **metric.options).item() for rest in remaining]

    def checked(i: int, j: int) -> list[float]:
        try:
            return values(i, j)
        except ValueError as error:
            raise ValueError(
                f"{metric.label} is undefined without one of {len(groups)} groups of samples: {error}; pass more "
                "samples, or increase resamples"
            ) from error

    return checked
