"""Test whether stitched activations are in the distribution of the target, by a likelihood ratio from moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_stitch.analysis.scoring import Array, Score, as_score, resampled
from hf_stitch.statistics import Moments

SEPARABLE = 0.64
"""AUROC above which two sets of activations count as separable.

This is the AUROC of two normal distributions half a standard deviation apart, a medium effect (Cohen 1988):
Φ(0.5 / √2) = 0.638."""

TOLERANCE = 0.01
"""Variance added to each feature, as a share of its variance in the target."""


@dataclass(frozen=True)
class Distribution:
    """AUROCs of classifying stitched activations against the target's activations of the same samples.

    An AUROC of 0.5 means that the two sets are indistinguishable, 1 that they are perfectly separable. All AUROCs
    except :attr:`distance` use the ratio of two Gaussian likelihoods. Their moments are estimated on samples *other*
    than the scored ones (two halves, each scored with the moments of the other), so that identical distributions have
    an expected AUROC of 0.5 at any number of samples.

    Attributes:
        raw: AUROC of stitched activations against the target's.
        compensated: AUROC of stitched activations, each with the error of the stitching layer on another sample added,
            against the target's.
        separation: The lower one of ``raw`` and ``compensated``, on which :attr:`separated` is based.
        distance: AUROC of the Mahalanobis distance to the target's mean: above 0.5 the stitched activations are further
            from the mean than the target's, below 0.5 they are shrunk. It does not detect differences that preserve
            the distance.
        control: AUROC of the target's activations of scored samples against those of its training samples; ``None`` if
            no training samples were given.

    Example:
        >>> near, far = Score(0.52, 0.48, 0.56), Score(0.9, 0.88, 0.92)
        >>> Distribution(raw=far, compensated=near, separation=near, distance=near).separated
        False
        >>> found = Distribution(raw=far, compensated=far, separation=far, distance=far)
        >>> found.separated, found.side
        (True, 'beyond')
    """

    raw: Score
    compensated: Score
    separation: Score
    distance: Score
    control: Score | None = None

    @property
    def separated(self) -> bool | None:
        """Whether the stitched activations are out of distribution; ``None`` if undecided.

        True if the interval of the separation lies above ``SEPARABLE``, False if it lies below. Undecided if the
        interval contains ``SEPARABLE``, or if the interval of the control reaches ``SEPARABLE``: the target's own
        activations of these samples then differ from those of its training samples.
        """
        control = self.control.high if self.control is not None else 0.5
        if control >= SEPARABLE:
            return None
        return False if self.separation.high < SEPARABLE else True if self.separation.low > SEPARABLE else None

    @property
    def side(self) -> str:
        """``beyond`` or ``shrunk``, depending on the distance to the target's mean."""
        return "beyond" if self.distance.value >= 0.5 else "shrunk"


@dataclass(frozen=True)
class Rows:
    """One row per sample, and the moments of all rows of each half of the samples.

    Attributes:
        values: Side (``stitched``, ``target``) -> (samples, d) float64, one row per sample in the same order.
        moments: Moments of all rows of each half of the samples (even and odd indices), with the stitched rows as x
            and the target's rows as y.
    """

    values: Mapping[str, Array]
    moments: Sequence[Moments]


def compare_distributions(
    rows: Rows, trained: Rows | None = None, *, resamples: int = 1000, seed: int = 0
) -> Distribution:
    """Classify stitched activations against the target's, with and without compensation for regression to the mean.

    A least-squares stitching layer predicts a conditional mean, which has a smaller variance than the activations
    themselves. This alone makes stitched activations separable from the target's, although they contain nothing
    unfamiliar to the target. If the stitched ŷ is the mean of the target's y given the source activations, then ŷ plus
    the error y' − ŷ' of *another* sample has the mean and the covariance of y (errors are centred, so that a shift
    is not compensated). ``Cov(ŷ) + Cov(y − ŷ) = Cov(y)`` holds *only* if ŷ and its error are uncorrelated. It does not
    hold for a map that scales, rotates or adds components that the target never outputs. A stitching layer therefore
    counts as in distribution if its activations match the target's either directly or with their errors added.

    Only means and covariances are compared. Small differences in many features add up.

    Args:
        rows: Rows of the stitching layer and of the target for the scored samples.
        trained: Rows of the target for its training samples, the same on both sides, as the control.
        resamples: Number of bootstrap resamples over samples; the moments are not resampled.
        seed: Seed of the bootstrap.

    Returns:
        The AUROCs with their intervals.

    Raises:
        ValueError: If a half has fewer than 2 (d + 1) rows for d features, too few for its moments, or if all rows of
            the target are equal.

    Example:
        >>> import torch
        >>> y = np.random.default_rng(0).standard_normal((200, 3))
        >>> halves = [torch.from_numpy(y[half::2]) for half in (0, 1)]
        >>> moments = [Moments(3, 3).update(half, half) for half in halves]
        >>> compare_distributions(Rows({"stitched": y, "target": y}, moments), resamples=50).raw.value
        0.5
    """
    for part in (*rows.moments, *(trained.moments if trained else ())):
        if part.n < 2 * (part.dy + 1):
            raise ValueError(
                f"half of the samples have {part.n} rows of {part.dy} features, but their moments need at least "
                f"{2 * (part.dy + 1)} rows: give more samples"
            )
    stitched, target = rows.values["stitched"], rows.values["target"]
    ratios = [np.empty(len(target)) for _ in range(6)]
    for half in (0, 1):
        scored, known = slice(half, None, 2), rows.moments[1 - half]
        own = _Gaussian.of_target(known)
        # Errors are centred, because adding their mean would undo a shift of all stitched activations.
        shift = (known.mean_y - known.mean_x).cpu().numpy()
        errors = np.roll(target[scored] - stitched[scored], 1, 0) - shift
        for place, rival, values in (
            (0, _Gaussian.of_stitched(known), stitched[scored]),
            (2, _Gaussian.compensated(known), stitched[scored] + errors),
        ):
            ratios[place][scored] = rival.log_density(values) - own.log_density(values)
            ratios[place + 1][scored] = rival.log_density(target[scored]) - own.log_density(target[scored])
        ratios[4][scored], ratios[5][scored] = own.distance(stitched[scored]), own.distance(target[scored])
    raw, compensated, distance = (
        _auroc(ratios[i], ratios[i + 1], paired=True, resamples=resamples, seed=seed) for i in (0, 2, 4)
    )
    separation = np.where(raw[0] < compensated[0], raw, compensated)
    control = None if trained is None else as_score(_control(rows, trained, resamples, seed))
    return Distribution(as_score(raw), as_score(compensated), as_score(separation), as_score(distance), control)


