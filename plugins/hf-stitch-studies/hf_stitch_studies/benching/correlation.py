"""Rank correlations of distances with differences in function, with intervals over networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hf_stitch.scoring.measured import Score

Array = NDArray[np.float64]
Test = Literal["sensitivity", "specificity"]
TESTS: tuple[Test, ...] = ("sensitivity", "specificity")
BASELINES = ("depth only", "rank only")
"""Distances that ignore the activations: difference in depth, and difference in rank."""

RELIABILITY = "probing, other half"
"""Difference of probing accuracy on the remaining test samples, as a predictor of the same quantity despite noise."""

CONFIDENCE = 0.95


@dataclass(frozen=True, eq=False)
class BenchGroup:
    """Representations of one test, and their distances from references.

    Attributes:
        test: ``sensitivity`` (low-rank approximations of one layer of all networks) or ``specificity`` (all layers of
            all networks).
        layer: The layer of a sensitivity group; empty for specificity.
        networks: Network of each of the m representations.
        layers: Layer of each representation.
        ranks: Rank of each representation; the width if it is not approximated.
        selection_accuracy: (m,) float64, probing accuracy on the half of the test samples that chooses references.
        accuracy: (m,) float64, probing accuracy on the second half.
        references: Indices of the references among the representations, best first, one per network.
        distances: Method -> (references, m) float64, the distance from each reference; NaN where it is undefined.

    Example:
        >>> accuracy = np.array([0.9, 0.7, 0.8])
        >>> group = BenchGroup(
        ...     "specificity", "", ("a", "b", "c"), ("0", "0", "1"), (2, 2, 2), accuracy, accuracy, (0,),
        ...     {"d": np.array([[0.0, 0.5, 0.4]])},
        ... )
        >>> group.gaps.round(1).tolist()
        [[0.0, 0.2, 0.1]]
    """

    test: Test
    layer: str
    networks: tuple[str, ...]
    layers: tuple[str, ...]
    ranks: tuple[int, ...]
    selection_accuracy: Array
    accuracy: Array
    references: tuple[int, ...]
    distances: Mapping[str, Array]

    @cached_property
    def gaps(self) -> Array:
        """(references, m) float64, the absolute differences of probing accuracy from each reference."""
        gaps: Array = np.abs(self.accuracy[list(self.references)][:, None] - self.accuracy)
        return gaps.round(12)  # equal gaps above and below the reference stay ties

    def compared(self, number: int, *, own_network: bool, without: str | None = None) -> NDArray[np.bool_]:
        """Return the mask of the representations that are compared with a reference: (m,) bool.

        Args:
            number: Number of the reference.
            own_network: Whether to include representations of the reference's network; the reference is always
                excluded.
            without: A network to leave out.
        """
        place = self.references[number]
        networks = np.array(self.networks)
        chosen = networks != without if without is not None else np.ones(len(networks), bool)
        if not own_network:
            chosen &= networks != self.networks[place]
        chosen[place] = False
        return chosen


@dataclass(frozen=True)
class BenchScore:
    """Rank correlations of one method with functional differences, in one test.

    Attributes:
        tau: Kendall's τ-b of distances and differences of probing accuracy, from the best reference; in the sensitivity
            test the mean over layers. The 95% interval comes from a delete-one-network jackknife, by :func:`fisher`.
        rho: Spearman's ρ, likewise.
        spread: Smallest and largest τ over the references.
        beyond: Baseline -> τ minus the τ of the baseline on the same pairs, with the interval of the paired difference;
            NaN where either is undefined.
        pairs: Number of pairs with the best reference.
        undefined: Number of these pairs with an undefined distance. They are left out.

    Example:
        >>> some = Score(0.6, 0.4, 0.8)
        >>> BenchScore(some, some, (0.5, 0.7), {"rank only": Score(0.1, -0.1, 0.3)}, 90, 0).beats
        False
    """

    tau: Score
    rho: Score
    spread: tuple[float, float]
    beyond: Mapping[str, Score]
    pairs: int
    undefined: int

    @property
    def beats(self) -> bool | None:
        """Whether the lower end of the interval of every difference from a baseline is above 0.

        ``None`` without a defined baseline.
        """
        lows = [score.low for score in self.beyond.values() if not math.isnan(score.value)]
        return all(low > 0 for low in lows) if lows else None


def rank_correlations(distances: Array, gaps: Array) -> tuple[float, float]:
    """Compute Kendall's τ-b and Spearman's ρ.

    Args:
        distances: (n,) float64.
        gaps: (n,) float64.

    Returns:
        τ-b and ρ; NaN with fewer than 3 pairs, or if either input is constant.

    Example:
        >>> rank_correlations(np.array([0.1, 0.2, 0.4]), np.array([1.0, 2.0, 3.0]))
        (1.0, 1.0)
    """
    from scipy.stats import rankdata

    if len(gaps) < 3 or np.ptp(gaps) == 0 or np.ptp(distances) == 0:
        return math.nan, math.nan
    # All pairs at once: for the hundreds of values of a bench this is several times faster than scipy.stats.kendalltau.
    x, y = (np.sign(np.subtract.outer(values, values)) for values in (distances, gaps))
    tau = (x * y).sum() / math.sqrt(np.abs(x).sum() * np.abs(y).sum())
    return float(tau), float(np.corrcoef(rankdata(distances), rankdata(gaps))[0, 1])


def jackknife(statistic: Callable[[str | None], Array], networks: Sequence[str]) -> list[Score]:
    """Compute figures with intervals by leaving out one network at a time (Quenouille 1956; Tukey 1958).

    The standard error is ``√((G − 1) / G · Σ (θ₋ᵢ − mean)²)`` over the G networks; the interval is θ plus and minus
    this times the quantile of Student's t with G − 1 degrees of freedom.

    Args:
        statistic: Returns the k figures without the named network; with ``None``, of all networks.
        networks: Names of the networks.

    Returns:
        The k figures with their 95% intervals; an interval is NaN if a figure is undefined without some network.

    Example:
        >>> sample = {"a": 1.0, "b": 2.0, "c": 6.0}
        >>> def mean(without):
        ...     return np.array([np.mean([value for name, value in sample.items() if name != without])])
        >>> [score] = jackknife(mean, list(sample))
        >>> score.value, round(score.high - score.value, 3)  # t · s / √n
        (3.0, 6.572)
    """
    from scipy.stats import t

    values = statistic(None)
    left = np.stack([statistic(name) for name in networks])
    count = len(networks)
    errors = np.sqrt((count - 1) / count * np.square(left - left.mean(0)).sum(0))
    reach = t.ppf((1 + CONFIDENCE) / 2, count - 1) * errors
    return [Score(float(v), float(v - r), float(v + r)) for v, r in zip(values, reach, strict=True)]


def fisher(score: Score) -> Score:
    """Bring the interval of a correlation into its range by Fisher's z (Fisher 1915; delta method for its width).

    Args:
        score: A correlation with a symmetric interval, which may exceed [-1, 1].

    Returns:
        The same correlation with the interval ``tanh(atanh(r) ± (high − r) / (1 − r²))``. At -1 and 1, z is undefined
            and the interval is clipped.

    Example:
        >>> found = fisher(Score(0.56, -0.04, 1.16))
        >>> round(found.low, 3), round(found.high, 3)
        (-0.237, 0.906)
    """
    if abs(score.value) >= 1:
        return Score(score.value, max(score.low, -1.0), min(score.high, 1.0))
    z, half = math.atanh(score.value), (score.high - score.value) / (1 - score.value**2)
    return Score(score.value, math.tanh(z - half), math.tanh(z + half))


def bench_score(groups: Sequence[BenchGroup], method: str, networks: Sequence[str], *, own_network: bool) -> BenchScore:
    """Score a method over the groups of one test.

    Args:
        groups: Groups of one test, which contain the method and all baselines.
        method: The method.
        networks: Names of all networks.
        own_network: Whether representations of the reference's own network are compared with it.

    Returns:
        The correlations, with intervals. Without the network of the best reference, the next best reference replaces
            it.

    Example:
        >>> gap = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
        >>> group = BenchGroup(
        ...     "specificity", "", tuple("abcabc"), tuple("000111"), (2,) * 6, 0.9 - gap, 0.9 - gap, (0, 1),
        ...     {"d": np.stack([gap, abs(gap - 0.1)]), "depth only": np.zeros((2, 6)), "rank only": np.zeros((2, 6))},
        ... )
        >>> bench_score([group], "d", "abc", own_network=False).tau.value
        1.0
    """
    rivals = () if method in BASELINES else BASELINES

    def of_groups(number: int, without: str | None) -> Array:
        """Return (groups, 2 + baselines): τ, ρ, and τ minus the τ of each baseline."""
        remaining = [_references(group, without)[number] for group in groups]
        pairs = zip(groups, remaining, strict=True)
        return np.array([_of_group(g, method, rivals, g.compared(k, own_network=own_network, without=without), k)
                         for g, k in pairs])  # fmt: skip

    defined = ~np.isnan(of_groups(0, None))

    def means(number: int, without: str | None) -> Array:
        """Average over the groups with a figure that is defined for all networks and the best reference."""
        figures = np.where(defined, of_groups(number, without), 0)
        with np.errstate(invalid="ignore"):
            mean: Array = figures.sum(0) / defined.sum(0)  # NaN where no group is defined
        return mean

    tau, rho, *beyond = jackknife(lambda without: means(0, without), networks)
    spread = [means(number, None)[0] for number in range(min(len(g.references) for g in groups))]
    ends = (float(np.nanmin(spread)), float(np.nanmax(spread))) if not np.isnan(spread).all() else (math.nan,) * 2
    values = np.concatenate([g.distances[method][0][g.compared(0, own_network=own_network)] for g in groups])
    return BenchScore(
        fisher(tau), fisher(rho), ends, dict(zip(rivals, beyond, strict=True)), len(values),
        int(np.isnan(values).sum()),
    )  # fmt: skip


def _references(group: BenchGroup, without: str | None) -> list[int]:
    """Return the numbers of the references that do not belong to ``without``, best first."""
    return [k for k, place in enumerate(group.references) if group.networks[place] != without]


def _of_group(
    group: BenchGroup, method: str, rivals: Sequence[str], compared: NDArray[np.bool_], number: int
) -> list[float]:
    distances = group.distances[method][number]
    defined = compared & ~np.isnan(distances)
    gaps = group.gaps[number, defined]
    tau, rho = rank_correlations(distances[defined], gaps)
    return [tau, rho, *(tau - rank_correlations(group.distances[r][number, defined], gaps)[0] for r in rivals)]
