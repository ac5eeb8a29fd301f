"""Input of metrics: paired rows in float64, their moments, and distances between rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_stitch.options import check_call
from hf_stitch.statistics.base import Rows
from hf_stitch.statistics.spectrum import EPS, UNCERTAIN, SecondMoments, Side, above_rounding, eps_of, rounding

Array = NDArray[np.floating[Any]]
Options = ParamSpec("Options")
Cached = TypeVar("Cached")


class MetricFunction(Protocol[Options]):
    """Metric as a function: returns a float for arrays and a 0-d float64 tensor for tensors."""

    __name__: str

    @overload
    def __call__(self, x: Tensor, y: Tensor, /, *args: Options.args, **options: Options.kwargs) -> Tensor: ...
    @overload
    def __call__(self, x: Array, y: Array, /, *args: Options.args, **options: Options.kwargs) -> float: ...


def of_rows(formula: Callable[Concatenate[Tensor, Tensor, Options], Tensor]) -> MetricFunction[Options]:
    """Turn a formula over float64 tensors into a metric function (decorator).

    The metric function checks its input and its options, converts rows to float64, and returns a float for arrays and
    a 0-d tensor for tensors.

    Args:
        formula: Function ``formula(x, y, *, option=default, …)`` of two float64 tensors of shapes ``(n, dx)`` and
            ``(n, dy)`` that returns a 0-d tensor. Its name is the name of the metric. Its keyword-only parameters with
            a default are the options; their annotations are checked.

    Example:
        >>> import torch
        >>> from hf_stitch.metrics import of_rows
        >>> @of_rows
        ... def mean_difference(x, y, *, squared: bool = False):
        ...     apart = (x.mean(0) - y.mean(0)).norm()
        ...     return apart.square() if squared else apart
        >>> mean_difference(torch.zeros(5, 4), torch.ones(5, 4)).item()
        2.0
    """
    return _metric_function(formula, exact=True)


def of_own_rows(formula: Callable[Concatenate[Tensor, Tensor, Options], Tensor]) -> MetricFunction[Options]:
    """As :func:`of_rows`, for a formula that requires rows in their original dtype to account for its rounding."""
    return _metric_function(formula, exact=False)


def _metric_function(
    formula: Callable[Concatenate[Tensor, Tensor, Options], Tensor], exact: bool
) -> MetricFunction[Options]:
    name = formula.__name__

    @functools.wraps(formula)
    def function(x: Rows, y: Rows, /, *args: Options.args, **options: Options.kwargs) -> Tensor | float:
        check_call(formula, options, f"{name}: ")
        rows_x, rows_y = paired(name, x, y, exact)
        check_count(name, len(rows_x), 2)
        value = formula(rows_x, rows_y, *args, **options)
        return value if isinstance(x, Tensor) or isinstance(y, Tensor) else value.item()

    return function  # type: ignore[return-value]


def paired(name: str, x: Rows, y: Rows, exact: bool = True) -> tuple[Tensor, Tensor]:
    """Check both sides and convert them to tensors, in float64 if ``exact``."""
    x, y = _checked(name, "x", x), _checked(name, "y", y)
    if exact:
        x, y = x.double(), y.double()
    if len(x) != len(y):
        raise ValueError(f"{name}: row i of x and row i of y must be the same sample, got {len(x)} and {len(y)} rows")
    return x, y


def check_count(name: str, rows: int, least: int, reason: str = "") -> None:
    """Raise an error if a metric requires more rows."""
    if rows < least:
        raise ValueError(f"{name} requires at least {least} rows, got {rows}{reason}; pass more rows")


def check_widths(name: str, x: Tensor, y: Tensor) -> None:
    """Check that both sides have the same width, for a metric that compares feature i with feature i."""
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(
            f"{name} requires equal widths of x and y, got {x.shape[-1]} and {y.shape[-1]}; stitch x to y first"
        )


def _checked(name: str, side: str, rows: Rows) -> Tensor:
    if not isinstance(rows, Tensor | np.ndarray):
        raise TypeError(f"{name}: {side} must be a numpy array or a torch tensor, got {type(rows).__name__}")
    floating = rows.is_floating_point() if isinstance(rows, Tensor) else np.issubdtype(rows.dtype, np.floating)
    if not floating:
        raise ValueError(
            f"{name}: {side} must contain real floating-point numbers, got {rows.dtype}; convert integers to float, "
            "and complex numbers to real and imaginary features"
        )
    if rows.ndim != 2 or rows.shape[1] == 0:
        raise ValueError(
            f"{name}: {side} must have shape (rows, features), got {tuple(rows.shape)}; "
            "Representation.rows returns such a matrix for any layout"
        )
    if isinstance(rows, Tensor):
        values = rows
    else:  # torch supports floats up to float64, in native byte order
        dtype = rows.dtype.newbyteorder("=") if rows.dtype.itemsize <= 8 else np.float64
        values = torch.from_numpy(np.ascontiguousarray(rows, dtype))
    is_finite = values.detach().isfinite().all(1)
    if not is_finite.all():
        row = int(is_finite.logical_not().nonzero()[0])
        raise ValueError(
            f"{name}: row {row} of {side} contains NaN or infinity; drop such rows (on both sides) or run the "
            "network in a wider dtype"
        )
    return values


class RowMoments:
    """Moments of rows in memory, computed lazily and differentiable.

    With ``wide``, a side with more features than rows is replaced by its coordinates in the span of its rows. This does
    not change a metric that is invariant to orthogonal maps. The gradient of such a metric lies in this span, so the
    basis can be held fixed. Second derivatives would be wrong and are not supported.
    """

    along_axes = False  # whether the features are sorted principal axes
    kept: Mapping[str, dict[str, Any]] = {}  # side -> cached result of a metric

    def __init__(self, x: Tensor, y: Tensor, *, wide: bool = False) -> None:
        self.eps, x, y = eps_of(x, y), x.double(), y.double()
        self.n, self.mean_x, self.mean_y = len(x), x.mean(0), y.mean(0)
        self.x, self.y = x - self.mean_x, y - self.mean_y
        if wide:
            self.x, self.y = _coordinates(self.x), _coordinates(self.y)

    @classmethod
    def of_axes(cls, rows: Tensor) -> RowMoments:
        """Return the moments of rows with themselves, along their principal axes, the largest first.

        Linearly dependent or relatively tiny features stay unchanged, as do features with an axis near rounding in the
        dtype of the rows: metrics judge their rank.
        """
        centred_rows = cls(rows, rows)
        left, lengths, _ = torch.linalg.svd(_coordinates(centred_rows.x), full_matrices=False)
        significant = lengths > max(rows.shape) * EPS * lengths[0]
        axes = centred_rows.x.T @ (left[:, significant] / lengths[significant])
        certain = above_rounding(lengths[significant].square(), axes, rounding(centred_rows, "x"), UNCERTAIN)
        if not certain.all() or (rows.shape[1] < len(rows) and not significant.all()):
            return centred_rows
        moments = cls(coordinates := left[:, significant] * lengths[significant], coordinates)
        moments.along_axes = True
        return moments

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
    if rows.shape[1] <= len(rows):
        return rows
    return rows @ torch.linalg.qr(rows.detach().T).Q if rows.requires_grad else torch.linalg.qr(rows.T, "r").R.T


def once(moments: SecondMoments, side: Side, make: Callable[[], Cached]) -> Cached:
    """Return the result of ``make`` for a side, cached over the permutations of a test."""
    cached = getattr(moments, "kept", {}).get(side, {})
    return cached["made"] if "made" in cached else cached.setdefault("made", make())


def nuclear(cross: Tensor, moments: SecondMoments) -> Tensor:
    """Return the sum of the singular values of a matrix, in a permutation test from its Gram matrix.

    The eigenvalues of the Gram matrix take less than half of the time. If rows and columns belong to sorted principal
    axes, even the smallest eigenvalues are accurate. Their product, the determinant, verifies this, because a Cholesky
    decomposition computes it to high relative accuracy.
    """
    if getattr(moments, "along_axes", False):
        gram = cross @ cross.T if len(cross) <= cross.shape[1] else cross.T @ cross
        values, (factor, failed) = torch.linalg.eigvalsh(gram), torch.linalg.cholesky_ex(gram)
        difference = values.log().sum() - 2 * factor.diagonal().log().sum()  # NaN if a value is negative
        if not failed and difference.abs() < 1e-6:
            return values.sqrt().sum()
    return torch.linalg.svdvals(cross).sum()


def variances(moments: SecondMoments) -> tuple[Tensor, Tensor]:
    """Return the diagonals of ``sxx`` and ``syy``, for rows in memory without computing the matrices."""
    if isinstance(moments, RowMoments):
        return moments.x.square().sum(0), moments.y.square().sum(0)
    return moments.sxx.diagonal(), moments.syy.diagonal()


def check_variation(name: str, moments: SecondMoments) -> None:
    """Raise an error for fewer than 2 rows or a side with all rows equal."""
    check_count(name, moments.n, 2)
    for side, variance, mean in zip("xy", variances(moments), (moments.mean_x, moments.mean_y), strict=True):
        # Equal rows may have a small variance, because their mean is rounded.
        if variance.sum() <= moments.n * (8 * EPS * mean.norm()) ** 2:
            raise ValueError(
                f"{name}: all {moments.n} rows of {side} are equal, so the value is undefined; is the layer dead?"
            )


def nonnegative(name: str, value: Tensor, scale: Tensor, terms: int) -> Tensor:
    """Clip a non-negative difference of numbers near ``scale`` at 0, if rounding explains the negative value."""
    if value < -8 * terms * EPS * scale:
        raise ArithmeticError(
            f"{name}: {value.item():.3e} must not be negative; rounding of {scale.item():.3e} does not explain it"
        )
    return torch.where(value < 0, 0, value)  # not value * 0, which is -0.0


Distance = Literal["correlation", "cosine", "euclidean"]


def pairwise(rows: Tensor, distance: Distance) -> Tensor:
    """Return ``(n, n)`` Euclidean distances between rows, or 1 minus the inner products of rows from ``directions``.

    Euclidean distances are computed from differences, because inner products would lose half of the digits.
    """
    if distance == "euclidean":
        return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    return 1 - rows @ rows.T


def directions(name: str, side: str, rows: Tensor, distance: Distance = "cosine") -> Tensor:
    """Normalise rows so that their inner products are cosines or correlations; unchanged for Euclidean distances."""
    if distance == "euclidean":
        return rows
    if distance == "correlation":
        lengths = rows.norm(dim=1)
        rows = rows - rows.mean(1, keepdim=True)
        zero = rows.norm(dim=1) <= 8 * torch.finfo(rows.dtype).eps * lengths
    else:
        zero = rows.norm(dim=1) == 0
    if zero.any():
        problem = "constant" if distance == "correlation" else "zero"
        raise ValueError(
            f"{name}: row {int(zero.nonzero()[0])} of {side} is {problem}, so its {distance} is undefined; drop the "
            "row on both sides, or choose another distance if the metric has this option"
        )
    return rows / rows.norm(dim=1, keepdim=True)


def upper(matrix: Tensor) -> Tensor:
    """Return the entries above the diagonal, ``(n (n - 1) / 2,)``."""
    i, j = torch.triu_indices(len(matrix), len(matrix), 1, device=matrix.device)
    return matrix[i, j]


def centred(matrix: Tensor) -> Tensor:
    """Subtract the means of rows and columns."""
    return matrix - matrix.mean(0) - matrix.mean(1, keepdim=True) + matrix.mean()
