"""How well the scores of a detector tell two sets of samples apart, with intervals."""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from hf_stitch.scoring.measured import with_interval
from hf_stitch.tasks.base import resampled

Array = NDArray[np.float64]
FIGURES = ("auroc", "one_sided", "two_sided", "aupr", "fpr95")
"""Figures of :func:`discrimination`."""

RESAMPLES = 200
"""Bootstrap resamples for the intervals of ``aupr`` and ``fpr95``."""

BINS = 30
"""Bins of a histogram. The first and the last are open: they count everything beyond."""

RECALL = 0.95
"""Share of strange samples that are found at the threshold of ``fpr95``."""


def discrimination(strange: Array, own: Array, *, two_sided: bool, paired: bool, seed: int = 0) -> dict[str, Array]:
    """Compute how well scores tell strange samples from the network's own, with 95% intervals.

    Returns figure -> ``(3,)``: the value and both ends of its interval. ``one_sided`` and ``two_sided`` are AUROCs of
    the scores and of the distances of their ranks from the middle (:func:`sided`); ``auroc`` is the one that the
    detector declares. ``aupr`` is the average precision with the strange samples as positives, ``fpr95`` the share of
    the network's own samples above the threshold above which 95% of the strange ones are.
    """
    check_scores(strange, own)
    folded = sided(strange, own), sided(own, own)
    found = {"one_sided": auroc(strange, own, paired=paired), "two_sided": auroc(*folded, paired=paired)}
    chosen = folded if two_sided else (strange, own)
    rates = _rates(*chosen, paired=paired, seed=seed)
    return {"auroc": found["two_sided" if two_sided else "one_sided"], **found, **rates}


def check_scores(*sets: Array) -> None:
    """Check that scores can be compared."""
    for scores in sets:
        if not len(scores):
            raise ValueError("there are no scores to compare: give more samples")
        if (broken := int((~np.isfinite(scores)).sum())) > 0:
            raise ValueError(f"{broken} of {len(scores)} scores are NaN or infinite, which no rank can be given")


def auroc(positive: Array, negative: Array, *, paired: bool) -> Array:
    """Compute the AUROC of two sets of scores, with its 95% interval (DeLong et al. 1988)."""
    check_scores(positive, negative)
    above = _share_below(np.sort(negative), positive)
    below = 1 - _share_below(np.sort(positive), negative)
    value = float(above.mean())
    if min(len(above), len(below)) < 2:
        return np.array([value, np.nan, np.nan])
    if paired:
        error = float((above + below).std(ddof=1)) / len(above) ** 0.5
    else:
        error = float(above.var(ddof=1) / len(above) + below.var(ddof=1) / len(below)) ** 0.5
    margin = NormalDist().inv_cdf(0.975) * error
    return np.array([value, max(0.0, value - margin), min(1.0, value + margin)])


def sided(scores: Array, own: Array) -> Array:
    """Return how far the share of others below each score is from one half: 0 at their median, .5 beyond all.

    A score below 10% of the others is then as strange as one above 90% of them, whatever their distribution.
    """
    distances: Array = np.abs(_share_below(np.sort(own), scores) - 0.5)
    return distances


def _share_below(known: Array, scores: Array) -> Array:
    """Share of sorted values that are below each score; equal ones count half."""
    below, upto = (np.searchsorted(known, scores, side) for side in ("left", "right"))
    shares: Array = (below + upto) / (2 * len(known))
    return shares


def _rates(strange: Array, own: Array, *, paired: bool, seed: int) -> dict[str, Array]:
    """Average precision and false positive rate at a recall of 95%, each with its percentile interval."""
    levels, ranks = np.unique(-np.concatenate([strange, own]), return_inverse=True)
    found = _cumulated(ranks[: len(strange)], _weights(len(strange), seed), len(levels))
    false = _cumulated(ranks[len(strange) :], _weights(len(own), seed if paired else seed + 1), len(levels))
    precision = found / np.maximum(found + false, 1)
    gained = np.diff(found, axis=1, prepend=0)
    enough = (found >= RECALL * found[:, -1:] * (1 - 1e-12)).argmax(1)
    rate = np.take_along_axis(false, enough[:, None], 1)[:, 0] / false[:, -1]
    return {"aupr": with_interval((gained * precision).sum(1) / found[:, -1]), "fpr95": with_interval(rate)}


@lru_cache(maxsize=4)
def _weights(n: int, seed: int) -> Array:
    return np.concatenate(list(resampled(n, RESAMPLES, seed)))


def _cumulated(ranks: NDArray[np.intp], weights: Array, levels: int) -> Array:
    """Return the weight of all samples up to each rank, for each row of weights."""
    order = np.argsort(ranks, kind="stable")
    total = np.concatenate([np.zeros((len(weights), 1)), np.cumsum(weights[:, order], axis=1)], axis=1)
    return total[:, np.searchsorted(ranks[order], np.arange(levels), "right")]


def equivalent_dose(values: Array, doses: Array, sizes: tuple[float, ...]) -> Array:
    """Return the dose of noise that a detector tells apart as well as it tells apart a stitch.

    Returns ``(…)`` doses, the smallest that reach the AUROC, interpolated on a logarithmic scale. 0 up to an AUROC of
    .5 and below that of the smallest dose, infinity above that of the largest, NaN where an AUROC is NaN.
    """
    rising, logs = np.maximum.accumulate(np.maximum(doses, 0.5)), np.log(sizes)
    # The first dose that reaches the value, and the one before: where detection saturates, several have one AUROC.
    upper = np.clip(np.searchsorted(rising, values), 1, len(rising) - 1)
    span = rising[upper] - rising[upper - 1]
    share = np.clip((values - rising[upper - 1]) / np.where(span > 0, span, 1), 0, 1)
    found = np.exp(logs[upper - 1] + share * (logs[upper] - logs[upper - 1]))
    found = np.where((values < rising[0]) | (values <= 0.5), 0.0, np.where(values > rising[-1], np.inf, found))
    return np.where(np.isnan(values) | np.isnan(rising[-1]), np.nan, found)


def binned(strange: Array, own: Array) -> dict[str, Array]:
    """Count scores in bins of equal width between the 1st and the 99th percentile of all.

    Returns ``edges``, ``(BINS + 1,)``, of which the first and the last are infinite; ``stitched`` and ``own``,
    ``(BINS,)`` counts, which add up to n and m.
    """
    low, high = np.percentile(np.concatenate([strange, own]), [1, 99])
    if low == high:  # nearly all scores are equal
        low, high = low - 0.5, high + 0.5
    edges = np.array([-np.inf, *np.linspace(low, high, BINS - 1), np.inf])
    counts = {
        name: np.histogram(values, edges)[0].astype(float) for name, values in (("stitched", strange), ("own", own))
    }
    return {"edges": edges, **counts}
