"""Least squares with the covariance of the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_stitch.matchers._affine import affine_stitch, recorded
from hf_stitch.matchers._solve import Rcond, require
from hf_stitch.matchers.base import ClosedFormMatcher
from hf_stitch.statistics import Moments
from hf_stitch.statistics.spectrum import Spectrum
from hf_stitch.stitches import LinearStitch


@dataclass(frozen=True)
class Recoloured(ClosedFormMatcher):
    """The affine map with minimum squared error among those whose outputs have the covariance of the target.

    Least squares predicts a conditional mean, so its outputs vary less than the target's activations, which alone moves
    them out of distribution. Here x is whitened, rotated and given the covariance of y: with
    ``Sxx^(-1/2) Sxy Syy^(1/2) = P Σ Rᵀ``, the map is ``Syy^(1/2) R Pᵀ Sxx^(-1/2)``, which maximises the inner product
    of its outputs with y. If x has at least as many directions as y, the covariance is that of y and the error is the
    minimum. Otherwise the outputs have the rank of x: in the whitened space of y, their covariance is a projection.

    ``fitted`` contains ``n``, ``r2``, the ``rcond`` used, and ``x_rank`` and ``y_rank``, the numbers of directions
    above it.

    Attributes:
        rcond: Threshold in [0, 1). Directions of a side whose singular value is below ``rcond`` times the largest are
            dropped. None drops directions as :class:`Lstsq` does, on both sides.

    Example:
        >>> import torch
        >>> x = torch.randn(200, 3, dtype=torch.float64)
        >>> y = x[:, :2] + torch.randn(200, 2, dtype=torch.float64)
        >>> stitch = Recoloured().fit(Moments(3, 2).update(x, y), torch.float64)
        >>> torch.allclose(stitch(x).T.cov(), y.T.cov())
        True
    """

    name: ClassVar[str] = "recoloured"
    title: ClassVar[str] = "least squares with the covariance of the target"

    rcond: Rcond = None

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LinearStitch:
        """Compute the map."""
        require(moments, max(moments.dx + 1, 2))
        x = Spectrum.of(moments, "x", self.rcond, moments.sxy)
        y = Spectrum.of(moments, "y", self.rcond, moments.sxy.T)
        whiten, colour = x.vectors / x.values.sqrt(), y.vectors * y.values.sqrt()
        left, _, right = torch.linalg.svd(whiten.T @ moments.sxy @ colour, full_matrices=False)
        weights = {"weight": colour @ (left @ right).T @ whiten.T}
        stitch = affine_stitch(LinearStitch, moments, weights, dtype)
        return recorded(stitch, moments, rcond=max(x.rcond, y.rcond), x_rank=x.rank, y_rank=y.rank)
