"""Measurements of predictors in a pass, and their scores with confidence intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from hf_stitch.tasks.base import Answers, Array, Task

NULLS = ("identity", "mean_only", "chance")
"""Baselines without information from the source."""


@dataclass(frozen=True)
class Score:
    """Figure with its 95% confidence interval (percentile bootstrap over samples).

    Attributes:
        value: The figure on all samples.
        low: Lower end of the interval.
        high: Upper end of the interval.

    Example:
        >>> print(Score(0.913, 0.902, 0.923))
        0.913 [0.902, 0.923]
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return the figure with its interval, e.g. ``0.913 [0.902, 0.923]``; a dash if undefined."""
        ends = "–" if np.isnan(self.low) else f"{self.low:.3f}, {self.high:.3f}"
        return "–" if np.isnan(self.value) else f"{self.value:.3f} [{ends}]"


@dataclass(frozen=True)
class Measure:
    """Key of a measure of outputs for each sample."""

    front: str  # name of the halves
    who: str  # predictor, target or source
    name: str  # the measure


@dataclass(frozen=True)
class Record:
    """Key of a watch's record of activations for each sample."""

    what: str  # norm or error, or the activations that a detector scored: own, doses, stitched
    view: str  # view of the activations
    place: str  # layer of the target, or name of the predictor of the activations
    front: str = ""  # name of the halves of this predictor
    name: str = ""  # name of a detector's record


@dataclass(frozen=True)
class Measured:
    """Measurements of all samples in a pass."""

    task: Task
    answers: Mapping[str, Mapping[str, Answers]]  # name of halves -> predictor, target and source -> measures
    seen: Mapping[Record, Array]  # records of a watch

    def drawn(self, name: str, resamples: int, seed: int) -> dict[str, dict[str, Array]]:
        """Return the figures of all predictors of the named halves and of chance, on all samples and on resamples."""
        answers = self.answers[name]
        chance = {"chance": self.task.chance(answers, seed)}
        return self.task.drawn({**answers, **chance}, resamples=resamples, seed=seed)


def not_beaten(task: Task, drawn: Mapping[str, Mapping[str, Array]], rivals: Iterable[str] = NULLS) -> tuple[str, ...]:
    """Return the baselines that a stitched model does not beat, by the first figure that is defined for any of them.

    A baseline is beaten if the 95% interval of the paired difference over the resamples lies above 0. NaN, such as the
    figure of NaN outputs, is worse than any number.
    """
    model, nulls = drawn["stitched"], {name: drawn[name] for name in rivals if name in drawn}
    figure = next((name for name in model if not all(np.isnan(row[name][0]) for row in (model, *nulls.values()))), None)
    if figure is None:
        return ()
    if np.isnan(model[figure][0]):
        return tuple(nulls)
    sign = 1 if task.figures[figure] else -1
    differences = {name: sign * (model[figure] - row[figure])[1:] for name, row in nulls.items()}
    return tuple(name for name, values in differences.items() if not len(values) or np.nanquantile(values, 0.025) <= 0)


def with_interval(resampled: Array) -> Array:
    """Return figures on all samples, and both ends of their 95% intervals: percentiles of the resamples.

    The interval is NaN without resamples and for undefined figures. Resamples with an undefined figure do not count,
    such as relative accuracies if the target is always wrong.
    """
    low, high = np.full((2, *resampled[0].shape), np.nan)
    if len(resampled) > 1:
        undefined = np.isnan(resampled[0])
        ends = np.nanquantile(np.where(undefined, 0.0, resampled[1:]), [0.025, 0.975], axis=0)
        low, high = np.where(undefined, np.nan, ends)
    return np.stack([resampled[0], low, high], -1)


def as_score(drawn: Array) -> Score:
    """Return the figure on all samples with the percentiles of the resamples."""
    return Score(*with_interval(drawn).tolist())


def scores_of(drawn: Mapping[str, Mapping[str, Array]]) -> dict[str, dict[str, Score]]:
    """Return the figures of all predictors with their intervals."""
    return {who: {figure: as_score(values) for figure, values in row.items()} for who, row in drawn.items()}
