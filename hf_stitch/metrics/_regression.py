"""How well a linear map from x predicts y."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hf_stitch.metrics._rows import RowMoments, SecondMoments, check_count, check_variation, check_widths, of_rows
from hf_stitch.metrics.base import Invariances, MomentsMetric, Operand
from hf_stitch.papers import BALOGH_2025, CSISZARIK_2021, KORNBLITH_2019

_EPS = torch.finfo(torch.float64).eps


@of_rows
def linear_regression(
    x: Tensor, y: Tensor, *, centred: bool = True, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """R² of a linear map from x to y: ``1 - ‖X Wᵀ + b - Y‖² / ‖Y‖²``.

    Without ``weight`` the map is the one of least squares (Csiszárik et al. 2021, definition 6.1; Kornblith et al.
    2019), and R² is invariant to invertible maps of x. With it the map is as given, which shows what training does to
    one. Singular values of X below ``√(dx · eps)`` of the largest count as 0.

    Args:
        x: ``(n, dx)``.
        y: ``(n, dy)``.
        centred: Whether variation is about the mean: the fit has an intercept, and Y in the denominator is centred.
        weight: ``(dy, dx)``, the weight of ``torch.nn.Linear``, or None for the fit.
        bias: ``(dy,)``; only with a weight. Without it the given map has no intercept.

    Returns:
        At most 1; of a fit at least 0.

    Raises:
        ValueError: The rows of a side are all equal (uncentred: y is 0), n does not exceed the unknowns per feature of
            a fit (R² would be 1 for any data), or a weight or bias has the wrong shape.

    Example:
        >>> import torch
        >>> x = torch.randn(50, 4)
        >>> round(linear_regression(x, x @ torch.randn(4, 2) + 1).item(), 6)
        1.0
        >>> round(linear_regression(x, 2 * x, weight=torch.eye(4), centred=False).item(), 6)
        0.75
    """
    return _linear_regression(RowMoments(x, y), centred=centred, weight=weight, bias=bias)


def _linear_regression(moments: SecondMoments, *, centred: bool, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    offset = 0 if centred else moments.n
    total = moments.syy.trace() + offset * moments.mean_y @ moments.mean_y
    if centred:
        check_variation("linear_regression", moments)
    elif total == 0:
        raise ValueError("linear_regression: y is 0 throughout, so there is nothing to explain; is the layer dead?")
    if weight is None:
        if bias is not None:
            raise ValueError("linear_regression: a bias goes with a weight; give both, or neither for a fit")
        return _explained(moments, offset) / total
    return 1 - _residual(moments, *_as_given(moments, weight, bias)) / total


class LinearRegression(MomentsMetric):
    """Streams ``linear_regression``."""

    name = "linear_regression"
    title = "R² of linear regression"
    papers = (KORNBLITH_2019,)
    function = staticmethod(linear_regression)
    formula = staticmethod(_linear_regression)
    symmetric = False
    invariances: Invariances = ("orthogonal", "scaling", "permutation", "translation")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.options["weight"] is not None:
            self.range, self.invariances = (-math.inf, 1.0), ()
            self.differentiable = True
        elif not self.options["centred"]:
            self.invariances = ("orthogonal", "scaling", "permutation")

    def min_rows(self, side: Operand, width: int) -> int:
        """A fit takes more than it has unknowns for each feature of y."""
        fit = side == "x" and self.options["weight"] is None
        return _least_for_fit(width, self.options["centred"]) if fit else 2


@of_rows
def direct_matching(x: Tensor, y: Tensor) -> Tensor:
    """Relative error of stitched rows: ``‖X - Y‖² / ‖Y‖²`` (Balogh & Jelasity 2025, structural similarity).

    One minus the uncentred ``linear_regression`` for the map that was used.

    Args:
        x: ``(n, d)``, the source's rows after the stitch.
        y: ``(n, d)``, the target's.

    Returns:
        0 or more.

    Raises:
        ValueError: The widths differ, or y is 0 throughout.

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
    same = torch.eye(len(moments.mean_y)).to(moments.sxy), torch.zeros_like(moments.mean_y)
    return _relative(_residual(moments, *same), moments.syy.trace() + moments.n * moments.mean_y @ moments.mean_y)


class DirectMatching(MomentsMetric):
    """Streams ``direct_matching``; as moments give it as a difference, to 1e-15 of 1."""

    name = "direct_matching"
    title = "residual of direct matching"
    papers = (
        CSISZARIK_2021,
        BALOGH_2025,
    )
    function = staticmethod(direct_matching)
    formula = staticmethod(_direct_matching)
    higher_is_better = False
    range = (0.0, math.inf)
    symmetric = False
    differentiable = True
    equal_widths = True


def _least_for_fit(width: int, centred: bool) -> int:
    return width + (2 if centred else 1)


def _explained(moments: SecondMoments, offset: int) -> Tensor:
    """``‖X M - Y + Y‖²`` of the least-squares fit: the part of Y in the span of X."""
    width = len(moments.mean_x)
    least = _least_for_fit(width, centred=not offset)
    check_count("linear_regression", moments.n, least, f": with n < {least} a fit of {width} features explains any y")
    sxx = moments.sxx + offset * torch.outer(moments.mean_x, moments.mean_x)
    sxy = moments.sxy + offset * torch.outer(moments.mean_x, moments.mean_y)
    values, vectors = torch.linalg.eigh(sxx)
    kept = values > width * _EPS * values[-1]
    return ((vectors[:, kept].T @ sxy).square().sum(1) / values[kept]).sum()


def _residual(moments: SecondMoments, weight: Tensor, bias: Tensor) -> Tensor:
    """``‖X Wᵀ + b - Y‖²``."""
    scatter = ((weight @ moments.sxx) * weight).sum() - 2 * (weight * moments.sxy.T).sum() + moments.syy.trace()
    return scatter + moments.n * (weight @ moments.mean_x + bias - moments.mean_y).square().sum()


def _as_given(moments: SecondMoments, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
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
        raise ValueError("direct_matching: y is 0 throughout, so no error is relative to it; is the layer dead?")
    return error / total
