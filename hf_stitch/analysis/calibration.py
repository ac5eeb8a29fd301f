"""Is a similarity better than chance, and how sure is it?

Both questions are answered from rows at hand, without running a network again, and the unit is always the *sample*:
rows of one sample (positions of an image, tokens of a text) depend on each other, and stay together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hf_stitch.metrics._rows import Rows, paired
from hf_stitch.metrics.base import Metric, MomentsMetric, build_metric
from hf_stitch.statistics import DebiasedMoments, Moments

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

Array = NDArray[np.float64]
Places = NDArray[np.intp]
Result = TypeVar("Result", "Null", "Interval")

_NUMBERS = ("observed", "best", "value", "low", "high", "confidence")


@dataclass(frozen=True, eq=False)
class Null:
    """A similarity beside those of the same rows with the samples of one side exchanged.

    Attributes:
        metric: The metric and its options.
        observed: Its value.
        values: (permutations,) its values with samples exchanged.
        is_distance: Whether less is more alike.
        best: Its value where both sides are equal up to its invariances; infinite if there is none.
        samples: Number of samples.
        rows: Number of rows.
        seed: Of the permutations.
    """

    metric: str
    observed: float
    values: Array
    is_distance: bool
    best: float
    samples: int
    rows: int
    seed: int

    @property
    def mean(self) -> float:
        """Mean of the null values: what chance scores."""
        return float(self.values.mean())

    @property
    def p_value(self) -> float:
        """Share of the permutations, the observed order among them, that make the sides at least as much alike.

        ``(1 + #) / (1 + B)``: never 0, and valid at any number B of permutations (Phipson and Smyth 2010). One-sided:
        *more* alike than chance. Values that differ by rounding count as equal.
        """
        rounding = 1e-12 * np.abs([self.observed, *self.values]).max()
        at_least = (self.values - self.observed) * (-1 if self.is_distance else 1) >= -rounding
        return float(1 + at_least.sum()) / (1 + len(self.values))

    @property
    def z(self) -> float:
        """How many standard deviations of the null the sides are more alike than chance; NaN if it does not vary."""
        spread = float(self.values.std(ddof=1))
        more = (self.observed - self.mean) * (-1 if self.is_distance else 1)
        return more / spread if spread > 0 else float("nan")

    @property
    def calibrated(self) -> float:
        """``(observed - chance) / (best - chance)``: 1 where equal, 0 at chance, below 0 where less alike than chance.

        The correction for chance of Cohen's kappa and of the adjusted Rand index (Hubert and Arabie 1985), with the
        mean of the null for chance; of ``disagreement`` it is the kappa. NaN where chance scores best, or the metric
        has no best value.
        """
        room = self.best - self.mean
        return (self.observed - self.mean) / room if room and np.isfinite(room) else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """As JSON values (NaN and infinity as text), the null values too; :meth:`from_dict` gives it back."""
        figures = {
            **self._figures(),
            "best": self.best,
            "is_distance": self.is_distance,
            "values": self.values.tolist(),
        }
        return {key: _json(value) for key, value in figures.items()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Null:
        """Read :meth:`to_dict`; what follows from the rest is computed anew."""
        return _read(cls, record)

    def to_pandas(self) -> pandas.DataFrame:
        """One row: metric, observed, chance, calibrated, p_value, z, and what they rest on."""
        import pandas

        return pandas.DataFrame([self._figures()])

    def plot(self) -> Figure:
        """The null values as a histogram, with the observed value marked."""
        from hf_stitch.plots import histogram

        return histogram(self.values, {"observed": self.observed}, label=self.metric, title=f"p = {self.p_value:.3g}")

    def __str__(self) -> str:
        """For example ``LinearCKA(debiased=False) 0.743, chance 0.741: calibrated 0.006, p = 0.373``."""
        return (
            f"{self.metric} {self.observed:.3f}, chance {self.mean:.3f}: calibrated {self.calibrated:.3f}, "
            f"p = {self.p_value:.3g}"
        )

    def _figures(self) -> dict[str, Any]:
        return {
            "metric": self.metric, "observed": self.observed, "chance": self.mean, "calibrated": self.calibrated,
            "p_value": self.p_value, "z": self.z, "permutations": len(self.values), "samples": self.samples,
            "rows": self.rows, "seed": self.seed,
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class Interval:
    """A similarity and how much it varies from one draw of as many samples to another.

    Attributes:
        metric: The metric and its options.
        value: Its value on all samples.
        low: Lower end of the interval.
        high: Upper end.
        confidence: Of the interval.
        values: (resamples,) its values on halves of the samples.
        samples: Number of samples.
        rows: Number of rows.
        seed: Of the resamples.
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
        """Standard deviation of the value over the halves."""
        return float(self.values.std(ddof=1))

    def to_dict(self) -> dict[str, Any]:
        """As JSON values (NaN and infinity as text), those on the halves too; :meth:`from_dict` gives it back."""
        return {key: _json(value) for key, value in {**asdict(self), "values": self.values.tolist()}.items()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Interval:
        """Read :meth:`to_dict`."""
        return _read(cls, record)

    def to_pandas(self) -> pandas.DataFrame:
        """One row: metric, value, low, high, confidence, standard_error, and what they rest on."""
        import pandas

        figures = {key: value for key, value in asdict(self).items() if key != "values"}
        return pandas.DataFrame([{**figures, "standard_error": self.standard_error, "resamples": len(self.values)}])

    def plot(self) -> Figure:
        """The resampled values, about the value on all samples, as a histogram with value and interval marked."""
        from hf_stitch.plots import histogram

        about = self.values - self.values.mean() + self.value
        return histogram(about, {"low": self.low, "value": self.value, "high": self.high}, label=self.metric)

    def __str__(self) -> str:
        """For example ``LinearCKA(debiased=True) 0.530 [0.478, 0.583]``."""
        return f"{self.metric} {self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def _json(value: Any) -> Any:
    """Numbers that JSON does not have, as text."""
    if isinstance(value, list):
        return [_json(item) for item in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


def _read(kind: type[Result], record: Mapping[str, Any]) -> Result:
    """A result from its fields; numbers may be text."""
    kept = {field.name: record[field.name] for field in fields(kind)}
    numbers = {name: float(value) for name, value in kept.items() if name in _NUMBERS}
    return kind(**{**kept, **numbers, "values": np.array(list(map(float, record["values"])))})


@torch.no_grad()
def permutation_null(
    metric: str | Metric | type[Metric],
    x: Rows,
    y: Rows,
    *,
    samples: Sequence[Any] | ArrayLike | Tensor | None = None,
    permutations: int = 200,
    seed: int = 0,
    **options: Any,
) -> Null:
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
        >>> null = permutation_null("linear_cka", x, 2 * x, debiased=True, permutations=99)
        >>> round(null.observed, 6), null.p_value, round(null.calibrated, 1)
        (1.0, 0.01, 1.0)
    """
    chosen = _chosen(metric, options)
    if chosen.labelled:
        raise ValueError(
            f"{chosen.name} compares each side with the labels and not sample with sample, so that exchanging samples "
            "says nothing; see bootstrap for how sure it is"
        )
    _check_count("permutations", permutations)
    x, y = paired(chosen.name, x, y)
    groups = _rows_by_sample(samples, len(x))
    exchangeable = _exchangeable(groups)
    score, random = _pairing(chosen, x, y), np.random.default_rng(seed)
    orders = (torch.from_numpy(_exchanged(exchangeable, random)).to(y.device) for _ in range(permutations))
    observed = score(torch.arange(len(y), device=y.device))
    best = 0.0 if chosen.is_distance else chosen.range[1]
    values = np.array([score(order) for order in orders])
    return Null(repr(chosen), observed, values, chosen.is_distance, best, len(groups), len(x), seed)


@torch.no_grad()
def bootstrap(
    metric: str | Metric | type[Metric],
    x: Rows,
    y: Rows,
    *,
    samples: Sequence[Any] | ArrayLike | Tensor | None = None,
    labels: ArrayLike | Tensor | None = None,
    resamples: int = 200,
    seed: int = 0,
    confidence: float = 0.95,
    **options: Any,
) -> Interval:
    """How much a similarity varies from one draw of as many samples to another: a half-sample bootstrap.

    Each resample is a random half of the samples, drawn without replacement: the spread over halves is that over draws
    of all (Politis, Romano and Wolf 1999, "Subsampling"; a mean of n varies as that of n/2 out of n). The
    usual resample with replacement holds samples twice, which makes their own nearest neighbours of them, and
    any metric that compares samples, or fits to them, greater than it was. The interval is that of the resampled
    values about their mean, moved to the value on all samples. It is one for what so many samples score on
    average: a bias that the metric has at this number of samples (of CCA, of biased CKA) is not taken off. It may
    reach beyond the metric's range. For metrics of neighbours, which change with the half, it is too wide, by up to
    about two times.

    Args:
        metric: A name in the registry of metrics, a metric or its class.
        x: (n, dx) array or tensor of rows.
        y: (n, dy); row i belongs to row i of x.
        samples: (n,) the sample that each row belongs to; ``None``: each row is a sample. Numbers of rows may differ.
        labels: (n,) for a metric that takes labels.
        resamples: At least 2.
        seed: Of the resamples. With ``samples`` given, the order in which samples come does not matter.
        confidence: Between 0 and 1.
        **options: Of the metric.

    Returns:
        The value with its interval.

    Raises:
        ValueError: There are fewer than 4 samples, half of them do not determine the metric, labels are missing or
            superfluous, or what the metric itself refuses.

    Example:
        >>> x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
        >>> interval = bootstrap("linear_cka", x, x + 0.5 * x.flip(0), resamples=50)
        >>> interval.low < interval.value < interval.high
        True
    """
    chosen = _chosen(metric, options)
    if chosen.labelled != (labels is not None):
        raise ValueError(f"{chosen.name} {'takes labels: pass labels=…' if chosen.labelled else 'takes no labels'}")
    _check_count("resamples", resamples)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    x, y = paired(chosen.name, x, y)
    groups = _rows_by_sample(samples, len(x))
    if len(groups) < 4:
        raise ValueError(f"a bootstrap takes at least 4 samples, got {len(groups)}; give more samples")
    truth = None if labels is None else torch.as_tensor(labels, device=x.device)
    score, random = _restricted(chosen, x, y, groups, truth), np.random.default_rng(seed)
    value = score(np.arange(len(groups)))
    halves = (np.sort(random.permutation(len(groups))[: len(groups) // 2]) for _ in range(resamples))
    values = np.array(list(_scored(chosen, score, halves)))
    tail = (1 - confidence) / 2
    low, high = value + np.quantile(values, [tail, 1 - tail]) - values.mean()
    return Interval(repr(chosen), value, float(low), float(high), confidence, values, len(groups), len(x), seed)


def _chosen(metric: str | Metric | type[Metric], options: Mapping[str, Any]) -> Metric:
    return metric(**options) if isinstance(metric, type) else build_metric(metric, **options)


def _check_count(name: str, count: int) -> None:
    if count < 2:
        raise ValueError(f"{name} must be at least 2, got {count}")


# -- samples -----------------------------------------------------------------------------------------------------------


def _rows_by_sample(samples: Any, n: int) -> list[Places]:
    """Where the rows of each sample are, in order; the samples by their ids."""
    if samples is None:
        return list(np.arange(n)[:, None])
    ids = samples.cpu().numpy() if isinstance(samples, Tensor) else np.asarray(samples)
    if ids.shape != (n,):
        raise ValueError(f"samples must name the sample of each of the {n} rows, got the shape {ids.shape}")
    _, owners, counts = np.unique(ids, return_inverse=True, return_counts=True)
    return np.split(np.argsort(owners, kind="stable"), np.cumsum(counts)[:-1])


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
            "or give one row per sample (rows policy mean, cls or last)"
        )
    return [np.stack(members) for members in alike.values()]


def _exchanged(exchangeable: Sequence[Places], random: np.random.Generator) -> Places:
    """For each row of x the row of y that it meets."""
    order = np.empty(sum(places.size for places in exchangeable), np.intp)
    for places in exchangeable:
        order[places] = places[random.permutation(len(places))]
    return order


# -- values ------------------------------------------------------------------------------------------------------------


def _pairing(metric: Metric, x: Tensor, y: Tensor) -> Callable[[Tensor], float]:
    """The metric for x and the rows of y in another order; what no order changes is computed once."""
    debiased = metric.statistic == "debiased"
    if not isinstance(metric, MomentsMetric) or x.shape[1] + y.shape[1] > len(x):
        return lambda order: metric.function(x, y[order], **metric.options).item()
    kept = DebiasedMoments(x.shape[1], y.shape[1], x.device).update(x, y)
    state = (kept if debiased else kept.moments).state_dict()
    x, y = x - kept.moments.mean_x, y - kept.moments.mean_y

    def from_moments(order: Tensor) -> float:
        return metric.from_moments(Moments.from_state_dict({**state, "sxy": x.T @ y[order]}))

    def from_debiased(order: Tensor) -> float:
        other = y[order]
        k = torch.stack([x.square().sum(1), other.square().sum(1)])
        changed = {"sxy": x.T @ other, "kz": k @ torch.cat([x, other], 1), "kk": k @ k.T}
        return metric.from_debiased(DebiasedMoments.from_state_dict({**state, **changed}))  # type: ignore[attr-defined]

    return from_debiased if debiased else from_moments


def _restricted(
    metric: Metric, x: Tensor, y: Tensor, groups: Sequence[Places], labels: Tensor | None
) -> Callable[[Places], float]:
    """The metric for the rows of some of the samples; from one block of moments per sample where that is less."""
    if metric.statistic == "moments" and len(x) > len(groups) * (x.shape[1] + y.shape[1]):
        return _from_blocks(metric, x, y, groups)  # type: ignore[arg-type]

    def from_rows(chosen: Places) -> float:
        rows = torch.from_numpy(np.sort(np.concatenate([groups[i] for i in chosen]))).to(x.device)
        given = {} if labels is None else {"labels": labels[rows]}
        return metric.function(x[rows], y[rows], **metric.options, **given).item()

    return from_rows


def _from_blocks(metric: MomentsMetric, x: Tensor, y: Tensor, groups: Sequence[Places]) -> Callable[[Places], float]:
    dx, mean = x.shape[1], torch.cat([x.mean(0), y.mean(0)])
    rows = torch.cat([x, y], 1) - mean  # about one mean for all blocks, near that of any half: their sums are exact
    blocks = [rows[torch.from_numpy(places).to(x.device)] for places in groups]
    counts = torch.tensor([len(block) for block in blocks])
    sums = torch.stack([block.sum(0) for block in blocks])
    squares = torch.stack([block.T @ block for block in blocks])

    def value(chosen: Places) -> float:
        which = torch.from_numpy(chosen).to(x.device)
        n, total = counts[torch.from_numpy(chosen)].sum(), sums[which].sum(0)
        scatter = squares[which].sum(0) - torch.outer(total, total) / n
        means = mean + total / n
        parts = {"mean_x": means[:dx], "mean_y": means[dx:]}
        parts |= {"sxx": scatter[:dx, :dx], "syy": scatter[dx:, dx:], "sxy": scatter[:dx, dx:]}
        return metric.from_moments(Moments.from_state_dict({"n": n, **parts}))

    return value


def _scored(metric: Metric, score: Callable[[Places], float], halves: Iterator[Places]) -> Iterator[float]:
    for half in halves:
        try:
            yield score(half)
        except ValueError as error:
            raise ValueError(f"half of the samples, a resample, does not determine {metric.name}: {error}") from error
