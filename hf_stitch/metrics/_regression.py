"""Linear regression metrics: how well a linear map from x predicts y."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hf_stitch.metrics._catalogue import built_in
from hf_stitch.metrics._rows import RowMoments, Rows, check_count, check_variation, check_widths, of_own_rows, of_rows
from hf_stitch.metrics.base import MomentsMetric, Operand
from hf_stitch.options import checked
from hf_stitch.papers import BALOGH_2025, CSISZARIK_2021, KORNBLITH_2019
from hf_stitch.statistics.spectrum import NOTHING_VARIES, SecondMoments, above_rounding, rounding


@of_own_rows
def linear_regression(
    x: Tensor, y: Tensor, *, center: bool = True, weight: Rows | None = None, bias: Rows | None = None
) -> Tensor:
    """R² of a linear map from x to y, at most 1: ``1 - ‖X Wᵀ + b - Y‖² / ‖Y‖²``.

    Without ``weight``, the map is the least-squares fit (Csiszárik et al. 2021, definition 6.1; Kornblith et al. 2019),
    and R² is invariant to invertible maps of x. With ``weight``, this map is evaluated, for example a trained stitching
    layer. Directions of X that are rounding errors in its dtype count as 0.

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        center: Whether to centre: the fit has an intercept, and the denominator is the variation of Y about its mean.
        weight: Weight of the map, ``(dy, dx)`` as in ``torch.nn.Linear``, or None to fit the map.
        bias: Bias of the map, ``(dy,)``; requires ``weight``. None: without a bias.

    Example:
        >>> import torch
        >>> x = torch.randn(50, 4)
        >>> round(linear_regression(x, x @ torch.randn(4, 2) + 1).item(), 6)
        1.0
        >>> round(linear_regression(x, 2 * x, weight=torch.eye(4), center=False).item(), 6)
        0.75
    """
    return _linear_regression(RowMoments(x, y), center=center, weight=weight, bias=bias)


def _linear_regression(moments: SecondMoments, *, center: bool, weight: Rows | None, bias: Rows | None) -> Tensor:
    mean_weight = 0 if center else moments.n
    total = moments.syy.trace() + mean_weight * moments.mean_y @ moments.mean_y
    if center:
        check_variation("linear_regression", moments)
    elif total == 0:
        raise ValueError("linear_regression: y is all zeros, so R² is undefined; is the layer dead?")
    if weight is None:
        if bias is not None:
            raise ValueError("linear_regression: bias requires weight; pass both, or neither to fit the map")
        return _explained(moments, mean_weight) / total
    return 1 - _residual(moments, *_checked_map(moments, weight, bias)) / total


@built_in("linear_regression")
class LinearRegression(MomentsMetric):
    """Streaming ``linear_regression``."""

    papers = (KORNBLITH_2019,)
    function = staticmethod(linear_regression)
    formula = staticmethod(_linear_regression)
    _of_own_rows = True
    symmetric = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.options["weight"] is not None:
            self.range, self.invariances = (-math.inf, 1.0), ()
            self.differentiable = True
        elif not self.options["center"]:
            self.invariances = ("orthogonal", "scaling", "permutation")

    @checked
    def min_rows(self, side: Operand, width: int) -> int:
        """Return one more than the unknowns per feature of y for a fit; 2 otherwise."""
        fit = side == "x" and self.options["weight"] is None
        return _least_for_fit(width, self.options["center"]) if fit else 2


@of_rows
def direct_matching(x: Tensor, y: Tensor) -> Tensor:
    """Relative squared error of stitched activations: ``‖X - Y‖² / ‖Y‖²`` (Balogh & Jelasity 2025).

    This is the structural similarity of the paper: 1 minus the uncentred ``linear_regression`` of the map.

    Args:
        x: Activations of the source after the stitching layer, ``(n, d)``, floating point.
        y: Activations of the target, ``(n, d)``, floating point.

    Example:
        >>> import torch
        >>> direct_matching(torch.zeros(5, 2), torch.ones(5, 2)).item()
        1.0
    """
    check_widths("direct_matching", x, y)
    return _relative((x - y).square().sum(), y.square().sum())


def _direct_matching(moments: SecondMoments) -> Tensor:
    check_count("direct_matching", moments.n, 2)
    check_widths("direct_matching", moments.mean_x, moments.mean_y)
    identity = torch.eye(len(moments.mean_y)).to(moments.sxy), torch.zeros_like(moments.mean_y)
    return _relative(_residual(moments, *identity), moments.syy.trace() + moments.n * moments.mean_y @ moments.mean_y)


@built_in("direct_matching")
class DirectMatching(MomentsMetric):
    """Streaming ``direct_matching``. From moments the error is a difference, accurate to 1e-15 of 1."""

    papers = (CSISZARIK_2021, BALOGH_2025)
    function = staticmethod(direct_matching)
    formula = staticmethod(_direct_matching)
    symmetric = False
    differentiable = True
    equal_widths = True


def _least_for_fit(width: int, center: bool) -> int:
    return width + (2 if center else 1)


def _explained(moments: SecondMoments, mean_weight: int) -> Tensor:
    """Compute ``‖X M‖²`` of the least-squares fit M: the part of Y in the span of X."""
    width = len(moments.mean_x)
    least = _least_for_fit(width, center=not mean_weight)
    check_count("linear_regression", moments.n, least, f": with n < {least}, a fit of {width} features explains any y")
    sxx = moments.sxx + mean_weight * torch.outer(moments.mean_x, moments.mean_x)
    sxy = moments.sxy + mean_weight * torch.outer(moments.mean_x, moments.mean_y)
    values, vectors = torch.linalg.eigh(sxx)
    significant = above_rounding(values, vectors, rounding(moments, "x"))
    if not significant.any():
        raise ValueError(NOTHING_VARIES.format("linear_regression: x"))
    return ((vectors[:, significant].T @ sxy).square().sum(1) / values[significant]).sum()


def _residual(moments: SecondMoments, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute ``‖X Wᵀ + b - Y‖²``."""
    scatter = ((weight @ moments.sxx) * weight).sum() - 2 * (weight * moments.sxy.T).sum() + moments.syy.trace()
    return scatter + moments.n * (weight @ moments.mean_x + bias - moments.mean_y).square().sum()


def _checked_map(moments: SecondMoments, weight: Rows, bias: Rows | None) -> tuple[Tensor, Tensor]:
    mean_x, mean_y = moments.mean_x, moments.mean_y
    weight = torch.as_tensor(weight).to(mean_x)
    bias = torch.zeros_like(mean_y) if bias is None else torch.as_tensor(bias).to(mean_y)
    if weight.shape != (len(mean_y), len(mean_x)) or bias.shape != mean_y.shape:
        raise ValueError(
            f"linear_regression: weight must be {(len(mean_y), len(mean_x))} and bias {(len(mean_y),)}, "
            f"got {tuple(weight.shape)} and {tuple(bias.shape)}"
        )
    return weight, bias


def _relative(error: Tensor, total: Tensor) -> Tensor:
    if total == 0:
        raise ValueError("direct_matching: y is all zeros, so the relative error is undefined; is the layer dead?")
    return error / total
