"""Share of a head's score that another encoder keeps, with intervals over networks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import study
from numpy.typing import NDArray
from scipy.stats import binom
from study import Estimate

Array = NDArray[np.float64]
RESAMPLES = 2_000
ABSOLUTE, RELATIVE, CHANCE = "absolute", "relative", "chance"


def student(values: Sequence[float] | Array) -> Estimate:
    return Estimate(**study.over(values))


def median(values: Array) -> Estimate:
    """Estimate a median with the interval of order statistics."""
    ordered = np.sort(values)
    out = int(binom.ppf(0.025, len(ordered), 0.5))  # number of smallest and of largest values outside the interval
    return Estimate(float(np.median(ordered)), float(ordered[max(out - 1, 0)]), float(ordered[-max(out, 1)]))


def spread(values: Sequence[float], digits: int = 1) -> str:
    deviation = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{deviation}"


def span(values: Iterable[float], form: str = ".2f") -> str:
    """Format values as "smallest to largest", or as a single number if both look equal."""
    numbers = list(values)
    return " to ".join(dict.fromkeys([f"{end(numbers):{form}}" for end in (min, max)]))


def filled(script: str, rows: Iterable[Mapping[str, str]], options: str = "", **figures: Any) -> str:
    """Fill a page of this folder, with further options of its command."""
    return study.filled(script, rows, f"{options} --data-dir DATA --cache CACHE --out OUT".strip(), **figures)


class Pairs:
    """Ordered pairs of different networks, and draws of networks.

    A draw resamples the networks of each group with replacement; the weight of a pair is the product of the counts of
    its networks.
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
        """Estimate the kept share of the score above chance: ``(F1 - chance) / (own - chance)``."""
        return self.ratio(*_above(f1, chance))

    def kept_more(self, f1: Array, baseline: Array, chance: float) -> Estimate:
        """Estimate the difference between the kept shares of two sets of scores, on the same draws."""
        (value, drawn), (less, drawn_less) = (self._ratios(*_above(some, chance)) for some in (f1, baseline))
        return _estimate(value - less, drawn - drawn_less)

    def ratio(self, above: Array, below: Array) -> Estimate:
        return _estimate(*self._ratios(above, below))

    def _ratios(self, above: Array, below: Array) -> tuple[float, Array]:
        """Return the ratio of two sums over pairs, and the ratio of every draw; NaN for a draw without pairs."""
        defined = self.mask & np.isfinite(above) & np.isfinite(below)
        above, below = (np.where(defined, values, 0.0) for values in (above, below))
        sums = [(self._weights * values).sum((1, 2)) for values in (above, below)]
        with np.errstate(invalid="ignore", divide="ignore"):
            drawn = np.where(np.abs(sums[1]) > 0, sums[0] / sums[1], np.nan)
        return float(above.sum() / below.sum()), drawn


def _above(f1: Array, chance: float) -> tuple[Array, Array]:
    """Return scores above chance, and the scores above chance of heads with their own encoders."""
    return f1 - chance, np.broadcast_to(np.diag(f1)[:, None], f1.shape) - chance


def _estimate(value: float, drawn: Array) -> Estimate:
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return Estimate(value, float(low), float(high))


class Exchange:
    """Scores of encoders under each other's heads: method -> F1 by decoder and encoder, with pairs of networks."""

    def __init__(self, f1: Mapping[str, Array], pairs: Pairs, chance: float | None = None) -> None:
        self.f1, self.pairs = f1, pairs
        self.chance = float(np.nanmean(f1.get(CHANCE, np.nan))) if chance is None else chance

    @classmethod
    def of(cls, record: Mapping[str, Any], pairs: Pairs, **labels: str) -> "Exchange":
        rows = [row for row in record["scores"] if all(row[key] == value for key, value in labels.items())]
        return cls({row["method"]: np.array(row["f1"], dtype=float) for row in rows}, pairs)

    def defined(self, method: str) -> bool:
        """Return whether a method is defined between these networks."""
        return method in self.f1 and bool(np.isfinite(self.f1[method][self.pairs.mask]).any())

    def own(self, method: str) -> float:
        """Return the mean F1 of heads with their own encoders."""
        return float(np.diag(self.f1[method]).mean())

    def stitched(self, method: str) -> Estimate:
        return self.pairs.mean(self.f1[method])

    def kept(self, method: str, chance: float | None = None) -> Estimate:
        """Estimate the kept share of the score above chance with another encoder; the raw share with a chance of 0."""
        return self.pairs.kept(self.f1[method], self.chance if chance is None else chance)

    def kept_more(self, method: str, less: str) -> Estimate:
        """Estimate the difference between the kept shares of two methods, paired by networks."""
        return self.pairs.kept_more(self.f1[method], self.f1[less], self.chance)

    def more(self, method: str = RELATIVE, less: str = ABSOLUTE) -> Estimate:
        """Estimate the difference between the stitched F1 of two methods, paired by networks."""
        return self.pairs.mean(self.f1[method] - self.f1[less])

    def holds(self, much: float, little: float) -> bool:
        """Return whether relative heads keep at least ``much``, and absolute heads, if defined, at most ``little``."""
        fails = not self.defined(ABSOLUTE) or self.kept(ABSOLUTE).high <= little
        return self.kept(RELATIVE).low >= much and fails

    def row(self, method: str) -> tuple[str, str, str]:
        return f"{self.own(method):.1f}", self.stitched(method).shown(), self.kept(method).shown(2)


def scores(frame: pd.DataFrame, **labels: str) -> list[dict[str, Any]]:
    """Convert the F1 scores of :func:`swapping.exchange` to rows of a record, with ``f1`` for each method.

    ``f1`` has rows of decoders by columns of encoders; ``None`` where the method is undefined.
    """
    decoders, encoders = list(frame.decoder.unique()), list(frame.encoder.unique())
    rows = []
    for method, part in frame.groupby("method", sort=False):
        means = part.set_index(["decoder", "encoder"]).f1
        f1 = [[round(means[d, e], 1) if (d, e) in means.index else None for e in encoders] for d in decoders]
        rows.append({**labels, "method": method, "f1": f1})
    return rows
