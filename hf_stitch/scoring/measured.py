"""What a pass has measured of predictors, and their scores with intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from hf_stitch.tasks.base import Answers, Array, Task

NULLS = ("identity", "mean_only", "chance")
"""Baselines that carry nothing over from the source."""


@dataclass(frozen=True)
class Score:
    """A figure with its 95% confidence interval (percentile bootstrap over samples).

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
        """Return the figure with its interval, e.g. ``0.913 [0.902, 0.923]``; a dash for what is undefined."""
        ends = "–" if np.isnan(self.low) else f"{self.low:.3f}, {self.high:.3f}"
        return "–" if np.isnan(self.value) else f"{self.value:.3f} [{ends}]"


@dataclass(frozen=True)
class Measure:
    """What was measured of outputs, for each sample."""

    front: str  # name of the halves
    who: str  # predictor, target or source
    name: str  # the measure


@dataclass(frozen=True)
class Kept:
    """What a watch has kept of activations, for each sample."""

    what: str  # norm or error, or whose activations a detector was shown: own, doses, stitched
    view: str  # what was looked at of them
    place: str  # layer of the target, or name of the predictor that made them
    front: str = ""  # name of the halves of this predictor
    name: str = ""  # what a detector keeps


@dataclass(frozen=True)
class Measured:
    """What a pass has measured of all samples."""

    task: Task
    answers: Mapping[str, Mapping[str, Answers]]  # name of halves -> predictor, target and source -> measures
    seen: Mapping[Kept, Array]  # what a watch kept

    def drawn(self, name: str, resamples: int, seed: int) -> dict[str, dict[str, Array]]:
        """Return the figures of all predictors between some halves, and of chance, on all samples and on resamples."""
        found = self.answers[name]
        chance = {"chance": self.task.chance(found, seed)}
        return self.task.drawn({**found, **chance}, resamples=resamples, seed=seed)


def not_beaten(task: Task, drawn: Mapping[str, Mapping[str, Array]], rivals: Iterable[str] = NULLS) -> tuple[str, ...]:
    """Return the baselines that a stitched model does not beat, by the first figure that is defined for one of all.

    A baseline is beaten if the 95% interval of the paired difference over the resamples lies above 0. What is NaN, as
    the figures of outputs that are, is worse than any figure.
    """
    own, others = drawn["stitched"], {name: drawn[name] for name in rivals if name in drawn}
    figure = next((name for name in own if not all(np.isnan(row[name][0]) for row in (own, *others.values()))), None)
    if figure is None:
        return ()
    if np.isnan(own[figure][0]):
        return tuple(others)
    sign = 1 if task.figures[figure] else -1
    apart = {name: sign * (own[figure] - row[figure])[1:] for name, row in others.items()}
    return tuple(name for name, values in apart.items() if not len(values) or np.nanquantile(values, 0.025) <= 0)


def with_interval(drawn: Array) -> Array:
    """Return figures on all samples, and both ends of their 95% intervals: percentiles of the resamples.

    There is no interval where the figure itself is undefined, or without resamples. Resamples for which it is undefined
    do not count, such as relative accuracies where the target has no correct sample.
    """
    low, high = np.full((2, *drawn[0].shape), np.nan)
    if len(drawn) > 1:
        undefined = np.isnan(drawn[0])
        ends = np.nanquantile(np.where(undefined, 0.0, drawn[1:]), [0.025, 0.975], axis=0)
        low, high = np.where(undefined, np.nan, ends)
    return np.stack([drawn[0], low, high], -1)


def as_score(drawn: Array) -> Score:
    """Return the figure on all samples with the percentiles of the resamples."""
    return Score(*with_interval(drawn).tolist())


def scores_of(drawn: Mapping[str, Mapping[str, Array]]) -> dict[str, dict[str, Score]]:
    """Return the figures of all predictors with their intervals."""
    return {who: {figure: as_score(values) for figure, values in row.items()} for who, row in drawn.items()}
