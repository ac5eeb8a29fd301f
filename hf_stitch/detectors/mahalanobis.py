"""Mahalanobis distance to the activations of a network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_stitch.detectors._gaussian import Gaussian, added_variance, position_moments, sample_means
from hf_stitch.detectors.base import Detector, Reads, Scorer
from hf_stitch.options import NonNegative
from hf_stitch.representation import Representation


@dataclass(frozen=True)
class Mahalanobis(Detector):
    """Squared Mahalanobis distance of positions from the mean of the network's activations, divided by their width.

    The expected score of the network's own activations is 1. Activations beyond them score higher. Activations that are
    shrunk towards the mean, as outputs of least squares are, score lower: this detector is two-sided.

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
    def __init__(self, known: Gaussian) -> None:
        self.known = known

    @torch.no_grad()
    def score(self, activations: Representation) -> Tensor:
        distances = self.known.distances(activations.rows("none"))
        return sample_means(activations, distances) / len(self.known.mean)
