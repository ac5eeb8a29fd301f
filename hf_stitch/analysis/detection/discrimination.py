"""How well the scores of a detector distinguish strange samples from usual ones, with confidence intervals."""

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
"""Number of bins of a histogram. The first and the last bin are open."""

RECALL = 0.95
"""Share of strange samples that are found at the threshold of ``fpr95``."""


def discrimination(strange: Array, usual: Array, *, two_sided: bool, paired: bool, seed: int = 0) -> dict[str, Array]:
    """Compute how well scores distinguish strange samples from the network's own, with 95% intervals.

    Returns figure -> ``(3,)``: the value and both ends of its interval. ``one_sided`` is the AUROC of the scores,
    ``two_sided`` the AUROC of the distances of their ranks from the middle (:func:`sided`); ``auroc`` is the one that
    the detector declares. ``aupr`` is the average precision with the strange samples as positives, ``fpr95`` the share
    of the network's own samples above the threshold that finds 95% of the strange ones.
    """
    check_scores(strange, usual)
    from_middle = sided(strange, usual), sided(usual, usual)
    aurocs = {"one_sided": auroc(strange, usual, paired=paired), "two_sided": auroc(*from_middle, paired=paired)}
    scores = from_middle if two_sided else (strange, usual)
    rates = _rates(*scores, paired=paired, seed=seed)
    return {"auroc": aurocs["two_sided" if two_sided else "one_sided"], **aurocs, **rates}


def check_scores(*sets: Array) -> None:
    """Raise an error if scores are missing or not finite."""
    for scores in sets:
        if not len(scores):
            raise ValueError("a comparison requires scores, got none; pass more samples")
        if (broken := int((~np.isfinite(scores)).sum())) > 0:
            raise ValueError(f"scores must be finite, got {broken} of {len(scores)} that are NaN or infinite")


def auroc(positive: Array, negative: Array, *, paired: bool) -> Array:
    """Compute the AUROC of two sets of scores, with its 95% interval (DeLong et al. 1988)."""
    check_scores(positive, negative)
    n, m = len(positive), len(negative)
    share_below_positive = _share_below(np.sort(negative), positive)
    share_above_negative = 1 - _share_below(np.sort(positive), negative)
    value = float(share_below_positive.mean())
    if min(n, m) < 2:
        return np.array([value, np.nan, np.nan])
    if paired:
        error = float((share_below_positive + share_above_negative).std(ddof=1)) / n**0.5
    else:
        error = float(share_below_positive.var(ddof=1) / n + share_above_negative.var(ddof=1) / m) ** 0.5
    margin = NormalDist().inv_cdf(0.975) * error
    return np.array([value, max(0.0, value - margin), min(1.0, value + margin)])


def sided(scores: Array, usual: Array) -> Array:
    """Return how far the rank of each score among the usual scores is from the middle: 0 at the median, .5 beyond all.

    A score below 10% of the usual scores is then as strange as one above 90% of them, for any distribution.
    """
    distances: Array = np.abs(_share_below(np.sort(usual), scores) - 0.5)
    return distances


def _share_below(reference: Array, scores: Array) -> Array:
    """Return the share of sorted values below each score; equal values count half."""
    below, upto = (np.searchsorted(reference, scores, side) for side in ("left", "right"))
    shares: Array = (below + upto) / (2 * len(reference))
    return shares


def _rates(strange: Array, usual: Array, *, paired: bool, seed: int) -> dict[str, Array]:
    """Compute average precision and false positive rate at a recall of 95%, with percentile intervals."""
    levels, ranks = np.unique(-np.concatenate([strange, usual]), return_inverse=True)
    hits = _cumulated(ranks[: len(strange)], _weights(len(strange), seed), len(levels))
    false_alarms = _cumulated(ranks[len(strange) :], _weights(len(usual), seed if paired else seed + 1), len(levels))
    precision = hits / np.maximum(hits + false_alarms, 1)
    new_hits = np.diff(hits, axis=1, prepend=0)
    threshold = (hits >= RECALL * hits[:, -1:] * (1 - 1e-12)).argmax(1)
    rate = np.take_along_axis(false_alarms, threshold[:, None], 1)[:, 0] / false_alarms[:, -1]
    return {"aupr": with_interval((new_hits * precision).sum(1) / hits[:, -1]), "fpr95": with_interval(rate)}


@lru_cache(maxsize=4)
def _weights(n: int, seed: int) -> Array:
    """Return weights of n samples: row 0 is all ones, then one row per bootstrap resample."""
    return np.concatenate(list(resampled(n, RESAMPLES, seed)))


def _cumulated(ranks: NDArray[np.intp], weights: Array, levels: int) -> Array:
    """Return the weight of all samples up to each rank, for each row of weights."""
    order = np.argsort(ranks, kind="stable")
    total = np.concatenate([np.zeros((len(weights), 1)), np.cumsum(weights[:, order], axis=1)], axis=1)
    return total[:, np.searchsorted(ranks[order], np.arange(levels), "right")]


def equivalent_dose(stitched: Array, by_dose: Array, doses: tuple[float, ...]) -> Array:
    """Return the dose of noise that a detector distinguishes as well as stitched activations.

    ``stitched`` holds AUROCs, ``(…)``, and ``by_dose`` the AUROC at each of the ``doses``. Returns ``(…)``: the
    smallest dose with the AUROC, interpolated on a logarithmic scale. It is 0 up to an AUROC of .5 or below the AUROC
    of the smallest dose, infinity above the AUROC of the largest, and NaN where an AUROC is NaN.
    """
    rising, logs = np.maximum.accumulate(np.maximum(by_dose, 0.5)), np.log(doses)
    # The first dose that reaches the value, and the one before: where detection saturates, several have one AUROC.
    upper = np.clip(np.searchsorted(rising, stitched), 1, len(rising) - 1)
    span = rising[upper] - rising[upper - 1]
    share = np.clip((stitched - rising[upper - 1]) / np.where(span > 0, span, 1), 0, 1)
    dose = np.exp(logs[upper - 1] + share * (logs[upper] - logs[upper - 1]))
    dose = np.where((stitched < rising[0]) | (stitched <= 0.5), 0.0, np.where(stitched > rising[-1], np.inf, dose))
    return np.where(np.isnan(stitched) | np.isnan(rising[-1]), np.nan, dose)


def binned(strange: Array, usual: Array) -> dict[str, Array]:
    """Count scores in bins of equal width between the 1st and the 99th percentile of all.

    Returns ``edges``, ``(BINS + 1,)``, with infinite outer edges; and ``stitched`` and ``own``, ``(BINS,)`` counts,
    which add up to the numbers of strange and of usual scores.
    """
    low, high = np.percentile(np.concatenate([strange, usual]), [1, 99])
    if low == high:  # nearly all scores are equal
        low, high = low - 0.5, high + 0.5
    edges = np.array([-np.inf, *np.linspace(low, high, BINS - 1), np.inf])
    counts = {
        name: np.histogram(values, edges)[0].astype(float) for name, values in (("stitched", strange), ("own", usual))
    }
    return {"edges": edges, **counts}
