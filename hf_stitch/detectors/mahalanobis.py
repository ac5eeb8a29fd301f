"""Mahalanobis distance to the activations of a network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hf_stitch.detectors.base import Detector, Scorer
from hf_stitch.representation import Representation
from hf_stitch.statistics import LayerMoments


@dataclass(frozen=True)
class Mahalanobis(Detector):
    """Squared Mahalanobis distance of positions from the mean of the network's activations, divided by their width.

    The expected score of the network's own activations is 1. Activations beyond them score higher. Activations that are
    shrunk towards the mean, as outputs of least squares are, score lower: this detector is two-sided.

    Attributes:
        tolerance: Variance added to each feature, as a share of its variance; keeps the covariance invertible.

    Raises:
        ValueError: If ``tolerance`` is negative.

    Example:
        >>> x = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
        >>> own = Representation(x, "bd")
        >>> round(Mahalanobis(tolerance=0).fit([own]).score(own).mean().item(), 3)
        1.0
    """

    name: ClassVar[str] = "mahalanobis"
    title: ClassVar[str] = "Mahalanobis distance"
    reads: ClassVar[Literal["positions", "samples"]] = "positions"
    two_sided: ClassVar[bool] = True

    tolerance: float = 0.01

    def __post_init__(self) -> None:
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance must be at least 0, got {self.tolerance}")

    @torch.no_grad()
    def fit(self, activations: Iterable[Representation]) -> Scorer:
        """Compute mean and covariance of all positions.

        Args:
            activations: Batches of activations at one layer.

        Returns:
            The fitted detector.

        Raises:
            ValueError: There are at most as many positions as features, or no feature varies.
        """
        kept: LayerMoments | None = None
        for batch in activations:
            rows = batch.rows("none")
            kept = kept or LayerMoments([rows[:1024].double().mean(0)])
            kept.update([rows])
        if kept is None or kept.n <= (width := len(kept.moments(0, 0).mean_x)):
            count, needed = (0, 2) if kept is None else (kept.n, width + 1)
            raise ValueError(f"the covariance needs at least {needed} positions, got {count}: give more samples")
        moments = kept.moments(0, 0)
        covariance = moments.sxx / kept.n
        varying = covariance.diagonal().clone()
        if not varying.any():
            raise ValueError(f"all {kept.n} positions are equal: is the layer dead?")
        # Dead features get the mean variance: any deviation there is strange.
        varying[varying == 0] = varying.mean() * max(self.tolerance, 1e-6)
        covariance = covariance + torch.diag(self.tolerance * varying + (covariance.diagonal() == 0) * varying)
        return _Distance(moments.mean_x, torch.linalg.cholesky(covariance))


class _Distance(Scorer):
    def __init__(self, mean: Tensor, root: Tensor) -> None:
        self.mean, self.root = mean, root

    @torch.no_grad()
    def score(self, activations: Representation) -> Tensor:
        rows = activations.rows("none").to(self.mean)
        if rows.shape[1] != len(self.mean):
            raise ValueError(f"the detector was fitted to {len(self.mean)} features, got {rows.shape[1]}")
        distances = torch.linalg.solve_triangular(self.root, (rows - self.mean).T, upper=False).square().mean(0)
        owners = activations.row_samples("none").to(distances.device)
        totals = distances.new_zeros(activations.batch).index_add(0, owners, distances)
        return totals / torch.bincount(owners, minlength=activations.batch)
