"""The orthogonal Procrustes distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_stitch.metrics._catalogue import built_in
from hf_stitch.metrics._rows import RowMoments, SecondMoments, check_variation, nonnegative, nuclear, of_rows, variances
from hf_stitch.metrics.base import MomentsMetric
from hf_stitch.papers import DING_2021


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
        unit_norm: Whether to scale both sides to Frobenius norm 1 first.

    Returns:
        Distance >= 0; with ``unit_norm`` at most √2, or 2 if squared; a float for arrays, a 0-d float64 tensor for
        tensors.

    Raises:
        ValueError: There are fewer than 2 rows, or all rows of a side are equal.

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
    triangle_inequality = True
    differentiable = True

    def __init__(self, **options: bool) -> None:
        super().__init__(**options)
        if self.options["squared"]:
            self.triangle_inequality, self.range = False, (0.0, 2.0)
        if not self.options["unit_norm"]:
            self.invariances, self.range = ("orthogonal", "permutation", "translation"), (0.0, math.inf)
