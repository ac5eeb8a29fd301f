"""The orthogonal Procrustes distance, and generalised shape metrics (Williams et al. 2021)."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from hf_stitch.metrics._catalogue import built_in
from hf_stitch.metrics._cca import independent, least_for_full_rank
from hf_stitch.metrics._rows import RowMoments, check_variation, nonnegative, nuclear, of_own_rows, of_rows, variances
from hf_stitch.metrics.base import MomentsMetric, Operand
from hf_stitch.options import Fraction, checked
from hf_stitch.papers import DING_2021, WILLIAMS_2021
from hf_stitch.statistics.spectrum import SecondMoments, Side, above_rounding, rounding


@of_rows
def procrustes(x: Tensor, y: Tensor, *, squared: bool = False, unit_norm: bool = True) -> Tensor:
    """Procrustes distance: the minimum of ``‖XQ - Y‖`` over orthogonal Q (Schönemann 1966; Ding et al. 2021).

    Both sides are centred. The squared distance is ``‖X‖² + ‖Y‖² - 2 ‖XᵀY‖_*``; for unequal widths, the narrower side
    is padded with zeros. The squared value is a difference and is accurate to about 1e-15 of ``‖X‖² + ‖Y‖²``. The
    distance between a representation and a rotated copy is therefore about 1e-8 instead of 0.

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        squared: Whether to return the squared distance, which does not satisfy the triangle inequality.
        unit_norm: Whether to scale both sides to Frobenius norm 1 first. The value is then at most √2, or 2 if squared.

    Example:
        >>> import torch
        >>> x = torch.randn(50, 4)
        >>> round(procrustes(x, 3 * x.flip(1)).item(), 6)
        0.0
    """
    return _procrustes(RowMoments(x, y, wide=True), squared=squared, unit_norm=unit_norm)


def _procrustes(moments: SecondMoments, *, squared: bool, unit_norm: bool) -> Tensor:
    check_variation("procrustes", moments)
    square_x, square_y = (variance.sum() for variance in variances(moments))
    total, aligned = square_x + square_y, nuclear(moments.sxy, moments)
    if unit_norm:
        total, aligned = torch.full_like(total, 2), aligned / (square_x.sqrt() * square_y.sqrt())
    square = nonnegative("procrustes", total - 2 * aligned, total.detach(), max(moments.sxy.shape))
    return square if squared else square.sqrt()


@built_in("procrustes")
class Procrustes(MomentsMetric):
    """Streaming ``procrustes``."""

    papers = (DING_2021,)
    function = staticmethod(procrustes)
    formula = staticmethod(_procrustes)
    _by_axes = True
    triangle_inequality = True
    differentiable = True

    def __init__(self, **options: bool) -> None:
        super().__init__(**options)
        if self.options["squared"]:
            self.triangle_inequality, self.range = False, (0.0, 2.0)
        if not self.options["unit_norm"]:
            self.invariances, self.range = ("orthogonal", "permutation", "translation"), (0.0, math.inf)
            self.counts_rows = True


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
        distance: ``"angular"``: ``arccos(‖XᵀY‖_* / (‖X‖ ‖Y‖))``, 0 to π/2. ``"euclidean"``: the square root of
            ``‖X‖² + ‖Y‖² - 2 ‖XᵀY‖_*``. Values near 0 are accurate to about 1e-8 only, because the arccosine and the
            square root are steep there.
        alpha: Amount of whitening, from 1 (none) to 0 (full).

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
        difference = 1 - aligned / (square_x.sqrt() * square_y.sqrt())
        return torch.acos(1 - nonnegative("shape_distance", difference, torch.ones_like(difference), terms))
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
            self.invariances, self.counts_rows = ("orthogonal", "permutation", "translation"), True
        elif alpha == 0:
            self.invariances = ("invertible", "orthogonal", "scaling", "permutation", "translation")

    @checked
    def min_rows(self, side: Operand, width: int) -> int:
        """Return width + 2 with whitening, 2 without."""
        return 2 if self.options["alpha"] == 1 else least_for_full_rank(width)


def _whitening(moments: SecondMoments, side: Side, alpha: float) -> Tensor:
    """Compute ``α I + (1 - α) S^{-1/2}`` on the directions that vary, rescaled to keep the trace of S."""
    scatter = moments.sxx if side == "x" else moments.syy
    if alpha == 1:
        return torch.eye(len(scatter)).to(scatter)
    independent("shape_distance", moments, side, "; set alpha=1")  # raises an error for too few rows
    values, vectors = torch.linalg.eigh(scatter)
    varies = above_rounding(values, vectors, rounding(moments, side))
    factors = alpha + (1 - alpha) * torch.where(varies, values.abs().rsqrt(), 0)
    factors = factors * (values.sum() / (values * factors.square()).sum()).sqrt()
    return (vectors * factors) @ vectors.T
