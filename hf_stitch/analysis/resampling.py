"""Bootstrap of a metric, and helpers of the tests: rows by sample, moments of a subset, Holm's procedure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hf_stitch.metrics._rows import Rows, paired
from hf_stitch.metrics.base import ActivationMetric, Metric, activation_metric
from hf_stitch.options import Natural, Several, Within, checked
from hf_stitch.results import Result
from hf_stitch.statistics import Moments
from hf_stitch.statistics.spectrum import eps_of

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

Array = NDArray[np.float64]
Places = NDArray[np.intp]  # indices of rows or of samples


def chosen_metric(metric: str | Metric | type[Metric], options: Mapping[str, Any]) -> ActivationMetric:
    """Return a metric instance from a name, an instance or a class, with ``options`` applied."""
    return activation_metric(metric(**options)) if isinstance(metric, type) else activation_metric(metric, **options)


def rows_by_sample(samples: Any, n: int) -> list[Places]:
    """Return the row indices of each sample, with the samples sorted by id."""
    if samples is None:
        return list(np.arange(n)[:, None])
    ids = samples.cpu().numpy() if isinstance(samples, Tensor) else np.asarray(samples)
    if ids.shape != (n,):
        raise ValueError(f"samples must have the shape ({n},), one sample id per row, got the shape {ids.shape}")
    _, owners, counts = np.unique(ids, return_inverse=True, return_counts=True)
    return np.split(np.argsort(owners, kind="stable"), np.cumsum(counts)[:-1])


class SampleRows:
    """Rows of one side by sample, or by group of samples, centred by the mean of all rows.

    Centring keeps the sums of products accurate.
    """

    def __init__(self, rows: Tensor, groups: Sequence[Places]) -> None:
        self.eps, rows = eps_of(rows), rows.double()
        self.mean = rows.mean(0)
        self.parts = [rows[torch.from_numpy(places).to(rows.device)] - self.mean for places in groups]
        self.sums = torch.stack([part.sum(0) for part in self.parts])
        self.products = self.products_with(self)

    def products_with(self, other: SampleRows) -> Tensor:
        """Return the products with the rows of another side, (samples, d, d of that side)."""
        return torch.stack([x.T @ y for x, y in zip(self.parts, other.parts, strict=True)])


class SampleMoments:
    """Moments of the paired rows of subsets of the samples, without another pass over the rows."""

    def __init__(self, x: SampleRows, y: SampleRows) -> None:
        self._counts = torch.tensor([len(part) for part in x.parts], device=x.sums.device)
        self._means, self._eps = (x.mean, y.mean), torch.cat([x.eps, y.eps])
        self._parts = x.sums, y.sums, x.products, y.products, x.products_with(y)
        self._all = [part.sum(0) for part in self._parts[2:]]

    def of(self, samples: Places) -> Moments:
        """Return the moments of a subset of the samples."""
        selected = torch.from_numpy(samples).to(self._counts.device)
        return self._moments(int(self._counts[selected].sum()), *(part[selected].sum(0) for part in self._parts))

    def without(self, sample: int) -> Moments:
        """Return the moments of all samples but one."""
        x, y, *products = (part[sample] for part in self._parts)
        remaining = (whole - product for whole, product in zip(self._all, products, strict=True))
        return self._moments(int(self._counts.sum() - self._counts[sample]), -x, -y, *remaining)

    def _moments(self, n: int, x: Tensor, y: Tensor, xx: Tensor, yy: Tensor, xy: Tensor) -> Moments:
        mean_x, mean_y = (mean + total / n for mean, total in zip(self._means, (x, y), strict=True))
        sxx, syy, sxy = (part - torch.outer(a, b) / n for part, a, b in ((xx, x, x), (yy, y, y), (xy, x, y)))
        return Moments.of(n, mean_x, mean_y, sxx, syy, sxy, self._eps)


def not_rejected(p_values: Array, level: float) -> NDArray[np.bool_]:
    """Return which candidates of each row Holm's procedure (1979) does not distinguish from the best one."""
    flags = np.zeros(p_values.shape, bool)
    for row, flags_of_row in zip(p_values, flags, strict=True):
        rivals = np.flatnonzero(~np.isnan(row))
        ordered = rivals[np.argsort(row[rivals], kind="stable")]
        tests = max(len(rivals) - 1, 1)  # without the best one
        rejected = 0
        while rejected < len(ordered) and row[ordered[rejected]] <= level / max(tests - rejected, 1):
            rejected += 1
        flags_of_row[ordered[rejected:]] = True
    return flags


