"""Figures of all stitches of a grid, with intervals, from the measures of its samples."""

from __future__ import annotations

import numpy as np
from scipy.stats import norm

from hf_stitch.tasks.base import Array


def with_interval(drawn: Array) -> Array:
    """Return values and both ends of their 95% intervals."""
    low, high = np.quantile(drawn[1:], [0.025, 0.975], axis=0)
    return np.stack([drawn[0], low, high], -1)


def differences_from_best(drawn: Array, higher_is_better: bool) -> Array:
    """Compute p-values of the difference of each stitch from the best of its row and of its column.

    The p-value is that of a normal distribution with the standard deviation of the difference over the resamples: a
    share of resamples could not be small enough for a Holm test of many layers. The best stitch is chosen on the same
    samples, so that p-values of close rivals are somewhat too small.
    """
    better = drawn if higher_is_better else -drawn
    found = []
    for axis in (2, 1):
        values = np.where(np.isnan(better[:1]), -np.inf, better[:1])
        best = np.take_along_axis(
            better, np.broadcast_to(values.argmax(axis, keepdims=True), _shape(better, axis)), axis
        )
        apart = best - better
        with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0 for equal ones, of which the p-value is 1
            p = 2 * norm.sf(np.nan_to_num(apart[0] / apart[1:].std(0, ddof=1), nan=0.0))
        found.append(np.where(np.isnan(better[0]), np.nan, np.where((best == better)[0], 1.0, p)))
    return np.stack(found)


def _shape(values: Array, axis: int) -> tuple[int, ...]:
    return tuple(1 if place == axis else length for place, length in enumerate(values.shape))
