"""Statistics of similarities over all pairs of models, with a bootstrap over models because pairs share models."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import study
from numpy.typing import NDArray
from scipy.stats import rankdata
from study import Estimate

Array = NDArray[np.float64]
Pairs = Callable[[str], Array]  # returns the values of a similarity for some pairs, by its name
Statistic = Callable[[Pairs], float]


def cell(interval: Mapping[str, Any] | None) -> str:
    """Format an interval as read from JSON; ``–`` if the statistic is undefined."""
    return "–" if interval is None or None in interval.values() else study.shown(interval, 2)


def pearson(x: Array, y: Array) -> float:
    """Return Pearson's correlation, NaN if a side is constant."""
    a, b = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    constant = min(np.abs(a).max() / max(np.abs(x).max(), 1e-300), np.abs(b).max() / max(np.abs(y).max(), 1e-300))
    return float(a @ b) / scale if constant > 1e-9 else float("nan")


def spearman(x: Array, y: Array) -> float:
    """Return Spearman's rank correlation, NaN if a side is constant."""
    return pearson(rankdata(x), rankdata(y))


def correlations(x: str, y: str, of: Callable[[Array, Array], float] = pearson) -> Statistic:
    """Return a statistic that correlates two similarities."""
    return lambda pairs: of(pairs(x), pairs(y))


def difference(x: str, rival: str, y: str, of: Callable[[Array, Array], float] = pearson) -> Statistic:
    """Return a statistic: the correlation of ``x`` with ``y``, less the correlation of ``rival`` with ``y``."""
    return lambda pairs: of(pairs(x), pairs(y)) - of(pairs(rival), pairs(y))


def bootstrap(
    groups: Sequence[Mapping[str, Array]], statistic: Statistic, resamples: int = 2000, seed: int = 0
) -> Estimate:
    """Compute a statistic over all pairs, with its bootstrap interval over models.

    Each resample draws the models of each group with replacement, and keeps the pairs of two distinct models.
    """
    draw = np.random.default_rng(seed)
    estimates = []
    for number in range(resamples + 1):
        values = []
        for group in groups:
            k = len(next(iter(group.values())))
            models = np.arange(k) if number == 0 else draw.integers(0, k, k)
            while len(set(models.tolist())) < min(4, k):  # correlations require at least four models
                models = draw.integers(0, k, k)
            i, j = (models[places] for places in np.triu_indices(k, 1))
            i, j = i[i != j], j[i != j]
            values.append(statistic(lambda name, group=group, i=i, j=j: group[name][i, j]))
        estimates.append(float(np.mean(values)))
    drawn = np.array(estimates[1:])
    if not np.isfinite(estimates[0]) or not np.isfinite(drawn).any():
        return Estimate(float("nan"), float("nan"), float("nan"))
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return Estimate(estimates[0], float(low), float(high))


def additive(matrix: Array) -> Array:
    """Return the least-squares fit ``c + aᵢ + aⱼ`` to similarities, the part that single models explain."""
    k = len(matrix)
    means = np.nansum(np.where(np.eye(k, dtype=bool), 0.0, matrix), axis=1) / (k - 1)
    mean = means.mean()
    effect = (k - 1) / (k - 2) * (means - mean)
    return mean + effect[:, None] + effect[None, :]


def symmetric(count: int, value: Callable[[int, int], float]) -> Array:
    """Return the matrix ``(count, count)`` of a symmetric function of two models, with NaN on the diagonal."""
    matrix = np.full((count, count), np.nan)
    for i in range(count):
        for j in range(i):
            matrix[i, j] = matrix[j, i] = value(i, j)
    return matrix


def upper(matrix: Array) -> Array:
    """Return the values of all pairs ``i < j``."""
    return matrix[np.triu_indices(len(matrix), 1)]