@dataclass(frozen=True, eq=False)
class ConfidenceInterval(Result):
    """Value of a metric with its bootstrap confidence interval, returned by :func:`bootstrap`.

    Attributes:
        metric: The metric and its options.
        value: Value of the metric on all samples.
        low: Lower end of the interval.
        high: Upper end of the interval.
        confidence: Confidence level of the interval, between 0 and 1.
        values: (resamples,) float64, values of the metric on random halves of the samples.
        samples: Number of samples.
        rows: Number of rows.
        seed: Seed of the resamples.

    Example:
        >>> interval = ConfidenceInterval("LinearCKA()", 0.53, 0.48, 0.58, 0.95, np.array([0.5, 0.56]), 100, 100, 0)
        >>> print(interval)
        LinearCKA() 0.530 [0.480, 0.580]
    """

    metric: str
    value: float
    low: float
    high: float
    confidence: float
    values: Array
    samples: int
    rows: int
    seed: int

    @property
    def standard_error(self) -> float:
        """Standard deviation of the metric over the resampled halves."""
        return float(self.values.std(ddof=1))

    def to_pandas(self) -> pandas.DataFrame:
        """Return the interval as a data frame.

        Returns one row with the columns ``metric``, ``value``, ``low``, ``high``, ``confidence``, ``samples``,
        ``rows``, ``seed``, ``standard_error`` and ``resamples``.
        """
        import pandas

        figures = {key: value for key, value in asdict(self).items() if key != "values"}
        return pandas.DataFrame([{**figures, "standard_error": self.standard_error, "resamples": len(self.values)}])

    def plot(self) -> Figure:
        """Plot the value with its interval."""
        from hf_stitch.plots import intervals

        return intervals({"value": (self.value, self.low, self.high)}, self.metric)

    def __rich__(self) -> str:
        """Return one line, e.g. ``LinearCKA(debiased=True) 0.530 [0.478, 0.583]``."""
        return f"{self.metric} {self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@torch.no_grad()
@checked
def bootstrap(
    metric: str | Metric | type[Metric],
    x: Rows,
    y: Rows,
    *,
    samples: Sequence[Any] | ArrayLike | Tensor | None = None,
    resamples: Several = 200,
    seed: Natural = 0,
    confidence: Annotated[float, Within(0, 1, above=True, below=True)] = 0.95,
    **options: Any,
) -> ConfidenceInterval:
    """Compute a metric with a confidence interval by a half-sample bootstrap.

    Each resample is a random half of the samples, drawn without replacement. The spread over these halves estimates the
    spread over independent datasets of the full size (Politis, Romano and Wolf 1999, "Subsampling": the mean of n/2 out
    of n samples varies as much as the mean of n independent samples).

    Sampling with replacement is not used because it duplicates samples. A duplicate is its own nearest neighbour, which
    increases every metric that compares samples with each other or is fitted to them.

    The interval is the spread of the resampled values about their mean, shifted to the value on all samples. It covers
    the expected value of the metric at this number of samples. It does not remove the bias that a metric has at this
    number of samples (CCA, biased CKA), and it may extend beyond the range of the metric. The value of metrics based on
    nearest neighbours depends on the number of samples; their interval is up to about twice too wide.

    Args:
        metric: Name of a registered metric, a metric instance or a metric class.
        x: (n, dx) array or tensor of rows.
        y: (n, dy) array or tensor; row i corresponds to row i of ``x``.
        samples: (n,) id of the sample that each row belongs to. Samples may have different numbers of rows. ``None``
            treats each row as a sample.
        resamples: Number of resamples, at least 2.
        seed: Seed of the resamples. If ``samples`` is given, the result does not depend on the order of the samples.
        confidence: Confidence level of the interval, between 0 and 1.
        **options: Options of the metric.

    Example:
        >>> x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
        >>> interval = bootstrap("linear_cka", x, x + 0.5 * x.flip(0), resamples=50)
        >>> interval.low < interval.value < interval.high
        True
    """
    instance = chosen_metric(metric, options)
    x, y = paired(instance.name, x, y, exact=False)
    groups = rows_by_sample(samples, len(x))
    if len(groups) < 4:
        raise ValueError(f"a bootstrap requires at least 4 samples, got {len(groups)}; pass more samples")
    score, random = _restricted(instance, x, y, groups), np.random.default_rng(seed)
    value = score(np.arange(len(groups)))
    halves = (np.sort(random.permutation(len(groups))[: len(groups) // 2]) for _ in range(resamples))
    try:
        values = np.array([score(half) for half in halves])
    except ValueError as error:
        raise ValueError(f"{instance.name} is undefined on half of the samples: {error}; pass more samples") from error
    tail = (1 - confidence) / 2
    low, high = value + np.quantile(values, [tail, 1 - tail]) - values.mean()
    return ConfidenceInterval(
        repr(instance), value, float(low), float(high), confidence, values, len(groups), len(x), seed
    )


def _restricted(metric: ActivationMetric, x: Tensor, y: Tensor, groups: Sequence[Places]) -> Callable[[Places], float]:
    """Return the metric as a function of the chosen samples; it uses per-sample moments if they are smaller."""
    if metric.statistic == "moments" and len(x) > len(groups) * (x.shape[1] + y.shape[1]):
        moments = SampleMoments(SampleRows(x, groups), SampleRows(y, groups))
        return lambda chosen: metric.from_moments(moments.of(chosen))  # type: ignore[attr-defined]

    def from_rows(selected: Places) -> float:
        rows = torch.from_numpy(np.sort(np.concatenate([groups[i] for i in selected]))).to(x.device)
        return metric.function(x[rows], y[rows], **metric.options).item()

    return from_rows
