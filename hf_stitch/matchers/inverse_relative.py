"""Matcher that translates through the relative space (inverse relative projection)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_stitch.matchers._affine import affine_stitch, recorded
from hf_stitch.matchers._solve import Rcond, require
from hf_stitch.matchers.base import ClosedFormMatcher
from hf_stitch.papers import MAIORCA_2024, MOSCHELLA_2023, Paper
from hf_stitch.statistics import Moments
from hf_stitch.statistics.spectrum import Spectrum
from hf_stitch.stitches import LinearStitch

RCOND = 0.1
"""Default threshold, well above the rounding of bfloat16, which is all that a norm leaves in a removed direction."""


@dataclass(frozen=True)
class InverseRelative(ClosedFormMatcher):
    """Inverse relative projection (Maiorca et al. 2024, arXiv 2406.15057): ``x ↦ x Aₓᵀ (A_yᵀ)⁺``.

    A source vector is mapped to its inner products with the source's anchors ``Aₓ``. The pseudo-inverse of the target's
    anchors ``A_y`` maps these to a target vector. A head that was trained on the target's representation can thus be
    used with another encoder. Neither side is fitted to the other; the method assumes only that both encoders arrange
    the anchors similarly.

    The moments must be those of the anchors: every pair of rows is one anchor. Because ``(A_yᵀ)⁺ = A_y (A_yᵀ A_y)⁺``,
    the map is ``Sxy Syy⁺``, and its cost does not grow with the number of anchors beyond that of the moments. (It is
    the transpose of the least-squares map from y to x.) The map is exact if y is a rotated, shifted and scaled copy of
    x and the anchors span y above ``rcond``. Anchors that span less only reach that span.

    Inner products preserve lengths, unlike the cosines of the paper. Anchors normalised to length 1, with
    ``center=False``, give the map of the paper for vectors of any length, up to the length of the result.

    ``fitted`` contains ``n``, ``r2`` (far below that of least squares, which optimises it), the ``rcond`` and ``scale``
    used and ``y_rank``, the number of directions of y above the threshold.

    Attributes:
        center: Whether to centre both sides by the mean of the anchors; the bias of the stitch then maps mean to mean.
        scale: Whether to rescale the result to the target, by the ratio ``tr Syy / tr Sxx``. Without it, the result is
            wrong by the square of the ratio of both scales, which does not affect a head that normalises its input.
        rcond: Threshold in [0, 1). Directions of y whose singular value is below ``rcond`` times the largest are
            dropped. None means 0.1. The components of x in small directions are amplified by the inverse square of the
            singular value, although encoders agree least where they vary little, and a direction removed by a LayerNorm
            contains only rounding. With 1e-7, as published, heads of trained networks fail if there are about as many
            anchors as features. Lower it if a few features dominate all others.

    Example:
        >>> import torch
        >>> x = torch.randn(50, 2, dtype=torch.float64)
        >>> stitch = InverseRelative().fit(Moments(2, 2).update(x, 3 * x.flip(1) + 1))
        >>> stitch.weight.detach().round(decimals=4).abs(), round(stitch.fitted["r2"], 6)
        (tensor([[0., 3.],
                [3., 0.]]), 1.0)
    """

    name: ClassVar[str] = "inverse_relative"
    title: ClassVar[str] = "inverse relative projection"
    papers: ClassVar[tuple[Paper, ...]] = (MOSCHELLA_2023, MAIORCA_2024)

    center: bool = True
    scale: bool = True
    rcond: Rcond = None

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LinearStitch:
        """Compute the map."""
        require(moments, 2, "give more anchors")
        about = moments if self.center else moments.about_origin()
        spectrum = Spectrum.of(about, "y", RCOND if self.rcond is None else self.rcond)
        scale = (about.syy.trace() / about.sxx.trace()).item() if self.scale else 1.0
        weights = {"weight": scale * spectrum.solve(about.sxy.T)}
        stitch = affine_stitch(LinearStitch, moments, weights, dtype, intercept=self.center)
        return recorded(stitch, moments, rcond=spectrum.rcond, scale=scale, y_rank=spectrum.rank)
