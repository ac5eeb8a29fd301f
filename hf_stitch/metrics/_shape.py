"""Generalised shape metrics (Williams et al. 2021)."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from hf_stitch.metrics._catalogue import built_in
from hf_stitch.metrics._cca import independent, least_for_full_rank
from hf_stitch.metrics._rows import RowMoments, SecondMoments, check_variation, nonnegative, nuclear, of_own_rows
from hf_stitch.metrics.base import MomentsMetric, Operand
from hf_stitch.options import Fraction, checked
from hf_stitch.papers import WILLIAMS_2021
from hf_stitch.statistics.spectrum import Side, above_rounding, rounding


@of_own_rows
def shape_distance(
    x: Tensor, y: Tensor, *, distance: Literal["angular", "euclidean"] = "angular", alpha: Fraction = 1.0
) -> Tensor:
    """Shape distance: partially whitened sides, aligned by the best orthogonal map (Williams et al. 2021).

    A centred side X becomes ``X (α I + (1 - α) (XᵀX)^{-1/2})`` and is rescaled to its original norm. ``α = 1`` gives
    the Procrustes distance. ``α = 0`` gives, for equal widths and the angular distance, the arccosine of the mean
    canonical correlation. For values between, the result depends on the scale of X and on n.

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        distance: ``"angular"``: ``arccos(‖XᵀY‖_* / (‖X‖ ‖Y‖))``. ``"euclidean"``: the square root of
            ``‖X‖² + ‖Y‖² - 2 ‖XᵀY‖_*``. Values near 0 are accurate to about 1e-8 only, because the arccosine and the
            square root are steep there.
        alpha: Amount of whitening, from 1 (none) to 0 (full).

    Returns:
        Angle in [0, π/2] radians for ``"angular"``, distance >= 0 for ``"euclidean"``; a float for arrays, a 0-d
        float64 tensor for tensors.

    Raises:
        ValueError: There are fewer than 2 rows, or all rows of a side are equal. With ``alpha < 1`` also: n is at most
            the rank of a side + 1.

    Example:
        >>> import torch
        >>> x = torch.randn(50, 4)
        >>> round(shape_distance(x, 3 * x.flip(1)).item(), 6)
        0.0
    """
    return _shape_distance(RowMoments(x, y, wide=alpha == 1), distance=distance, alpha=alpha)


def _shape_distance(moments: SecondMoments, *, distance: str, alpha: float) -> Tensor:
    check_variation("shape_distance", moments)
    cross = _whitening(moments, "x", alpha) @ moments.sxy @ _whitening(moments, "y", alpha)
    square_x, square_y, aligned = moments.sxx.trace(), moments.syy.trace(), nuclear(cross, moments)
    terms = max(cross.shape)
    if distance == "angular":
        apart = 1 - aligned / (square_x.sqrt() * square_y.sqrt())
        return torch.acos(1 - nonnegative("shape_distance", apart, torch.ones_like(apart), terms))
    total = square_x + square_y
    return nonnegative("shape_distance", total - 2 * aligned, total.detach(), terms).sqrt()


@built_in("shape_distance")
class ShapeDistance(MomentsMetric):
    """Streaming ``shape_distance``."""

    papers = (WILLIAMS_2021,)
    function = staticmethod(shape_distance)
    formula = staticmethod(_shape_distance)
    _by_axes = _of_own_rows = True
    triangle_inequality = True
    differentiable = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        angular, alpha = self.options["distance"] == "angular", self.options["alpha"]
        self.differentiable = alpha == 1
        if not angular:
            self.range = (0.0, math.inf)
        if not angular or 0 < alpha < 1:
            self.invariances = ("orthogonal", "permutation", "translation")
        elif alpha == 0:
            self.invariances = ("invertible", "orthogonal", "scaling", "permutation", "translation")

    @checked
    def min_rows(self, side: Operand, width: int) -> int:
        """Width + 2 with whitening, 2 without."""
        return 2 if self.options["alpha"] == 1 else least_for_full_rank(width)


def _whitening(moments: SecondMoments, side: Side, alpha: float) -> Tensor:
    """``α I + (1 - α) S^{-1/2}`` on the directions that vary, rescaled to keep the trace of S."""
    scatter = moments.sxx if side == "x" else moments.syy
    if alpha == 1:
        return torch.eye(len(scatter)).to(scatter)
    independent("shape_distance", moments, side, "; set alpha=1")
    values, vectors = torch.linalg.eigh(scatter)
    varies = above_rounding(values, vectors, rounding(moments, side))
    partial = alpha + (1 - alpha) * torch.where(varies, values.abs().rsqrt(), 0)
    partial = partial * (values.sum() / (values * partial.square()).sum()).sqrt()
    return (vectors * partial) @ vectors.T
