"""Are stitched representations such as the target has of its own? A likelihood ratio from moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from hf_stitch.analysis.scoring import Array, Score, as_score, resampled
from hf_stitch.statistics import Moments

SEPARABLE = 0.64
"""AUROC from which two sets of representations count as told apart.

That of two normal distributions half a standard deviation apart, a medium effect (Cohen 1988): Φ(0.5 / √2) = 0.638."""

TOLERANCE = 0.01
"""Variance that is added to each feature, as a share of the target's variance of it."""


@dataclass(frozen=True)
class Distribution:
    """How well stitched representations are told from the target's own, of the same samples.

    AUROCs: 0.5 means that they cannot be told apart, 1 that each one can. All but :attr:`distance` come from the ratio
    of two Gaussian likelihoods, whose moments are those of *other* samples than the ones scored (two halves, each
    scored with the moments of the other), so that nothing different scores 0.5 at any number of samples.

    Attributes:
        raw: Stitched representations against the target's.
        compensated: Stitched ones, each with the error that the stitch makes on another sample, against the target's.
        separation: The lesser of the two, which is what is judged.
        distance: Mahalanobis distance to the target's mean of stitched representations against that of the target's:
            above 0.5 they lie beyond, below it they are shrunk. Two-sided, and blind to what keeps the distance.
        control: The target's representations of samples that it was trained on against those of the samples scored;
            ``None`` where no such samples were given.
    """

    raw: Score
    compensated: Score
    separation: Score
    distance: Score
    control: Score | None = None

    @property
    def separated(self) -> bool | None:
        """Whether out of distribution; ``None`` if it cannot be told.

        The interval of the separation must lie above ``SEPARABLE``, and above that of the control, for yes, and below
        ``SEPARABLE`` for no. Where the control's reaches ``SEPARABLE``, the target's own representations of these
        samples are not such as it was trained on, and nothing can be told.
        """
        control = self.control.high if self.control is not None else 0.5
        if control >= SEPARABLE:
            return None
        return False if self.separation.high < SEPARABLE else True if self.separation.low > SEPARABLE else None

    @property
    def side(self) -> str:
        """``beyond`` or ``shrunk``, by the distance to the target's mean."""
        return "beyond" if self.distance.value >= 0.5 else "shrunk"


@dataclass(frozen=True)
class Rows:
    """One row for each sample, and the moments of all rows, in two halves of the samples.

    Attributes:
        values: (samples, d) float64 by side (``stitched``, ``target``): a row of each sample, in an order that is the
            same for all sides.
        moments: For each half of the samples (even and odd places) the moments of all its rows, x the stitched ones and
            y the target's.
    """

    values: Mapping[str, Array]
    moments: Sequence[Moments]


def compare_distributions(
    rows: Rows, trained: Rows | None = None, *, resamples: int = 1000, seed: int = 0
) -> Distribution:
    """Tell stitched representations from the target's, as they are and compensated for regression to the mean.

    A least-squares stitch predicts a mean, and means vary less than what they are means of. That alone makes stitched
    representations tell from real ones, though they hold nothing that the target does not know. But if the stitched
    ŷ is the mean of the real y given what the source knows, then ŷ plus the error y' − ŷ' made on *another* sample has
    the mean and the covariance of y (errors are centred, so that a shift stays). ``Cov(ŷ) + Cov(y − ŷ) = Cov(y)`` holds
    *only* where ŷ does not covary with its error: not for a map that scales, rotates or adds what the target never
    says. So a stitch is in distribution if its representations are such as the target's, or would be with their errors
    added.

    Means and covariances are all that is compared; a difference in every one of many features adds up.

    Args:
        rows: Of the stitch and of the target, for the samples scored.
        trained: Of the target (both sides alike), for samples that it was trained on: the control.
        resamples: Of the bootstrap over samples; it holds the moments as they are.
        seed: Of the bootstrap.

    Raises:
        ValueError: A half has fewer rows than twice the features: its moments would tell nothing. Or the target's rows
            are all equal.
    """
    for part in (*rows.moments, *(trained.moments if trained else ())):
        if part.n < 2 * (part.dy + 1):
            raise ValueError(
                f"half of the samples have {part.n} rows of {part.dy} features, and the moments of these take "
                f"{2 * (part.dy + 1)}: give more samples"
            )
    stitched, target = rows.values["stitched"], rows.values["target"]
    ratios = [np.empty(len(target)) for _ in range(6)]
    for half in (0, 1):
        scored, known = slice(half, None, 2), rows.moments[1 - half]
        own = _Gaussian.of_target(known)
        # Centred: with the mean of the errors a shift of all stitched representations would be taken back.
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
        """Of ŷ and a centred error of another sample: their covariances add."""
        cross = moments.sxy + moments.sxy.T
        return cls._of(moments.mean_x, 2 * moments.sxx + moments.syy - cross, moments)

    @classmethod
    def _of(cls, mean: Any, scatter: Any, moments: Moments, scale: Moments | None = None) -> _Gaussian:
        covariance = (scatter / moments.n).cpu().numpy()
        reference = scale or moments
        variances = (reference.syy.diagonal() / reference.n).cpu().numpy()
        if not variances.any():
            raise ValueError("the target's rows are all equal: they have no distribution; is the layer dead?")
        # A feature that the target never varies has the least scale that float32 activations resolve.
        floor = np.finfo(np.float32).eps * variances.max()
        covariance = covariance + TOLERANCE * np.diag(np.maximum(variances, floor))
        return cls(mean.cpu().numpy(), np.linalg.inv(covariance), float(np.linalg.slogdet(covariance)[1]))

    def distance(self, values: Array) -> Array:
        """Squared Mahalanobis distance to the mean."""
        centred = values - self.mean
        return np.einsum("nd,nd->n", centred @ self.precision, centred)

    def log_density(self, values: Array) -> Array:
        """But for what all Gaussians of a width share."""
        return -(self.distance(values) + self.log_determinant) / 2


def _auroc(positive: Array, negative: Array, *, paired: bool, resamples: int, seed: int) -> Array:
    """How often a positive exceeds a negative, ties for half; on all samples, then on resamples of these.

    Args:
        positive: A number for each sample.
        negative: A number for each sample.
        paired: Whether both are of the same samples, to be resampled together.
        resamples: How many.
        seed: Of the resamples.
    """
    ranks = rankdata(np.concatenate([positive, negative]), method="dense") - 1
    up, down = ranks[: len(positive)], ranks[len(positive) :]
    others = resampled(len(negative), resamples, seed + 1)
    drawn = []
    for weights in resampled(len(positive), resamples, seed):
        drawn.append(_weighted(up, weights, down, weights if paired else next(others), int(ranks.max()) + 1))
    return np.concatenate(drawn)


def _weighted(up: NDArray[np.int64], weights: Array, down: NDArray[np.int64], other: Array, levels: int) -> Array:
    """The AUROC of each row of weights."""
    found = np.empty(len(weights))
    for i, (w, v) in enumerate(zip(weights, other, strict=True)):
        at = np.bincount(down, v, levels)
        below: Array = np.cumsum(at) - at / 2
        found[i] = (w * below[up]).sum() / (w.sum() * v.sum())
    return found
