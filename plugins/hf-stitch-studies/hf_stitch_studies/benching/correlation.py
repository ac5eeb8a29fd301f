"""Rank correlations between distances and functional differences, with confidence intervals over networks."""

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
"""Distances that ignore the activations: the differences in depth and in rank."""

RELIABILITY = "probing, other half"
"""Difference in probing accuracy on the selection half of the test samples; its τ is the reliability of the bench."""

CONFIDENCE = 0.95
"""Confidence level of all intervals."""


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
        selection_accuracy: (m,) float64, probing accuracy on the half of the test samples used to choose references.
        accuracy: (m,) float64, probing accuracy on the scoring half.
        references: Indices of the references among the representations, best first, at most one per network.
        distances: Method -> (references, m) float64, the distance from each reference; NaN where undefined.

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
        """Absolute differences in probing accuracy from each reference, (references, m) float64."""
        gaps: Array = np.abs(self.accuracy[list(self.references)][:, None] - self.accuracy)
        return gaps.round(12)  # equal gaps above and below the reference stay ties

    def compared(self, number: int, *, own_network: bool, without: str | None = None) -> NDArray[np.bool_]:
        """Return the mask of the representations that are compared with a reference, (m,) bool.

        Args:
            number: Index of the reference in ``references``.
            own_network: Whether to include the network of the reference. The reference is never included.
            without: Network to leave out.
        """
        reference = self.references[number]
        networks = np.array(self.networks)
        mask = networks != without if without is not None else np.ones(len(networks), bool)
        if not own_network:
            mask &= networks != self.networks[reference]
        mask[reference] = False
        return mask


@dataclass(frozen=True)
class BenchScore:
    """Score of one method in one test: how well its distances predict functional differences.

    Attributes:
        tau: Kendall's τ-b between distances and differences in probing accuracy from the best reference; the mean over
            layers in the sensitivity test. The 95% confidence interval comes from a delete-one-network jackknife and
            :func:`fisher`.
        rho: Spearman's ρ, likewise.
        spread: Smallest and largest τ over the references.
        beyond: Baseline -> τ minus the τ of the baseline on the same pairs, with the interval of the paired difference;
            NaN if either is undefined.
        pairs: Number of pairs with the best reference.
        undefined: Number of these pairs with an undefined distance. They are left out.

    Example:
        >>> tau = Score(0.6, 0.4, 0.8)
        >>> BenchScore(tau, tau, (0.5, 0.7), {"rank only": Score(0.1, -0.1, 0.3)}, 90, 0).beats
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
        """Whether the interval of the difference from every defined baseline lies above 0.

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
        τ-b and ρ; NaN for fewer than 3 pairs, or if ``distances`` or ``gaps`` is constant.

    Example:
        >>> rank_correlations(np.array([0.1, 0.2, 0.4]), np.array([1.0, 2.0, 3.0]))
        (1.0, 1.0)
    """
    from scipy.stats import rankdata

    if len(gaps) < 3 or np.ptp(gaps) == 0 or np.ptp(distances) == 0:
        return math.nan, math.nan
    # All pairs at once: several times faster than scipy.stats.kendalltau for the hundreds of values of a bench.
    x, y = (np.sign(np.subtract.outer(values, values)) for values in (distances, gaps))
    tau = (x * y).sum() / math.sqrt(np.abs(x).sum() * np.abs(y).sum())
    return float(tau), float(np.corrcoef(rankdata(distances), rankdata(gaps))[0, 1])


def jackknife(statistic: Callable[[str | None], Array], networks: Sequence[str]) -> list[Score]:
    """Compute statistics with jackknife intervals, leaving out one network at a time (Quenouille 1956; Tukey 1958).

    The standard error is ``√((G − 1) / G · Σ (θ₋ᵢ − mean)²)`` over the G networks. The half-width of the interval is
    the standard error times the quantile of Student's t with G − 1 degrees of freedom.

    Args:
        statistic: Function that returns the k statistics without the named network; for ``None``, over all networks.
        networks: Names of the networks.

    Returns:
        The k statistics with 95% intervals. An interval is NaN if its statistic is undefined without one network.

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
    replicates = np.stack([statistic(name) for name in networks])
    count = len(networks)
    errors = np.sqrt((count - 1) / count * np.square(replicates - replicates.mean(0)).sum(0))
    half_widths = t.ppf((1 + CONFIDENCE) / 2, count - 1) * errors
    lows, highs = values - half_widths, values + half_widths
    return [Score(float(v), float(low), float(high)) for v, low, high in zip(values, lows, highs, strict=True)]


