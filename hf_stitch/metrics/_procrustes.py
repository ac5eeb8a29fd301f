"""The Procrustes distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_stitch.metrics._rows import RowMoments, SecondMoments, check_variation, nonnegative, of_rows, variances
from hf_stitch.metrics.base import Invariances, MomentsMetric
from hf_stitch.papers import DING_2021


@of_rows
def procrustes(x: Tensor, y: Tensor, *, squared: bool = False, unit_norm: bool = True) -> Tensor:
    """Least ``‖XQ - Y‖`` over orthogonal maps Q, both sides centred (Schönemann 1966; Ding et al. 2021).

    Its square is ``‖X‖² + ‖Y‖² - 2 ‖XᵀY‖_*``; of unequal widths, the narrower side is filled up with zeros. As a
    difference it is exact to about 1e-15 of ``‖X‖² + ‖Y‖²``, so that the root of a rotated copy is about 1e-8, not 0.

    Args:
        x: ``(n, dx)``.
        y: ``(n, dy)``.
        squared: Whether to give the square, which does not obey the triangle inequality.
        unit_norm: Whether both sides are scaled to Frobenius norm 1 first.

    Returns:
        0 or more; with unit norm, at most √2 (2 if squared).

    Raises:
        ValueError: Fewer than 2 rows, or the rows of a side are all equal.

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
    total, aligned = square_x + square_y, torch.linalg.svdvals(moments.sxy).sum()
    if unit_norm:
        total, aligned = torch.full_like(total, 2), aligned / (square_x.sqrt() * square_y.sqrt())
    square = nonnegative("procrustes", total - 2 * aligned, total.detach(), max(moments.sxy.shape))
    return square if squared else square.sqrt()


class Procrustes(MomentsMetric):
    """Streams ``procrustes``."""

    name = "procrustes"
    title = "orthogonal Procrustes distance"
    papers = (DING_2021,)
    function = staticmethod(procrustes)
    formula = staticmethod(_procrustes)
    higher_is_better = False
    triangle_inequality = True
    range = (0.0, math.sqrt(2))
    invariances: Invariances = ("orthogonal", "scaling", "permutation", "translation")
    differentiable = True

    def __init__(self, **options: bool) -> None:
        super().__init__(**options)
        if self.options["squared"]:
            self.triangle_inequality, self.range = False, (0.0, 2.0)
        if not self.options["unit_norm"]:
            self.invariances, self.range = ("orthogonal", "permutation", "translation"), (0.0, math.inf)