def _control(rows: Rows, trained: Rows, resamples: int, seed: int) -> Array:
    held, seen = rows.values["target"], trained.values["target"]
    of_held, of_seen = np.empty(len(held)), np.empty(len(seen))
    for half in (0, 1):
        rival, own = (_Gaussian.of_target(part.moments[1 - half], rows.moments[1 - half]) for part in (rows, trained))
        for ratio, values in ((of_held, held), (of_seen, seen)):
            scored = slice(half, None, 2)
            ratio[scored] = rival.log_density(values[scored]) - own.log_density(values[scored])
    return _auroc(of_held, of_seen, paired=False, resamples=resamples, seed=seed)


@dataclass(frozen=True)
class _Gaussian:
    mean: Array
    precision: Array
    log_determinant: float

    @classmethod
    def of_target(cls, moments: Moments, scale: Moments | None = None) -> _Gaussian:
        return cls._of(moments.mean_y, moments.syy, moments, scale)

    @classmethod
    def of_stitched(cls, moments: Moments) -> _Gaussian:
        return cls._of(moments.mean_x, moments.sxx, moments)

    @classmethod
    def compensated(cls, moments: Moments) -> _Gaussian:
        """Gaussian of ŷ plus a centred error of another sample: the covariances add up."""
        cross = moments.sxy + moments.sxy.T
        return cls._of(moments.mean_x, 2 * moments.sxx + moments.syy - cross, moments)

    @classmethod
    def _of(cls, mean: Any, scatter: Any, moments: Moments, scale: Moments | None = None) -> _Gaussian:
        covariance = (scatter / moments.n).cpu().numpy()
        reference = scale or moments
        variances = (reference.syy.diagonal() / reference.n).cpu().numpy()
        if not variances.any():
            raise ValueError("the target's rows are all equal and have no covariance; check whether the layer is dead")
        # The variance of a constant feature is set to the resolution of float32 activations.
        floor = np.finfo(np.float32).eps * variances.max()
        covariance = covariance + TOLERANCE * np.diag(np.maximum(variances, floor))
        return cls(mean.cpu().numpy(), np.linalg.inv(covariance), float(np.linalg.slogdet(covariance)[1]))

    def distance(self, values: Array) -> Array:
        """Return the squared Mahalanobis distance of each row to the mean."""
        centred = values - self.mean
        return np.einsum("nd,nd->n", centred @ self.precision, centred)

    def log_density(self, values: Array) -> Array:
        """Return the log density of each row, without the constant that depends only on the dimension."""
        return -(self.distance(values) + self.log_determinant) / 2


def _auroc(positive: Array, negative: Array, *, paired: bool, resamples: int, seed: int) -> Array:
    """Compute the AUROC on all samples and on bootstrap resamples; ties count half.

    Args:
        positive: (n,) one score per positive sample.
        negative: (m,) one score per negative sample.
        paired: Whether both contain the same samples, which are then resampled together.
        resamples: Number of bootstrap resamples.
        seed: Seed of the resamples.
    """
    ranks = np.unique(np.concatenate([positive, negative]), return_inverse=True)[1]
    up, down = ranks[: len(positive)], ranks[len(positive) :]
    others = resampled(len(negative), resamples, seed + 1)
    drawn = []
    for weights in resampled(len(positive), resamples, seed):
        drawn.append(_weighted(up, weights, down, weights if paired else next(others), int(ranks.max()) + 1))
    return np.concatenate(drawn)


def _weighted(up: NDArray[np.int64], weights: Array, down: NDArray[np.int64], other: Array, levels: int) -> Array:
    """Return the AUROC for each row of weights."""
    found = np.empty(len(weights))
    for i, (w, v) in enumerate(zip(weights, other, strict=True)):
        at = np.bincount(down, v, levels)
        below: Array = np.cumsum(at) - at / 2
        found[i] = (w * below[up]).sum() / (w.sum() * v.sum())
    return found
