"""How sure is a similarity? A half-sample bootstrap: the unit is always the sample, never the row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from hf_stitch.analysis.resampling import Array, Places, check_count, chosen_metric, rows_by_sample
from hf_stitch.metrics._rows import Rows, paired
from hf_stitch.metrics.base import Metric, MomentsMetric
from hf_stitch.results import Result
from hf_stitch.statistics import Moments

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class ConfidenceInterval(Result):
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

    def __rich__(self) -> str:
        """For example ``LinearCKA(debiased=True) 0.530 [0.478, 0.583]``."""
        return f"{self.metric} {self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


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
) -> ConfidenceInterval:
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
    chosen = chosen_metric(metric, options)
    if chosen.labelled != (labels is not None):
        raise ValueError(f"{chosen.name} {'takes labels: pass labels=…' if chosen.labelled else 'takes no labels'}")
    check_count("resamples", resamples)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}")
    x, y = paired(chosen.name, x, y)
    groups = rows_by_sample(samples, len(x))
    if len(groups) < 4:
        raise ValueError(f"a bootstrap takes at least 4 samples, got {len(groups)}; give more samples")
    truth = None if labels is None else torch.as_tensor(labels, device=x.device)
    score, random = _restricted(chosen, x, y, groups, truth), np.random.default_rng(seed)
    value = score(np.arange(len(groups)))
    halves = (np.sort(random.permutation(len(groups))[: len(groups) // 2]) for _ in range(resamples))
    values = np.array(list(_scored(chosen, score, halves)))
    tail = (1 - confidence) / 2
    low, high = value + np.quantile(values, [tail, 1 - tail]) - values.mean()
    return ConfidenceInterval(
        repr(chosen), value, float(low), float(high), confidence, values, len(groups), len(x), seed
    )


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
        parts = (scatter[:dx, :dx], scatter[dx:, dx:], scatter[:dx, dx:])
        return metric.from_moments(Moments.of(int(n), means[:dx], means[dx:], *parts))

    return value


def _scored(metric: Metric, score: Callable[[Places], float], halves: Iterator[Places]) -> Iterator[float]:
    for half in halves:
        try:
            yield score(half)
        except ValueError as error:
            raise ValueError(f"half of the samples, a resample, does not determine {metric.name}: {error}") from error
