"""Shape metrics of Williams et al. (2021)."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from hf_stitch.metrics._cca import check_full_rank, least_for_full_rank
from hf_stitch.metrics._options import Fraction
from hf_stitch.metrics._rows import RowMoments, SecondMoments, check_variation, nonnegative, of_rows
from hf_stitch.metrics.base import Invariances, MomentsMetric, Operand
from hf_stitch.papers import WILLIAMS_2021


@of_rows
def shape_distance(
    x: Tensor, y: Tensor, *, distance: Literal["angular", "euclidean"] = "angular", alpha: Fraction = 1.0
) -> Tensor:
    """Distance between partially whitened sides, aligned by the best orthogonal map (Williams et al. 2021).

    A centred side X becomes ``X (α I + (1 - α) (XᵀX)^{-1/2})``, rescaled to the norm it had. With α = 1 that is
    Procrustes; with α = 0 the angle is the arccosine of the mean canonical correlation (of equal widths). Between the
    two, the mixture depends on the scale of X and on n.

    Args:
        x: ``(n, dx)``.
        y: ``(n, dy)``.
        distance: ``"angular"``: ``arccos(‖XᵀY‖_* / (‖X‖ ‖Y‖))``. ``"euclidean"``: the root of ``‖X‖² + ‖Y‖² -
            2 ‖XᵀY‖_*``. Near 0 both are exact to about 1e-8, as arccosine and root are steep there.
        alpha: From 1 (no whitening) to 0 (whitening).

    Returns:
        In [0, π/2] radians, or 0 or more.

    Raises:
        ValueError: Fewer than 2 rows, or the rows of a side are all equal. With ``alpha < 1`` also: n is not above both
            widths + 1, or a side does not have full rank.

    Example:
        >>> import torch
        >>> x = torch.randn(50, 4)
        >>> round(shape_distance(x, 3 * x.flip(1)).item(), 6)
        0.0
    """
    return _shape_distance(RowMoments(x, y, wide=alpha == 1), distance=distance, alpha=alpha)


def _shape_distance(moments: SecondMoments, *, distance: str, alpha: float) -> Tensor:
    if alpha < 1:
        check_full_rank("shape_distance", moments, "set alpha=1")
    else:
        check_variation("shape_distance", moments)
    cross = _whitening(moments.sxx, alpha) @ moments.sxy @ _whitening(moments.syy, alpha)
    square_x, square_y, aligned = moments.sxx.trace(), moments.syy.trace(), torch.linalg.svdvals(cross).sum()
    terms = max(cross.shape)
    if distance == "angular":
        apart = 1 - aligned / (square_x.sqrt() * square_y.sqrt())
        return torch.acos(1 - nonnegative("shape_distance", apart, torch.ones_like(apart), terms))
    total = square_x + square_y
    return nonnegative("shape_distance", total - 2 * aligned, total.detach(), terms).sqrt()


class ShapeDistance(MomentsMetric):
    """Streams ``shape_distance``."""

    name = "shape_distance"
    title = "shape distance"
    papers = (WILLIAMS_2021,)
    function = staticmethod(shape_distance)
    formula = staticmethod(_shape_distance)
    higher_is_better = False
    triangle_inequality = True
    range = (0.0, math.pi / 2)
    invariances: Invariances = ("orthogonal", "scaling", "permutation", "translation")
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

    def min_rows(self, side: Operand, width: int) -> int:
        """With whitening, of both sides more than their width."""
        return 2 if self.options["alpha"] == 1 else least_for_full_rank(width)


def _whitening(scatter: Tensor, alpha: float) -> Tensor:
    """``α I + (1 - α) S^{-1/2}``, times what keeps the trace of S."""
    if alpha == 1:
        return torch.eye(len(scatter)).to(scatter)
    values, vectors = torch.linalg.eigh(scatter)
    partial = alpha + (1 - alpha) * values.rsqrt()
    partial = partial * (values.sum() / (values * partial.square()).sum()).sqrt()
    return (vectors * partial) @ vectors.T
