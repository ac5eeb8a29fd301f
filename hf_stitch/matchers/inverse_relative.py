"""Translation through the relative space and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_stitch.matchers._affine import affine_stitch, recorded
from hf_stitch.matchers._solve import Spectrum, check_rcond, require
from hf_stitch.matchers.base import ClosedFormMatcher
from hf_stitch.papers import MAIORCA_2024, MOSCHELLA_2023, Paper
from hf_stitch.statistics import Moments
from hf_stitch.stitches import LinearStitch

RCOND = 1e-2
"""Well above rounding, also of bfloat16, which is all there is in a direction that a norm removed."""


@dataclass(frozen=True)
class InverseRelative(ClosedFormMatcher):
    """Inverse relative projection (Maiorca et al. 2024, arXiv 2406.15057): ``x ↦ x Aₓᵀ (A_yᵀ)⁺``.

    A vector of the source becomes its inner products with the source's anchors ``Aₓ``; of these the pseudo-inverse of
    the target's anchors ``A_y`` makes a vector of the target. A head that was trained as usual thus takes another
    encoder, and neither side is fitted to the other: nothing is assumed but that both arrange the anchors alike.

    The moments are those of the anchors: every pair of rows seen is one. As ``(A_yᵀ)⁺ = A_y (A_yᵀ A_y)⁺``, the map is
    ``Sxy Syy⁺``, so that any number of anchors costs no more than their moments do. (It is the transposed map of least
    squares from y to x.) It is exact where y is x turned, shifted and scaled, and the anchors span y above
    ``rcond``; fewer anchors than y is wide, or such as span less, reach only what they span.

    Inner products, unlike the cosines of the paper, keep lengths. Anchors that are given at length 1, with
    ``center=False``, make the paper's map, of vectors of any length, up to the length of the result.

    ``fitted`` holds ``n``, ``r2`` (far below that of least squares, which minimises it), the ``rcond`` and ``scale`` in
    force and ``y_rank``, the number of directions of y above it.

    Attributes:
        center: Whether both sides are centred by the anchors' mean first; the stitch then maps mean to mean by a bias.
        scale: Whether the result is brought to the target's scale, by the ratio ``tr Syy / tr Sxx``. Otherwise it is
            too small or large by the square of the ratio of both scales, which a head that normalises does not notice.
        rcond: Directions of y whose singular value is below ``rcond`` of the largest are left out, in [0, 1). None:
            1e-2. What x has there is magnified by the inverse square of the singular value, though two encoders agree
            least on where they hardly vary, and y has nothing but rounding where a LayerNorm has removed a direction.
            Raise it where anchors are hardly more than y is wide; lower it where a few features outweigh all others.

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
    papers: ClassVar[tuple[Paper, ...]] = (
        MOSCHELLA_2023,
        MAIORCA_2024,
    )

    center: bool = True
    scale: bool = True
    rcond: float | None = None

    def __post_init__(self) -> None:
        for option in ("center", "scale"):
            if not isinstance(getattr(self, option), bool):
                raise ValueError(f"{option} must be True or False, got {getattr(self, option)!r}")
        check_rcond(self.rcond)

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LinearStitch:
        """The map, with weights of ``dtype``.

        Args:
            moments: Of the anchors: the source's representations of them (x) and the target's (y).
            dtype: Of the weights.

        Raises:
            ValueError: There are fewer than 2 anchors, or those of a side are all equal.
            torch.linalg.LinAlgError: The eigendecomposition did not converge.
        """
        require(moments, 2, "give more anchors")
        about = moments if self.center else moments.about_origin()
        rcond = RCOND if self.rcond is None else self.rcond
        spectrum = Spectrum.of(about.syy, rcond)
        scale = (about.syy.trace() / about.sxx.trace()).item() if self.scale else 1.0
        weights = {"weight": scale * spectrum.solve(about.sxy.T)}
        stitch = affine_stitch(LinearStitch, moments, weights, dtype, intercept=self.center)
        return recorded(stitch, moments, rcond=rcond, scale=scale, y_rank=spectrum.rank)
