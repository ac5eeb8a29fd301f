"""Ratio of the likelihoods of two normal distributions: stitched activations, and the network's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_stitch.detectors._gaussian import Gaussian, added_variance, position_moments, sample_means
from hf_stitch.detectors.base import Auxiliary, Detector, Reads, Scorer
from hf_stitch.options import NonNegative
from hf_stitch.representation import Representation


@dataclass(frozen=True)
class LikelihoodRatio(Detector):
    """Log-likelihood of a position under a normal distribution of stitched activations, minus that of the own ones.

    This is the best test of two normal distributions (Neyman and Pearson), a quadratic discriminant: it finds a
    shift, a shrinkage and other correlations. Only means and covariances are compared.

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
        own = position_moments(activations, "positions")
        stitched = position_moments(auxiliary, "stitched positions")
        added = added_variance(own, self.tolerance)
        return _Ratio(Gaussian.of(own, added), Gaussian.of(stitched, added))


class _Ratio(Scorer):
    def __init__(self, own: Gaussian, stitched: Gaussian) -> None:
        self.own, self.stitched = own, stitched

    @torch.no_grad()
    def score(self, activations: Representation) -> Tensor:
        rows = activations.rows("none")
        return sample_means(activations, self.stitched.log_density(rows) - self.own.log_density(rows))
