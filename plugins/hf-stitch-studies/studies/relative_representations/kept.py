"""How much of the score of a head remains when another encoder replaces its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import study
from numpy.typing import NDArray

Array = NDArray[np.float64]
RESAMPLES = 2_000


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95% interval over networks."""

    value: float
    low: float
    high: float

    def above(self, bound: float) -> bool | None:
        """Return whether the interval lies at or above a bound; ``None`` if it contains the bound."""
        return study.above(vars(self), bound)

    def below(self, bound: float) -> bool | None:
        """Return whether the interval lies below a bound; ``None`` if it contains the bound."""
        return study.below(vars(self), bound)

    def minus(self, other: "Estimate") -> "Estimate":
        """Estimate the difference from that of other networks."""
        return Estimate(**study.difference(vars(self), vars(other)))

    def shown(self, digits: int = 1) -> str:
        """Format as value [low, high]."""
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def scores(found: pd.DataFrame, **labels: str) -> list[dict[str, Any]]:
    """Return the F1 scores of an exchange for a record.

    Args:
        found: Scores from :func:`swapping.exchange`.
        labels: What all rows have in common, for example the task.

    Returns:
        For each method, the labels, the method and ``f1``: rows of decoders by columns of encoders, as means over
        seeds; ``None`` where the method is undefined.
    """
    decoders, encoders = list(found.decoder.unique()), list(found.encoder.unique())
    rows = []
    for method, part in found.groupby("method", sort=False):
        means = part.groupby(["decoder", "encoder"]).f1.mean()
        f1 = [[round(means[d, e], 1) if (d, e) in means.index else None for e in encoders] for d in decoders]
        rows.append({**labels, "method": method, "f1": f1})
    return rows


def matrix(record: dict[str, Any], method: str, **labels: str) -> Array:
    """Return the F1 scores of one method from the scores of a record, with NaN for ``None``."""
    for row in record["scores"]:
        if row["method"] == method and all(row[key] == value for key, value in labels.items()):
            return np.array(row["f1"], dtype=float)
    raise KeyError(f"the record has no scores of {method} for {labels}")


class Pairs:
    """Ordered pairs of different networks, and draws of networks.

    A draw takes the networks of each group with replacement; a pair counts as often as both of its networks were drawn.

    Args:
        groups: Group of each network, for example its architecture.
        between: Whether a pair has networks of two groups. If not, both are of the same group.
    """

    def __init__(self, groups: Sequence[str], between: bool = False) -> None:
        of = np.array(groups)
        self.mask = (of[:, None] != of) if between else (of[:, None] == of) & ~np.eye(len(of), dtype=bool)
        random, counts = np.random.default_rng(0), np.zeros((RESAMPLES, len(of)))
        for group in dict.fromkeys(groups):
            places = np.flatnonzero(of == group)
            counts[:, places] = random.multinomial(len(places), np.full(len(places), 1 / len(places)), RESAMPLES)
        self._weights = counts[:, :, None] * counts[:, None] * self.mask

    def mean(self, values: Array) -> Estimate:
        """Estimate the mean of values ``(decoders, encoders)`` over pairs; NaN is left out."""
        return self.ratio(values, np.ones_like(values))

    def kept(self, f1: Array, chance: float) -> Estimate:
        """Estimate the share of the score above chance that is kept: ``(F1 - chance) / (ceiling - chance)``.

        The ceiling is the score of the head with its own encoder. With a chance of 0 it is the raw share.
        """
        ceiling = np.broadcast_to(np.diag(f1)[:, None], f1.shape)
        return self.ratio(f1 - chance, ceiling - chance)

    def ratio(self, above: Array, below: Array) -> Estimate:
        """Estimate the ratio of two sums over pairs."""
        value, drawn = self._ratios(above, below)
        return _estimate(value, drawn)

    def kept_more(self, f1: Array, other: Array, chance: float) -> Estimate:
        """Estimate by how much the share above chance that is kept exceeds that of other scores, on the same draws."""
        ratios = []
        for some in (f1, other):
            ceiling = np.broadcast_to(np.diag(some)[:, None], some.shape)
            ratios.append(self._ratios(some - chance, ceiling - chance))
        (value, drawn), (less, drawn_less) = ratios
        return _estimate(value - less, drawn - drawn_less)

    def _ratios(self, above: Array, below: Array) -> tuple[float, Array]:
        """Return the ratio of two sums over pairs, and that of every draw; NaN for a draw without pairs."""
        defined = self.mask & np.isfinite(above) & np.isfinite(below)
        above, below = (np.where(defined, values, 0.0) for values in (above, below))
        sums = [(self._weights * values).sum((1, 2)) for values in (above, below)]
        with np.errstate(invalid="ignore", divide="ignore"):
            drawn = np.where(np.abs(sums[1]) > 0, sums[0] / sums[1], np.nan)
        return float(above.sum() / below.sum()), drawn


def _estimate(value: float, drawn: Array) -> Estimate:
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return Estimate(value, float(low), float(high))
