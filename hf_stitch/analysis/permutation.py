"""Permutation tests of one similarity, and of the highest similarity of all pairs of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hf_stitch.analysis.resampling import Array, Places, chosen_metric, rows_by_sample
from hf_stitch.metrics._rows import Rows, paired
from hf_stitch.metrics.base import ActivationMetric, Metric, MomentsMetric
from hf_stitch.options import Natural, Several, checked
from hf_stitch.printing import progress_bar
from hf_stitch.results import Result

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

_ENOUGH = 10
"""Number of null values at least as similar as observed that stops a sequential test."""

_CLOSE = 1e-8
"""Distance from the observed value within which a null value is computed from the rows."""

_ORDERS = 8
"""Number of permuted matrices that are multiplied at once."""
_ROUNDING = 1e-9
"""Difference of two studentised values that may be rounding."""


@dataclass(frozen=True, eq=False)
class PermutationTestResult(Result):
    """Value of a metric compared with its values under permuted samples, returned by :func:`permutation_test`.

    Attributes:
        metric: The metric and its options.
        observed: Value of the metric.
        values: (permutations,) float64, values of the metric with permuted samples (null values).
        higher_is_better: Whether a higher value means more similar.
        best: Value of the metric if both sides are equal up to its invariances; infinite if unbounded.
        samples: Number of samples.
        rows: Number of rows.
        seed: Seed of the permutations.
        enough: Number of values at least as similar as observed that stops the test; None if it was not sequential.

    Example:
        >>> null = PermutationTestResult("LinearCKA()", 0.8, np.array([0.1, 0.3, 0.2]), True, 1.0, 50, 50, 0)
        >>> round(null.chance, 3), null.p_value, round(null.calibrated, 3)
        (0.2, 0.25, 0.75)
    """

    metric: str
    observed: float
    values: Array
    higher_is_better: bool
    best: float
    samples: int
    rows: int
    seed: int
    enough: int | None = None

    derived: ClassVar[tuple[str, ...]] = ("chance", "calibrated", "p_value", "z")

    @property
    def chance(self) -> float:
        """Mean of the null values, the chance level."""
        return float(self.values.mean())

    @property
    def p_value(self) -> float:
        """Share of the permutations, including the observed order, with a similarity at least as high as observed.

        ``(1 + #) / (1 + B)`` is never 0 and is valid for any number B of permutations (Phipson and Smyth 2010). The
        test is one-sided: *more* similar than chance. Values that differ by rounding count as equal. If a sequential
        test stopped early, this is the share among the null values alone (Besag and Clifford 1991).
        """
        hits = int(_as_similar(self.values, self.observed, self.higher_is_better).sum())
        stopped = hits == self.enough
        return (hits + (not stopped)) / (len(self.values) + (not stopped))

    @property
    def z(self) -> float:
        """Similarity above chance in standard deviations of the null values; NaN if they do not vary."""
        spread = float(self.values.std(ddof=1))
        more = (self.observed - self.chance) * (1 if self.higher_is_better else -1)
        return more / spread if spread > 0 else float("nan")

    @property
    def calibrated(self) -> float:
        """Chance-corrected value, ``(observed - chance) / (best - chance)``.

        1 if both sides are equal, 0 at chance, negative if they are less similar than chance. Cohen's kappa and the
        adjusted Rand index (Hubert and Arabie 1985) use the same correction; here the mean of the null values is the
        chance level. For ``disagreement`` the result is Cohen's kappa. NaN if the chance level is the best value, or
        the metric is unbounded.
        """
        room = self.best - self.chance
        return (self.observed - self.chance) / room if room and np.isfinite(room) else float("nan")

    def to_pandas(self) -> pandas.DataFrame:
        """Return the result as a data frame.

        Returns one row with the columns ``metric``, ``observed``, ``samples``, ``rows``, ``seed``, ``chance``,
        ``calibrated``, ``p_value``, ``z`` and ``permutations``.
        """
        import pandas

        hidden = ("values", "best", "higher_is_better", "enough")
        figures = {key: value for key, value in self.to_dict().items() if key not in hidden}
        return pandas.DataFrame([{**figures, "permutations": len(self.values)}])

    def plot(self) -> Figure:
        """Plot the observed value next to the mean and the central 95% of the null values."""
        from hf_stitch.plots import intervals

        low, high = np.quantile(self.values, [0.025, 0.975]).tolist()
        bars = {f"observed, p = {self.p_value:.3g}": (self.observed,) * 3, "permuted": (self.chance, low, high)}
        return intervals(bars, self.metric)

    def __rich__(self) -> str:
        """Return one line, e.g. ``LinearCKA(debiased=False) 0.743, chance 0.741: calibrated 0.006, p = 0.373``."""
        return (
            f"{self.metric} {self.observed:.3f}, chance {self.chance:.3f}: calibrated {self.calibrated:.3f}, "
            f"p = {self.p_value:.3g}{self._stopped}"
        )

    @property
    def _stopped(self) -> str:
        hits = int(_as_similar(self.values, self.observed, self.higher_is_better).sum())
        return f", stopped after {len(self.values)} permutations" if hits == self.enough else ""


@torch.no_grad()
@checked
def permutation_test(
    metric: str | Metric | type[Metric],
    x: Rows,
    y: Rows,
    *,
    samples: Sequence[Any] | ArrayLike | Tensor | None = None,
    permutations: Several = 200,
    seed: Natural = 0,
    sequential: bool = False,
    **options: Any,
) -> PermutationTestResult:
    """Compare a similarity with its values after permuting the samples of ``y`` at random.

    All rows of a sample are permuted together: row j of one sample is paired with row j of another sample. Similarity
    that does not depend on the pairing of samples, such as features that all images share at a position, therefore
    counts as chance. A sample is exchanged only with samples that have the same number of rows.

    Quantities that do not depend on the order are computed once: principal axes, whitened rows, distances, neighbours.
    Null values are exact to 1e-9; values close to the observed one are recomputed from the rows.

    Args:
        metric: Name of a registered metric, a metric instance or a metric class.
        x: (n, dx) array or tensor of rows.
        y: (n, dy) array or tensor; row i corresponds to row i of ``x``.
        samples: (n,) id of the sample that each row belongs to. ``Representation.row_samples`` numbers the samples of
            one batch, so ids of different batches must be made distinct. ``None`` treats each row as a sample.
        permutations: Number of permutations, at least 2. The p-value is at least ``1 / (1 + permutations)``.
        seed: Seed of the permutations. If ``samples`` is given, the result does not depend on the order of the samples.
        sequential: Whether to stop at the 10th null value at least as similar as observed (Besag and Clifford 1991).
            Without similarity, the test stops after few permutations. The p-value remains valid: at most p with
            probability p. If the test stops, its relative standard error for a true p is ``√((1 - p) / 10)``, at most
            32%; otherwise it is the same as without ``sequential``. ``chance``, ``z`` and ``calibrated`` use the values
            until the stop; the last of them is as similar as observed.
        **options: Options of the metric.

    Example:
        >>> x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
        >>> null = permutation_test("linear_cka", x, 2 * x, debiased=True, permutations=99)
        >>> round(null.observed, 6), null.p_value, round(null.calibrated, 1)
        (1.0, 0.01, 1.0)
    """
    instance = chosen_metric(metric, options)
    x, y = paired(instance.name, x, y, exact=False)
    groups = rows_by_sample(samples, len(x))
    exchangeable = _exchangeable(groups)
    observed = instance.function(x, y, **instance.options).item()
    score, random = pairing(instance, x, y), np.random.default_rng(seed)
    values: list[float] = []
    hits, enough = 0, _ENOUGH if sequential else None
    while len(values) < permutations and hits != enough:
        order = torch.from_numpy(_draw_permutation(exchangeable, random)).to(y.device)
        value = score(order)
        if abs(value - observed) <= _CLOSE * max(1, abs(observed)):
            value = instance.function(x, y[order], **instance.options).item()
        values.append(value)
        hits += bool(_as_similar(np.array(value), observed, instance.higher_is_better))
    best = instance.range[1] if instance.higher_is_better else 0.0
    figures = (observed, np.array(values), instance.higher_is_better, best, len(groups), len(x), seed, enough)
    return PermutationTestResult(repr(instance), *figures)


def _as_similar(values: Array, observed: float, higher_is_better: bool) -> NDArray[np.bool_]:
    rounding = 1e-12 * np.maximum(np.abs(values), abs(observed))
    return (values - observed) * (1 if higher_is_better else -1) >= -rounding


def _exchangeable(groups: Sequence[Places]) -> list[Places]:
    """Stack the samples with the same number of rows: one (samples, rows per sample) array per number of rows."""
    by_size: dict[int, list[Places]] = {}
    for places in groups:
        by_size.setdefault(len(places), []).append(places)
    single = [size for size, members in by_size.items() if len(members) == 1]
    if single:
        raise ValueError(
            f"{len(single)} of {len(groups)} samples cannot be permuted, because their numbers of rows "
            f"({', '.join(map(str, sorted(single)[:5]))}{' …' if len(single) > 5 else ''}) occur once; leave them out "
            "or pass one row per sample (pooling mean, cls or last)"
        )
    return [np.stack(members) for members in by_size.values()]


def _draw_permutation(exchangeable: Sequence[Places], random: np.random.Generator) -> Places:
    """Draw a permutation: for each row of x, the index of the row of y paired with it."""
    order = np.empty(sum(places.size for places in exchangeable), np.intp)
    for places in exchangeable:
        order[places] = places[random.permutation(len(places))]
    return order


def pairing(metric: ActivationMetric, x: Tensor, y: Tensor) -> Callable[[Tensor], float]:
    """Return a metric as a function of the order of the rows of y; parts that do not depend on it are computed once."""
    if not isinstance(metric, MomentsMetric) or x.shape[1] + y.shape[1] > len(x):
        matrix_x, matrix_y = (unit_matrix(metric, rows) for rows in (x, y))
        if matrix_x is not None and matrix_y is not None:
            return lambda order: (matrix_x * permuted(matrix_y, order)).sum().item()
    of_x, of_y = metric._prepared("x", x), metric._prepared("y", y)
    return lambda order: metric._permuted(of_x, of_y, order)


def unit_matrix(metric: ActivationMetric, rows: Tensor) -> Any:
    """Return the matrix of samples of a layer, divided by its norm; None if the metric does not define one."""
    if (matrix := metric.sample_matrix(rows.double())) is None:
        return None
    if not (length := matrix.norm()) > 0:
        raise ValueError(f"{metric.name} is undefined for a layer with the same output for all {len(rows)} samples")
    return matrix / length


def permuted(matrix: Tensor, order: Tensor) -> Tensor:
    """Return a matrix of samples with its rows and columns in another order."""
    return matrix.index_select(0, order).index_select(1, order)


@dataclass(frozen=True, eq=False)
class MaximumTest:
    """Permutation test of the highest similarities in a search over pairs of layers.

    Values of different pairs are not comparable under the null hypothesis: biased CKA of two wide layers is high by
    chance. Each pair is therefore studentised with the mean and the standard deviation of its values over all
    permutations and the observed order. This treats all orders alike, so that the p-values are exact.

    Attributes:
        chance: (layers of a, layers of b) mean value of each pair over all orders of the samples. Here and below, pairs
            with an undefined metric are NaN and left out of the search.
        scores: (layers of a, layers of b) observed values, studentised; higher is more similar.
        unadjusted: (layers of a, layers of b) p-value of each pair, not adjusted for the search.
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

        The share of the orders, including the observed one, with *any* pair at least as similar as the observed value
        of this pair. If no pair is related, the smallest p-value is at most p with probability p.
        """
        return _p_values(self.scores[None], self.maxima[:, None, None])

    @checked
    def match_p_values(self, places: NDArray[np.intp], axis: Literal["a", "b"]) -> Array:
        """Return the p-value of one match for each layer of a side, adjusted for the search over its candidates."""
        scores, maxima = (self.scores, self.maxima_a) if axis == "a" else (self.scores.T, self.maxima_b)
        return _p_values(scores[np.arange(len(scores)), places][None], maxima)


def maximum_test(
    metric: ActivationMetric, x: Sequence[Tensor], y: Sequence[Tensor], *, defined: NDArray[np.bool_] | None = None,
    permutations: int, seed: int, memory: int, bar_label: str | None = None
) -> MaximumTest:  # fmt: skip
    """Test the similarities of all pairs of layers: one permutation of the samples of y for all pairs.

    ``bar_label`` is the label of the progress bar, which counts values.
    """
    random, n = np.random.default_rng(seed), len(x[0])
    orders = [torch.arange(n), *(torch.from_numpy(random.permutation(n)) for _ in range(permutations))]
    is_defined = np.ones((len(x), len(y)), bool) if defined is None else defined
    places_x, places_y = (np.flatnonzero(is_defined.any(axis)) for axis in (1, 0))
    layers_x, layers_y = [x[int(i)] for i in places_x], [y[int(j)] for j in places_y]
    with progress_bar(bar_label, len(orders) * len(layers_x) * len(layers_y), "value") as bar:
        values_by_order = _by_matrices(metric, layers_x, layers_y, orders, memory, bar)
        if values_by_order is None:
            values_by_order = np.full((len(orders), len(layers_x), len(layers_y)), np.nan)
            cached = max(1, memory // (16 * n * max(rows.shape[1] for rows in layers_y)))
            prepared_y = lru_cache(cached)(lambda j: metric._prepared("y", layers_y[j]))
            for i, defined_here in enumerate(is_defined[np.ix_(places_x, places_y)]):
                prepared_x = metric._prepared("x", layers_x[i])
                for j in np.flatnonzero(defined_here):
                    values_by_order[:, i, j] = [metric._permuted(prepared_x, prepared_y(j), order) for order in orders]
                    bar.update(len(orders))
    values = np.full((len(orders), *is_defined.shape), np.nan)
    values[np.ix_(np.arange(len(orders)), places_x, places_y)] = values_by_order
    values[:, ~is_defined] = np.nan
    return studentised_test(values, metric.higher_is_better, seed)


def studentised_test(values: Array, higher_is_better: bool, seed: int) -> MaximumTest:
    """Compute the test from the values of all pairs under all orders of the samples."""
    chance, spread = values.mean(0), values.std(0)
    varies = spread > _ROUNDING * np.abs(values).max(0)
    scores = np.where(varies, (values - chance) / np.where(varies, spread, 1.0), 0.0) * (1 if higher_is_better else -1)
    scores[:, np.isnan(chance)] = np.nan
    actual, null = scores[0], np.where(np.isnan(scores[1:]), -np.inf, scores[1:])
    return MaximumTest(chance, actual, _p_values(actual[None], null), null.max((1, 2)), null.max(2), null.max(1), seed)


def _p_values(observed: Array, null: Array) -> Array:
    """Compute ``(1 + #) / (1 + B)`` (Phipson and Smyth 2010); the first axis of ``null`` are permutations."""
    p_values: Array = (1 + (null >= observed - _ROUNDING).sum(0)) / (1 + len(null))
    return np.where(np.isnan(observed[0]), np.nan, p_values)


def _by_matrices(
    metric: ActivationMetric, x: Sequence[Tensor], y: Sequence[Tensor], orders: Sequence[Tensor], memory: int, bar: Any
) -> Array | None:
    """Compute all values as inner products of matrices of samples; None without such matrices or enough memory."""
    n = len(x[0])
    at_once = memory // (8 * n**2) - _ORDERS - 3  # besides the block of x: permuted matrices of y, and temporaries
    if at_once < 1 or metric.sample_matrix(x[0].double()) is None:
        return None
    values = np.empty((len(orders), len(x), len(y)))
    for start in range(0, len(x), at_once):
        block = torch.stack([unit_matrix(metric, rows).flatten() for rows in x[start : start + at_once]])
        for j, rows in enumerate(y):
            matrix = unit_matrix(metric, rows)
            for first in range(0, len(orders), _ORDERS):
                batch = orders[first : first + _ORDERS]
                shuffled = torch.stack([permuted(matrix, order).flatten() for order in batch])
                values[first : first + len(batch), start : start + len(block), j] = (shuffled @ block.T).numpy()
                bar.update(len(batch) * len(block))
    return values
