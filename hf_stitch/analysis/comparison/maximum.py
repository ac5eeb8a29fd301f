"""Permutation test of the most similar of many pairs of layers.

The highest of many similarities is high even if no pair of layers is related. The test therefore permutes the samples
of b once for all pairs, and compares with the highest value of each permutation (Westfall and Young 1993, "Resampling-
based multiple testing").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_stitch.analysis.permutation import permuted, unit_matrix
from hf_stitch.metrics import ActivationMetric
from hf_stitch.options import checked

Array = NDArray[np.float64]

_ORDERS = 8
"""Number of permuted matrices that are multiplied at once."""

_ROUNDING = 1e-9
"""Difference of two studentised values that may be rounding."""


@dataclass(frozen=True, eq=False)
class MaximumTest:
    """Permutation test of the highest similarities of a search over pairs of layers.

    Values of different pairs are not comparable under the null hypothesis: biased CKA of two wide layers is high by
    chance. Each pair is therefore studentised with the mean and the standard deviation of its own values, over all
    permutations and the observed order, so that all orders are treated alike and the p-values are exact.

    Attributes:
        chance: (layers of a, layers of b) mean value of each pair over all orders of the samples. Here and below: NaN
            for pairs for which the metric is undefined; they take no part in the search.
        scores: (layers of a, layers of b) observed values, studentised; higher is more similar.
        unadjusted: (layers of a, layers of b) p-value of each pair by itself, without regard to the search.
        maxima: (permutations,) highest studentised value of all pairs.
        maxima_a: (permutations, layers of a) highest studentised value of each layer of a.
        maxima_b: (permutations, layers of b) highest studentised value of each layer of b.
        seed: Seed of the permutations.

    Example:
        >>> null = np.array([0.5, 1.1, 2.0])
        >>> test = MaximumTest(
        ...     np.array([[0.2]]), np.array([[3.1]]), np.array([[0.25]]), null, null[:, None], null[:, None], 0
        ... )
        >>> test.p_values.tolist()
        [[0.25]]
    """

    chance: Array
    scores: Array
    unadjusted: Array
    maxima: Array
    maxima_a: Array
    maxima_b: Array
    seed: int

    @property
    def p_values(self) -> Array:
        """p-values of all pairs, (layers of a, layers of b), adjusted for the search over all pairs.

        The share of the orders, including the observed one, in which *any* pair is as similar as this one is observed
        to be. If no pair is related, the smallest of them is at most p with probability p.
        """
        return _p_values(self.scores[None], self.maxima[:, None, None])

    @checked
    def match_p_values(self, places: NDArray[np.intp], axis: Literal["a", "b"]) -> Array:
        """Return the p-value of one match for each layer of a side, adjusted for the search over the other side.

        Args:
            places: For each layer of the side ``axis``, the index of its match.
            axis: The side.
        """
        scores, maxima = (self.scores, self.maxima_a) if axis == "a" else (self.scores.T, self.maxima_b)
        return _p_values(scores[np.arange(len(scores)), places][None], maxima)


def maximum_test(
    metric: ActivationMetric, x: Sequence[Tensor], y: Sequence[Tensor], *, defined: NDArray[np.bool_] | None = None,
    permutations: int, seed: int, memory: int,
) -> MaximumTest:  # fmt: skip
    """Test the similarities of all pairs of layers: one permutation of the samples of y for all pairs."""
    random, n = np.random.default_rng(seed), len(x[0])
    orders = [torch.arange(n), *(torch.from_numpy(random.permutation(n)) for _ in range(permutations))]
    known = np.ones((len(x), len(y)), bool) if defined is None else defined
    of_x, of_y = (np.flatnonzero(known.any(axis)) for axis in (1, 0))
    some_x, some_y = [x[int(i)] for i in of_x], [y[int(j)] for j in of_y]
    found = _by_matrices(metric, some_x, some_y, orders, memory)
    if found is None:
        found = np.full((len(orders), len(some_x), len(some_y)), np.nan)
        kept = max(1, memory // (16 * n * max(rows.shape[1] for rows in some_y)))
        prepared_y = lru_cache(kept)(lambda j: metric._prepared("y", some_y[j]))
        for i, defined_here in enumerate(known[np.ix_(of_x, of_y)]):
            own = metric._prepared("x", some_x[i])
            for j in np.flatnonzero(defined_here):
                found[:, i, j] = [metric._permuted(own, prepared_y(j), order) for order in orders]
    values = np.full((len(orders), *known.shape), np.nan)
    values[np.ix_(np.arange(len(orders)), of_x, of_y)] = found
    values[:, ~known] = np.nan
    return tested(values, metric.higher_is_better, seed)


def tested(values: Array, higher_is_better: bool, seed: int) -> MaximumTest:
    """Return the test from the values of all pairs under all orders of the samples."""
    chance, spread = values.mean(0), values.std(0)
    varies = spread > _ROUNDING * np.abs(values).max(0)
    scores = np.where(varies, (values - chance) / np.where(varies, spread, 1.0), 0.0) * (1 if higher_is_better else -1)
    scores[:, np.isnan(chance)] = np.nan
    own, null = scores[0], np.where(np.isnan(scores[1:]), -np.inf, scores[1:])
    return MaximumTest(chance, own, _p_values(own[None], null), null.max((1, 2)), null.max(2), null.max(1), seed)


def _p_values(observed: Array, null: Array) -> Array:
    """``(1 + #) / (1 + B)`` (Phipson and Smyth 2010); the permutations are the first axis of ``null``."""
    found: Array = (1 + (null >= observed - _ROUNDING).sum(0)) / (1 + len(null))
    return np.where(np.isnan(observed[0]), np.nan, found)


def _by_matrices(
    metric: ActivationMetric, x: Sequence[Tensor], y: Sequence[Tensor], orders: Sequence[Tensor], memory: int
) -> Array | None:
    """Compute all values as inner products of matrices of samples; None if the metric has none, or they are too big."""
    n = len(x[0])
    at_once = memory // (8 * n**2) - _ORDERS - 3  # beside the block of x: permuted matrices of y, and what makes them
    if at_once < 1 or metric.sample_matrix(x[0].double()) is None:
        return None
    values = np.empty((len(orders), len(x), len(y)))
    for start in range(0, len(x), at_once):
        block = torch.stack([unit_matrix(metric, rows).flatten() for rows in x[start : start + at_once]])
        for j, rows in enumerate(y):
            matrix = unit_matrix(metric, rows)
            for first in range(0, len(orders), _ORDERS):
                some = orders[first : first + _ORDERS]
                others = torch.stack([permuted(matrix, order).flatten() for order in some])
                values[first : first + len(some), start : start + len(block), j] = (others @ block.T).numpy()
    return values
