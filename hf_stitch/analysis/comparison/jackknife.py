"""Which layers are as similar as the most similar one: paired tests of differences, by a jackknife over samples.

A similarity is a statistic of all samples. The delete-a-group jackknife (Shao and Wu 1989, "A general theory for
jackknife variance estimation") computes it again without each of some random groups of samples. The spread of these
values estimates its standard error at the full number of samples: no sample is duplicated, which would increase metrics
that compare samples, and no value comes from half of them. From moments it takes no further pass over the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_stitch.metrics import Metric
from hf_stitch.metrics.base import MomentsMetric
from hf_stitch.statistics import Moments

Array = NDArray[np.float64]
Places = NDArray[np.intp]
LeftOut = Callable[[int, int], list[float]]
"""Values of a pair of layers without each of the groups."""


def differences_from_best(
    metric: Metric, x: Sequence[Tensor], y: Sequence[Tensor], values: Array, groups: Sequence[Places]
) -> Array:
    """Test whether each candidate differs from the best, for the layers whose corresponding layer is not the best.

    Layer i of x corresponds to layer i of y. The test is a two-sided t-test of the paired difference, with a jackknife
    over groups of samples. The best is chosen on the same samples, so that p-values of close rivals are somewhat too
    small.

    Returns (2, layers, layers) float64 p-values. First, of the difference of each layer of y from the best one for the
    same layer of x; second, with x and y exchanged. 1 for the best itself. NaN where the metric is undefined, and for
    layers whose corresponding layer is the best.
    """
    better = np.where(np.isnan(values), -np.inf, values if metric.higher_is_better else -values)
    best_y, best_x = better.argmax(1), better.argmax(0)
    own = np.arange(len(values))
    judged = ~np.isnan(np.diag(values))
    rows, columns = np.flatnonzero(judged & (best_y != own)), np.flatnonzero(judged & (best_x != own))
    wanted = np.zeros(values.shape, bool)
    wanted[rows] = wanted[:, columns] = True
    left_out = np.full((len(groups), *values.shape), np.nan)
    without = _without_groups(metric, x, y, groups)
    for i, j in np.argwhere(wanted & ~np.isnan(values)):
        left_out[:, i, j] = without(int(i), int(j))
    found = np.full((2, *values.shape), np.nan)
    for i in rows:
        found[0, i] = _p_values(values[i], left_out[:, i], best_y[i])
    for j in columns:
        found[1, :, j] = _p_values(values[:, j], left_out[:, :, j], best_x[j])
    return found


def groups_of(n: int, count: int, seed: int) -> list[Places]:
    """Divide samples at random into groups whose sizes differ by at most one."""
    order = np.random.default_rng(seed).permutation(n)
    return [np.sort(part) for part in np.array_split(order, count)]


def _p_values(values: Array, left_out: Array, best: int) -> Array:
    """Test the differences of all candidates from the best one: (candidates,)."""
    from scipy.stats import t

    count = len(left_out)
    difference, replicates = values[best] - values, left_out[:, [best]] - left_out
    error = np.sqrt((count - 1) / count * ((replicates - replicates.mean(0)) ** 2).sum(0))
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Array = 2 * t.sf(np.abs(difference) / error, count - 1)
    return np.where(difference == 0, 1.0, found)


def _without_groups(metric: Metric, x: Sequence[Tensor], y: Sequence[Tensor], groups: Sequence[Places]) -> LeftOut:
    by_moments = isinstance(metric, MomentsMetric) and metric.statistic == "moments"
    values = _from_moments(metric, x, y, groups) if by_moments else _from_rows(metric, x, y, groups)  # type: ignore[arg-type]

    def checked(i: int, j: int) -> list[float]:
        try:
            return values(i, j)
        except ValueError as error:
            raise ValueError(
                f"the samples without one of {len(groups)} groups do not determine {metric.label}: {error}; pass more "
                "samples, or increase resamples"
            ) from error

    return checked


def _from_rows(metric: Metric, x: Sequence[Tensor], y: Sequence[Tensor], groups: Sequence[Places]) -> LeftOut:
    kept = [torch.from_numpy(np.setdiff1d(np.arange(len(x[0])), group)) for group in groups]

    def values(i: int, j: int) -> list[float]:
        rows_x, rows_y = x[i].double(), y[j].double()
        return [metric.function(rows_x[rest], rows_y[rest], **metric.options).item() for rest in kept]

    return values


def _from_moments(metric: MomentsMetric, x: Sequence[Tensor], y: Sequence[Tensor], groups: Sequence[Places]) -> LeftOut:
    @cache
    def rest_x(i: int) -> _Rest:
        return _Rest(x[i], groups)

    @cache
    def rest_y(j: int) -> _Rest:
        return _Rest(y[j], groups)

    def values(i: int, j: int) -> list[float]:
        a, b = rest_x(i), rest_y(j)
        parts = zip(a.counts.tolist(), a.means, b.means, a.scatters, b.scatters, a.crossed(b), strict=True)
        return [metric.from_moments(Moments.of(*part)) for part in parts]

    return values


class _Rest:
    """Moments of one layer without each of the groups of samples."""

    def __init__(self, rows: Tensor, groups: Sequence[Places]) -> None:
        rows = rows.double()
        mean = rows.mean(0)
        parts = [rows[torch.from_numpy(group)] - mean for group in groups]
        self.rows = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        self.sums = self.rows.sum(1)
        self.counts = len(rows) - torch.tensor([len(part) for part in parts])
        self.means = mean - self.sums / self.counts[:, None]
        self.scatters = self.crossed(self)

    def crossed(self, other: _Rest) -> Tensor:
        """Return the co-moments with another layer without each group, (groups, d, d of the other)."""
        within = self.rows.transpose(1, 2) @ other.rows
        of_means = self.sums[:, :, None] * other.sums[:, None] / self.counts[:, None, None]
        return within.sum(0) - within - of_means