def fisher(score: Score) -> Score:
    """Map the interval of a correlation into [-1, 1] with Fisher's z (Fisher 1915; delta method for its width).

    Args:
        score: A correlation with a symmetric interval, which may exceed [-1, 1].

    Returns:
        The correlation with the interval ``tanh(atanh(r) ± (high − r) / (1 − r²))``. For correlations of -1 and 1,
        where z is infinite, the interval is clipped.

    Example:
        >>> correlation = fisher(Score(0.56, -0.04, 1.16))
        >>> round(correlation.low, 3), round(correlation.high, 3)
        (-0.237, 0.906)
    """
    if abs(score.value) >= 1:
        return Score(score.value, max(score.low, -1.0), min(score.high, 1.0))
    z, half_width = math.atanh(score.value), (score.high - score.value) / (1 - score.value**2)
    return Score(score.value, math.tanh(z - half_width), math.tanh(z + half_width))


def bench_score(groups: Sequence[BenchGroup], method: str, networks: Sequence[str], *, own_network: bool) -> BenchScore:
    """Score a method over the groups of one test.

    Args:
        groups: Groups of one test, with distances of the method and all baselines.
        method: The method.
        networks: Names of all networks.
        own_network: Whether to compare references with representations of the same network.

    Returns:
        The correlations with intervals. When the jackknife leaves out the network of the best reference, it uses the
        next best.

    Example:
        >>> gap = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
        >>> group = BenchGroup(
        ...     "specificity", "", tuple("abcabc"), tuple("000111"), (2,) * 6, 0.9 - gap, 0.9 - gap, (0, 1),
        ...     {"d": np.stack([gap, abs(gap - 0.1)]), "depth only": np.zeros((2, 6)), "rank only": np.zeros((2, 6))},
        ... )
        >>> bench_score([group], "d", "abc", own_network=False).tau.value
        1.0
    """
    baselines = () if method in BASELINES else BASELINES

    def group_statistics(number: int, without: str | None) -> Array:
        """Return τ, ρ, and τ minus the τ of each baseline, (groups, 2 + baselines)."""
        reference_numbers = [_references(group, without)[number] for group in groups]
        pairs = zip(groups, reference_numbers, strict=True)
        return np.array([_correlate(g, method, baselines, g.compared(k, own_network=own_network, without=without), k)
                         for g, k in pairs])  # fmt: skip

    defined = ~np.isnan(group_statistics(0, None))

    def mean_statistics(number: int, without: str | None) -> Array:
        """Average over the groups that define a statistic with all networks and the best reference."""
        correlations = np.where(defined, group_statistics(number, without), 0)
        with np.errstate(invalid="ignore"):
            mean: Array = correlations.sum(0) / defined.sum(0)  # NaN where no group is defined
        return mean

    tau, rho, *beyond = jackknife(lambda without: mean_statistics(0, without), networks)
    spread = [mean_statistics(number, None)[0] for number in range(min(len(g.references) for g in groups))]
    limits = (float(np.nanmin(spread)), float(np.nanmax(spread))) if not np.isnan(spread).all() else (math.nan,) * 2
    best_distances = np.concatenate([g.distances[method][0][g.compared(0, own_network=own_network)] for g in groups])
    return BenchScore(
        fisher(tau), fisher(rho), limits, dict(zip(baselines, beyond, strict=True)), len(best_distances),
        int(np.isnan(best_distances).sum()),
    )  # fmt: skip


def _references(group: BenchGroup, without: str | None) -> list[int]:
    """Return the indices of the references outside the network ``without``, best first."""
    return [k for k, reference in enumerate(group.references) if group.networks[reference] != without]


def _correlate(
    group: BenchGroup, method: str, baselines: Sequence[str], compared: NDArray[np.bool_], number: int
) -> list[float]:
    distances = group.distances[method][number]
    defined = compared & ~np.isnan(distances)
    gaps = group.gaps[number, defined]
    tau, rho = rank_correlations(distances[defined], gaps)
    return [tau, rho, *(tau - rank_correlations(group.distances[r][number, defined], gaps)[0] for r in baselines)]
