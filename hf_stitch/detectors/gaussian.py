"""Detectors that compare activations with a normal distribution, computed from moments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from hf_stitch.detectors.base import Auxiliary, Detector, Reads, Scorer, sample_means
from hf_stitch.options import NonNegative
from hf_stitch.representation import Representation
from hf_stitch.statistics import Moments
from hf_stitch.statistics.layer_moments import LayerMoments
from hf_stitch.statistics.spectrum import above_rounding, rounding


@dataclass(frozen=True)
class Mahalanobis(Detector):
    """Squared Mahalanobis distance of positions from the mean of the network's activations, divided by their width.

    The expected score of the network's own activations is 1. Activations beyond them score higher. Activations that are
    shrunk towards the mean, such as outputs of least squares, score lower: this detector is two-sided.

    Attributes:
        tolerance: Variance added to each feature, as a share of its variance; keeps the covariance invertible.

    Example:
        >>> x = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
        >>> own = Representation(x, "bd")
        >>> round(Mahalanobis(tolerance=0).fit([own]).score(own).mean().item(), 3)
        1.0
    """

    name: ClassVar[str] = "mahalanobis"
    title: ClassVar[str] = "Mahalanobis distance"
    reads: ClassVar[Reads] = "positions"
    two_sided: ClassVar[bool] = True

    tolerance: NonNegative = 0.01

    @torch.no_grad()
    def _fit(self, activations: Iterable[Representation]) -> Scorer:
        moments = position_moments(activations, "positions")
        return _Distance(Gaussian.of(moments, added_variance(moments, self.tolerance)))


class _Distance(Scorer):
    def __init__(self, gaussian: Gaussian) -> None:
        self.gaussian = gaussian

    @torch.no_grad()
    def score(self, activations: Representation) -> Tensor:
        distances = self.gaussian.distances(activations.rows("none"))
        return sample_means(activations, distances) / len(self.gaussian.mean)


@dataclass(frozen=True)
class LikelihoodRatio(Detector):
    """Log-likelihood ratio of a position under normal distributions of stitched and of the network's own activations.

    This is the best test of two normal distributions (Neyman and Pearson), a quadratic discriminant: it finds a shift,
    shrinkage and changed correlations. Only means and covariances are compared.

    Attributes:
        tolerance: Variance added to each feature on both sides, as a share of its variance in the network's own
            activations; keeps covariances invertible.

    Example:
        >>> x = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
        >>> own, stitched = Representation(x, "bd"), Representation(x / 2, "bd")
        >>> scorer = LikelihoodRatio().fit([own], auxiliary=[stitched])
        >>> bool(scorer.score(stitched).mean() > scorer.score(own).mean())
        True
    """

    name: ClassVar[str] = "likelihood_ratio"
    title: ClassVar[str] = "Gaussian likelihood ratio"
    reads: ClassVar[Reads] = "positions"
    auxiliary: ClassVar[Auxiliary] = "stitched"

    tolerance: NonNegative = 0.01

    @torch.no_grad()
    def _fit(self, activations: Iterable[Representation], auxiliary: Iterable[Representation]) -> Scorer:
        network_moments = position_moments(activations, "positions")
        stitched_moments = position_moments(auxiliary, "stitched positions")
        added = added_variance(network_moments, self.tolerance)
        return _Ratio(Gaussian.of(network_moments, added), Gaussian.of(stitched_moments, added))


class _Ratio(Scorer):
    def __init__(self, network_gaussian: Gaussian, stitched_gaussian: Gaussian) -> None:
        self.own, self.stitched = network_gaussian, stitched_gaussian

    @torch.no_grad()
    def score(self, activations: Representation) -> Tensor:
        rows = activations.rows("none")
        return sample_means(activations, self.stitched.log_density(rows) - self.own.log_density(rows))


def position_moments(activations: Iterable[Representation], rows_name: str) -> Moments:
    """Collect the moments of all positions, as both sides of one :class:`Moments`."""
    moments: LayerMoments | None = None
    for batch in activations:
        rows = batch.rows("none")
        moments = moments or LayerMoments([rows[:1024].double().mean(0)])
        moments.update([rows])
    if moments is None or moments.n <= (width := len(moments.moments(0, 0).mean_x)):
        count, required = (0, 2) if moments is None else (moments.n, width + 1)
        raise ValueError(f"the covariance requires at least {required} {rows_name}, got {count}; pass more samples")
    return moments.moments(0, 0)


@dataclass(frozen=True)
class Gaussian:
    """Normal distribution of positions."""

    mean: Tensor  # (d,) float64
    whitening: Tensor  # (d, d) float64, lower triangular; rows times its transpose have the covariance 1

    @classmethod
    def of(cls, moments: Moments, added: Tensor) -> Self:
        """Build the normal distribution from moments."""
        covariance = moments.sxx / moments.n + torch.diag(added)
        root, failed = torch.linalg.cholesky_ex(covariance)
        if not failed and not added.any():  # a direction of rounding errors has a root, too
            values, vectors = torch.linalg.eigh(covariance)
            failed = ~above_rounding(values, vectors, rounding(moments, "x") / moments.n).all()
        if failed:
            raise ValueError("the covariance is singular, because features depend on each other; increase tolerance")
        identity = torch.eye(len(root), dtype=root.dtype, device=root.device)
        return cls(moments.mean_x, torch.linalg.solve_triangular(root, identity, upper=False))

    def distances(self, rows: Tensor) -> Tensor:
        """Return the squared Mahalanobis distance of each row from the mean."""
        if rows.shape[1] != len(self.mean):
            raise ValueError(f"the detector was fitted to {len(self.mean)} features, got {rows.shape[1]}")
        return torch.linalg.vector_norm((rows.to(self.mean) - self.mean) @ self.whitening.T, dim=1).square()

    def log_density(self, rows: Tensor) -> Tensor:
        """Return the log density of each row, without the constant that depends only on the dimension."""
        return -self.distances(rows) / 2 + self.whitening.diagonal().log().sum()


def added_variance(moments: Moments, tolerance: float) -> Tensor:
    """Return the variance to add to each feature: a share of its variance, at least the size of rounding errors."""
    variances = moments.sxx.diagonal() / moments.n
    if not variances.any():
        raise ValueError(f"all {moments.n} positions are equal: is the layer dead?")
    for_dead_features = variances.mean() * max(tolerance, 1e-6) * (1 + tolerance)
    added = tolerance * variances
    if tolerance:
        added = torch.maximum(added, rounding(moments, "x") / moments.n)
    return torch.where(variances == 0, for_dead_features, added)
