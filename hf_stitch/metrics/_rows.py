"""What goes into a metric: paired rows, checked and in float64, and the moments that follow from them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cached_property
from typing import Any, Concatenate, ParamSpec, Protocol, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_stitch.metrics._options import check_values

Array = NDArray[np.floating[Any]]
Rows = Tensor | Array
Options = ParamSpec("Options")

_EPS = torch.finfo(torch.float64).eps


class MetricFunction(Protocol[Options]):
    """A metric as a function: of arrays it is a float, of tensors a 0-d tensor."""

    __name__: str

    @overload
    def __call__(self, x: Tensor, y: Tensor, /, *args: Options.args, **options: Options.kwargs) -> Tensor: ...
    @overload
    def __call__(self, x: Array, y: Array, /, *args: Options.args, **options: Options.kwargs) -> float: ...


def of_rows(formula: Callable[Concatenate[Tensor, Tensor, Options], Tensor]) -> MetricFunction[Options]:
    """Decorate a formula over float64 rows: check what comes in, convert it, and give out what came in.

    The options are the formula's keyword-only parameters that have a default; their annotations are checked.
    """
    name = formula.__name__

    @functools.wraps(formula)
    def function(x: Rows, y: Rows, /, *args: Options.args, **options: Options.kwargs) -> Tensor | float:
        check_values(name, formula, options)
        exact_x, exact_y = paired(name, x, y)
        check_count(name, len(exact_x), 2)
        value = formula(exact_x, exact_y, *args, **options)
        return value if isinstance(x, Tensor) or isinstance(y, Tensor) else value.item()

    return function  # type: ignore[return-value]


def paired(name: str, x: Rows, y: Rows) -> tuple[Tensor, Tensor]:
    """Both sides in float64, once nothing speaks against them.

    Raises:
        ValueError: A side is no matrix of finite real floating-point numbers, or the sides differ in length.
    """
    x, y = _float64(name, "x", x), _float64(name, "y", y)
    if len(x) != len(y):
        raise ValueError(f"{name}: row i of x and row i of y must be the same sample, got {len(x)} and {len(y)} rows")
    return x, y


def check_count(name: str, rows: int, least: int, why: str = "") -> None:
    """Refuse fewer rows than a metric takes."""
    if rows < least:
        raise ValueError(f"{name} takes at least {least} rows, got {rows}{why}; give more rows")


def check_widths(name: str, x: Tensor, y: Tensor) -> None:
    """Refuse sides of different widths for a metric that compares feature i with feature i."""
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(
            f"{name} compares feature i of x with feature i of y: the widths must be equal, got {x.shape[-1]} and "
            f"{y.shape[-1]}; stitch x to y first"
        )


def _float64(name: str, side: str, rows: Rows) -> Tensor:
    if not isinstance(rows, Tensor | np.ndarray):
        raise TypeError(f"{name}: {side} must be a numpy array or a torch tensor, got {type(rows).__name__}")
    floating = rows.is_floating_point() if isinstance(rows, Tensor) else np.issubdtype(rows.dtype, np.floating)
    if not floating:
        raise ValueError(
            f"{name}: {side} must hold real floating-point numbers, got {rows.dtype}; convert integers to float, "
            "and take the real and imaginary parts of complex numbers as features"
        )
    if rows.ndim != 2 or rows.shape[1] == 0:
        raise ValueError(
            f"{name}: {side} must have shape (rows, features), got {tuple(rows.shape)}; "
            "Representation.rows makes such a matrix of any layout"
        )
    values = (rows if isinstance(rows, Tensor) else torch.from_numpy(np.ascontiguousarray(rows, np.float64))).double()
    finite = values.detach().isfinite().all(1)
    if not finite.all():
        row = int(finite.logical_not().nonzero()[0])
        raise ValueError(
            f"{name}: row {row} of {side} holds NaN or infinity; leave such rows out (on both sides) or run the "
            "network in a wider dtype"
        )
    return values


class SecondMoments(Protocol):
    """What ``Moments`` and ``RowMoments`` have in common: counts, means and co-moments."""

    @property
    def n(self) -> int: ...
    @property
    def mean_x(self) -> Tensor: ...
    @property
    def mean_y(self) -> Tensor: ...
    @property
    def sxx(self) -> Tensor: ...
    @property
    def syy(self) -> Tensor: ...
    @property
    def sxy(self) -> Tensor: ...


class RowMoments:
    """The moments of rows at hand, each computed when it is asked for; differentiable.

    With ``wide``, a side with more features than rows is replaced by its coordinates in the space that its rows span.
    That changes no metric that is invariant to orthogonal maps, and the gradient of such a metric lies in that space,
    so that the basis may be held fixed (which makes the *second* derivative wrong: it is not offered).
    """

    def __init__(self, x: Tensor, y: Tensor, *, wide: bool = False) -> None:
        self.n, self.mean_x, self.mean_y = len(x), x.mean(0), y.mean(0)
        self.x, self.y = x - self.mean_x, y - self.mean_y
        if wide:
            self.x, self.y = _coordinates(self.x), _coordinates(self.y)

    @cached_property
    def sxx(self) -> Tensor:
        """``Σ (x - mean_x)(x - mean_x)ᵀ``."""
        return self.x.T @ self.x

    @cached_property
    def syy(self) -> Tensor:
        """``Σ (y - mean_y)(y - mean_y)ᵀ``."""
        return self.y.T @ self.y

    @cached_property
    def sxy(self) -> Tensor:
        """``Σ (x - mean_x)(y - mean_y)ᵀ``."""
        return self.x.T @ self.y


def _coordinates(rows: Tensor) -> Tensor:
    return rows @ torch.linalg.qr(rows.detach().T).Q if rows.shape[1] > len(rows) else rows


def variances(moments: SecondMoments) -> tuple[Tensor, Tensor]:
    """The diagonals of ``sxx`` and ``syy``; of rows at hand without the matrices."""
    if isinstance(moments, RowMoments):
        return moments.x.square().sum(0), moments.y.square().sum(0)
    return moments.sxx.diagonal(), moments.syy.diagonal()


def check_variation(name: str, moments: SecondMoments) -> None:
    """Refuse fewer than 2 rows, and a side whose rows are all equal."""
    check_count(name, moments.n, 2)
    for side, variance, mean in zip("xy", variances(moments), (moments.mean_x, moments.mean_y), strict=True):
        # Equal rows may scatter a little, for their mean is rounded.
        if variance.sum() <= moments.n * (8 * _EPS * mean.norm()) ** 2:
            raise ValueError(
                f"{name}: all {moments.n} rows of {side} are equal, which leaves it undefined; is the layer dead?"
            )


def check_features_vary(name: str, moments: SecondMoments) -> None:
    """Refuse fewer than 2 rows, and a feature that is constant on its side."""
    check_count(name, moments.n, 2)
    for side, variance, mean in zip("xy", variances(moments), (moments.mean_x, moments.mean_y), strict=True):
        constant = variance <= moments.n * (8 * _EPS * mean) ** 2
        if constant.any():
            features = constant.nonzero()[:, 0].tolist()
            raise ValueError(
                f"{name}: {len(features)} of {len(mean)} features of {side} are constant (the first: {features[0]}), "
                "which leaves it undefined; leave out dead features"
            )


def nonnegative(name: str, value: Tensor, scale: Tensor, terms: int) -> Tensor:
    """A difference of numbers the size of ``scale`` that is 0 or more but for rounding: the rounding is taken off.

    Raises:
        ArithmeticError: It is further below 0 than rounding explains.
    """
    if value < -8 * terms * _EPS * scale:
        raise ArithmeticError(
            f"{name}: {value.item():.3e} should not be negative, and rounding of {scale.item():.3e} does not explain it"
        )
    return torch.where(value < 0, 0, value)  # not value * 0, which is -0.0
