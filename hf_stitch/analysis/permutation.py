"""Is a similarity better than chance? Samples of one side are exchanged, and the metric computed anew.

Rows of one sample (positions of an image, tokens of a text) depend on each other: they move together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from hf_stitch.analysis.resampling import Array, Places, check_count, chosen_metric, rows_by_sample
from hf_stitch.metrics._rows import Rows, paired
from hf_stitch.metrics.base import Metric, MomentsMetric
from hf_stitch.results import Result
from hf_stitch.statistics import DebiasedMoments, Moments

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class PermutationTestResult(Result):
    """A similarity beside those of the same rows with the samples of one side exchanged.

    Attributes:
        metric: The metric and its options.
        observed: Its value.
        values: (permutations,) its values with samples exchanged.
        higher_is_better: Whether a higher value means more similar.
        best: Its value where both sides are equal up to its invariances; infinite if there is none.
        samples: Number of samples.
        rows: Number of rows.
        seed: Of the permutations.
    """

    metric: str
    observed: float
    values: Array
    higher_is_better: bool
    best: float
    samples: int
    rows: int
    seed: int

    derived: ClassVar[tuple[str, ...]] = ("chance", "calibrated", "p_value", "z")

    @property
    def chance(self) -> float:
        """Mean of the null values: what chance scores."""
        return float(self.values.mean())

    @property
    def p_value(self) -> float:
        """Share of the permutations, the observed order among them, that make the sides at least as much alike.

        ``(1 + #) / (1 + B)``: never 0, and valid at any number B of permutations (Phipson and Smyth 2010). One-sided:
        *more* alike than chance. Values that differ by rounding count as equal.
        """
        rounding = 1e-12 * np.abs([self.observed, *self.values]).max()
        at_least = (self.values - self.observed) * (1 if self.higher_is_better else -1) >= -rounding
        return float(1 + at_least.sum()) / (1 + len(self.values))

    @property
    def z(self) -> float:
        """How many standard deviations of the null the sides are more alike than chance; NaN if it does not vary."""
        spread = float(self.values.std(ddof=1))
        more = (self.observed - self.chance) * (1 if self.higher_is_better else -1)
        return more / spread if spread > 0 else float("nan")

    @property
    def calibrated(self) -> float:
        """``(observed - chance) / (best - chance)``: 1 where equal, 0 at chance, below 0 where less alike than chance.

        The correction for chance of Cohen's kappa and of the adjusted Rand index (Hubert and Arabie 1985), with the
        mean of the null for chance; of ``disagreement`` it is the kappa. NaN where chance scores best, or the metric
        has no best value.
        """
        room = self.best - self.chance
        return (self.observed - self.chance) / room if room and np.isfinite(room) else float("nan")

    def to_pandas(self) -> pandas.DataFrame:
        """One row: metric, observed, chance, calibrated, p_value, z, and what they rest on."""
        import pandas

        figures = {
            key: value for key, value in self.to_dict().items() if key not in ("values", "best", "higher_is_better")
        }
        return pandas.DataFrame([{**figures, "permutations": len(self.values)}])

    def plot(self) -> Figure:
        """The null values as a histogram, with the observed value marked."""
        from hf_stitch.plots import histogram

        return histogram(self.values, {"observed": self.observed}, label=self.metric, title=f"p = {self.p_value:.3g}")

    def __rich__(self) -> str:
        """For example ``LinearCKA(debiased=False) 0.743, chance 0.741: calibrated 0.006, p = 0.373``."""
        return (
            f"{self.metric} {self.observed:.3f}, chance {self.chance:.3f}: calibrated {self.calibrated:.3f}, "
            f"p = {self.p_value:.3g}"
        )


@torch.no_grad()
def permutation_test(
    metric: str | Metric | type[Metric],
    x: Rows,
    y: Rows,
    *,
    samples: Sequence[Any] | ArrayLike | Tensor | None = None,
    permutations: int = 200,
    seed: int = 0,
    **options: Any,
) -> PermutationTestResult:
    """How alike two sides are beside how alike they are with the samples of y exchanged at random.

    All rows of a sample move together: row j of one sample is paired with row j of another. What does not depend on
    which samples meet, such as what all images have in common at a position, therefore counts as chance. A sample
    exchanges only with samples of as many rows.

    Metrics of ``Moments``, and debiased linear CKA, take one product of x with y per permutation; others are computed
    anew.

    Args:
        metric: A name in the registry of metrics, a metric or its class.
        x: (n, dx) array or tensor of rows.
        y: (n, dy); row i belongs to row i of x.
        samples: (n,) the sample that each row belongs to (``Representation.row_samples`` counts within a batch; give
            different batches different ids). ``None``: each row is a sample.
        permutations: At least 2; the p-value is at least ``1 / (1 + permutations)``.
        seed: Of the permutations. With ``samples`` given, the order in which samples come does not matter.
        **options: Of the metric.

    Returns:
        The observed value, the null values and what follows from them.

    Raises:
        ValueError: A sample has no other of as many rows; there are fewer than 2 samples; the metric takes labels, so
            that a pairing of samples says nothing; or what the metric itself refuses.

    Example:
        >>> x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
        >>> null = permutation_test("linear_cka", x, 2 * x, debiased=True, permutations=99)
        >>> round(null.observed, 6), null.p_value, round(null.calibrated, 1)
        (1.0, 0.01, 1.0)
    """
    chosen = chosen_metric(metric, options)
    if chosen.labelled:
        raise ValueError(
            f"{chosen.name} compares each side with the labels and not sample with sample, so that exchanging samples "
            "says nothing; see bootstrap for how sure it is"
        )
    check_count("permutations", permutations)
    x, y = paired(chosen.name, x, y)
    groups = rows_by_sample(samples, len(x))
    exchangeable = _exchangeable(groups)
    score, random = _pairing(chosen, x, y), np.random.default_rng(seed)
    orders = (torch.from_numpy(_exchanged(exchangeable, random)).to(y.device) for _ in range(permutations))
    observed = score(torch.arange(len(y), device=y.device))
    best = chosen.range[1] if chosen.higher_is_better else 0.0
    values = np.array([score(order) for order in orders])
    return PermutationTestResult(
        repr(chosen), observed, values, chosen.higher_is_better, best, len(groups), len(x), seed
    )


def _exchangeable(groups: Sequence[Places]) -> list[Places]:
    """Samples of as many rows, side by side: (samples, rows of each).

    Raises:
        ValueError: A sample has no other of as many rows.
    """
    alike: dict[int, list[Places]] = {}
    for places in groups:
        alike.setdefault(len(places), []).append(places)
    alone = [size for size, members in alike.items() if len(members) == 1]
    if alone:
        raise ValueError(
            f"{len(alone)} of {len(groups)} samples have no other of as many rows to exchange with (of "
            f"{', '.join(map(str, sorted(alone)[:5]))}{' …' if len(alone) > 5 else ''} rows): leave these samples out, "
            "or give one row per sample (pooling mean, cls or last)"
        )
    return [np.stack(members) for members in alike.values()]


def _exchanged(exchangeable: Sequence[Places], random: np.random.Generator) -> Places:
    """For each row of x the row of y that it meets."""
    order = np.empty(sum(places.size for places in exchangeable), np.intp)
    for places in exchangeable:
        order[places] = places[random.permutation(len(places))]
    return order


def _pairing(metric: Metric, x: Tensor, y: Tensor) -> Callable[[Tensor], float]:
    """The metric for x and the rows of y in another order; what no order changes is computed once."""
    debiased = metric.statistic == "debiased"
    if not isinstance(metric, MomentsMetric) or x.shape[1] + y.shape[1] > len(x):
        return lambda order: metric.function(x, y[order], **metric.options).item()
    kept = DebiasedMoments(x.shape[1], y.shape[1], x.device).update(x, y)
    x, y = x - kept.mean_x, y - kept.mean_y

    def from_moments(order: Tensor) -> float:
        parts = (kept.mean_x, kept.mean_y, kept.sxx, kept.syy)
        return metric.from_moments(Moments.of(kept.n, *parts, x.T @ y[order]))

    def from_debiased(order: Tensor) -> float:
        other = y[order]
        k = torch.stack([x.square().sum(1), other.square().sum(1)])
        moments = DebiasedMoments.of(kept.n, kept.mean_x, kept.mean_y, kept.sxx, kept.syy, x.T @ other)
        moments.kz, moments.kk = k @ torch.cat([x, other], 1), k @ k.T
        return metric.from_debiased(moments)  # type: ignore[attr-defined]

    return from_debiased if debiased else from_moments
