"""Canonical correlation analysis: CCA, SVCCA and PWCCA."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

from hf_stitch.metrics._catalogue import built_in
from hf_stitch.metrics._rows import (
    RowMoments,
    SecondMoments,
    Side,
    check_count,
    check_features_vary,
    check_variation,
    nuclear,
    of_rows,
    once,
)
from hf_stitch.metrics.base import MomentsMetric, Operand
from hf_stitch.options import NonNegative, Within, checked
from hf_stitch.papers import DING_2021, KORNBLITH_2019, MORCOS_2018, RAGHU_2017

_EPS = torch.finfo(torch.float64).eps
_EQUAL = _EPS**0.5
"""Difference of two canonical correlations that may be rounding."""


@of_rows
def cca(x: Tensor, y: Tensor, *, squared: bool = False, ridge: NonNegative = 0.0) -> Tensor:
    """Mean canonical correlation over the ``min(dx, dy)`` canonical directions (Hotelling 1936).

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        squared: Whether to average the squared correlations (``R²_CCA`` of Kornblith et al. 2019).
        ridge: Regularisation added to the covariance of each side, as a multiple of its mean variance. With a ridge,
            rank-deficient sides and few rows are allowed, but the value is invariant to orthogonal maps and scaling
            only, not to every invertible map.

    Returns:
        Similarity in [0, 1]; a float for arrays, a 0-d float64 tensor for tensors.

    Raises:
        ValueError: There are fewer than 2 rows, or all rows of a side are equal. Without ridge also: n is at most a
            width + 1, or a side does not have full rank.

    Example:
        >>> import torch
        >>> x = torch.randn(50, 4)
        >>> round(cca(x, x @ torch.randn(4, 4)).item(), 6)
        1.0
    """
    return _cca(RowMoments(x, y), squared=squared, ridge=ridge)


def _cca(moments: SecondMoments, *, squared: bool, ridge: float) -> Tensor:
    if ridge:
        check_variation("cca", moments)
    remedy = "" if ridge else "set ridge, or use svcca, which drops small directions"
    cross = _whitened(moments, *_factors("cca", moments, remedy, ridge))
    return (cross.square().sum() if squared else nuclear(cross, moments)) / min(cross.shape)


@built_in("cca")
class CCA(MomentsMetric):
    """Streaming ``cca``."""

    papers = (RAGHU_2017, KORNBLITH_2019)
    function = staticmethod(cca)
    formula = staticmethod(_cca)
    differentiable = True

    def __init__(self, **options: bool | float) -> None:
        super().__init__(**options)
        if self.options["ridge"]:
            self.invariances = ("orthogonal", "scaling", "permutation", "translation")

    @checked
    def min_rows(self, side: Operand, width: int) -> int:
        """Width + 2 without ridge, 2 with ridge."""
        return 2 if self.options["ridge"] else least_for_full_rank(width)


@of_rows
def pwcca(x: Tensor, y: Tensor, *, directions: Literal["paired", "all"] = "paired") -> Tensor:
    """Projection-weighted CCA: canonical correlations weighted by how much of x each direction explains.

    The weight of direction i is ``Σⱼ |⟨hᵢ, xⱼ⟩|`` over the features xⱼ of x, where hᵢ is its canonical variate (Morcos
    et al. 2018). The metric is asymmetric, and rotating x changes its value.

    ``directions`` determines which directions of x have a weight. ``"paired"``: the ``min(dx, dy)`` that have a
    partner in y, as in the paper. ``"all"``: all dx, as in the code of Ding et al. (2021) and of Balogh and Jelasity
    (2025); those without a partner have the correlation 0, so that the value falls with the part of x that y lacks. A
    y of low rank is then allowed. It must be exactly so: float64 rows, as rounding to float32 restores full rank.

    Among directions of equal correlation (those without a partner, or several perfectly correlated ones), CCA leaves
    the basis open, and the weights depend on it. Here it consists of the principal axes of what these directions
    explain of x. The code of the papers uses whatever basis the SVD returns, so values may differ there.

    Args:
        x: Activations of shape ``(n, dx)``, floating point. The weights are computed from this side. Row i of ``x`` and
            of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        directions: ``"paired"`` or ``"all"``, the directions of x that have a weight.

    Returns:
        Similarity in [0, 1]; a float for arrays, a 0-d float64 tensor for tensors.

    Raises:
        ValueError: n is at most a width + 1 (for y with ``"all"``: its rank + 1); or x, or with ``"paired"`` also y,
            does not have full rank.

    Example:
        >>> import torch
        >>> x = torch.randn(50, 4, dtype=torch.float64)
        >>> round(pwcca(x, x @ torch.randn(4, 4, dtype=torch.float64)).item(), 6)
        1.0
        >>> pwcca(x, x[:, :2] @ x[:2, :2], directions="all").item() < 1
        True
    """
    return _pwcca(RowMoments(x, y), directions=directions)


def _pwcca(moments: SecondMoments, *, directions: str = "paired") -> Tensor:
    everything = directions == "all"
    if everything:
        check_variation("pwcca", moments)
        (factor,) = _factors("pwcca", moments, "pass the side of full rank as x, or use svcca", sides=("x",))
        whitening = once(moments, "y", lambda: _whitening(moments))
        rank = whitening.shape[1]
        why = f", as y has rank {rank}: with n <= rank + 1 every canonical correlation is 1"
        check_count("pwcca", moments.n, least_for_full_rank(rank), why)
        cross = torch.linalg.solve_triangular(factor, moments.sxy @ whitening, upper=False)
    else:
        factor, factor_y = _factors("pwcca", moments, "use svcca, or, if y has low rank, directions='all'")
        cross = _whitened(moments, factor, factor_y)
    left, correlations, _ = torch.linalg.svd(cross, full_matrices=everything)
    correlations = torch.cat([correlations, correlations.new_zeros(left.shape[1] - len(correlations))])
    weights = _settled(left.T @ factor.T, correlations).abs().sum(1)
    return correlations @ weights / weights.sum()


@built_in("pwcca")
class PWCCA(MomentsMetric):
    """Streaming ``pwcca``."""

    papers = (MORCOS_2018, DING_2021)
    function = staticmethod(pwcca)
    formula = staticmethod(_pwcca)
    symmetric = False

    @checked
    def min_rows(self, side: Operand, width: int) -> int:
        """Width + 2; for y with all directions the number for rank one, as the rank depends on the data."""
        return least_for_full_rank(1 if side == "y" and self.options["directions"] == "all" else width)


@of_rows
def svcca(x: Tensor, y: Tensor, *, variance: Annotated[float, Within(0, 1, above=True)] = 0.99) -> Tensor:
    """Mean canonical correlation of the leading principal components of both sides (Raghu et al. 2017).

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        variance: Share of the variance of each side to keep, in (0, 1]. The fewest leading components that reach this
            share are used.

    Returns:
        Similarity in [0, 1]; a float for arrays, a 0-d float64 tensor for tensors.

    Raises:
        ValueError: n is at most the number of components + 1 (the value would be 1 for any data), or all rows of a side
            are equal.

    Example:
        >>> import torch
        >>> x = torch.randn(50, 4)
        >>> round(svcca(x, 3 * x).item(), 6)
        1.0
    """
    return _svcca(RowMoments(x, y), variance=variance)


def _svcca(moments: SecondMoments, *, variance: float) -> Tensor:
    check_variation("svcca", moments)
    (values_x, left), (values_y, right) = (
        once(moments, "x", lambda: _leading(moments.sxx, variance)),
        once(moments, "y", lambda: _leading(moments.syy, variance)),
    )
    for side, kept in (("x", len(values_x)), ("y", len(values_y))):
        reason = f": {kept} components of {side} explain {variance:g} of its variance; lower variance"
        check_count("svcca", moments.n, kept + 2, reason)
    cross = (left.T @ moments.sxy @ right) / torch.outer(values_x.sqrt(), values_y.sqrt())
    return nuclear(cross, moments) / min(cross.shape)


@built_in("svcca")
class SVCCA(MomentsMetric):
    """Streaming ``svcca``."""

    papers = (RAGHU_2017,)
    function = staticmethod(svcca)
    formula = staticmethod(_svcca)

    @checked
    def min_rows(self, side: Operand, width: int) -> int:
        """The number for one component; how many are kept depends on the data."""
        return least_for_full_rank(1)


def least_for_full_rank(width: int) -> int:
    """The fewest rows for which canonical correlations of ``width`` features carry information."""
    return width + 2


def check_full_rank(name: str, moments: SecondMoments, remedy: str, sides: Sequence[Side] = ("x", "y")) -> None:
    """Check that canonical correlations are defined: enough rows, and no linearly dependent features.

    The rank is that of the correlation matrix, so it does not depend on the scales of the features.
    """
    check_features_vary(name, moments, sides)
    for side in sides:
        scatter = moments.sxx if side == "x" else moments.syy
        width = len(scatter)
        why = f": with n <= width + 1 = {width + 1} ({side}) every canonical correlation is 1; {remedy}"
        check_count(name, moments.n, least_for_full_rank(width), why)
        scale = scatter.detach().diagonal().rsqrt()
        values = torch.linalg.eigvalsh(scatter.detach() * torch.outer(scale, scale))
        rank = int((values > width * _EPS * values[-1]).sum())
        if rank < width:
            raise ValueError(
                f"{name}: the {width} features of {side} have rank {rank}, so the value is undefined; {remedy}, or "
                "remove linearly dependent features"
            )


def _factors(
    name: str, moments: SecondMoments, remedy: str, ridge: float = 0.0, sides: Sequence[Side] = ("x", "y")
) -> list[Tensor]:
    """The Cholesky factors of both sides; without a ridge, their rank is checked."""

    def of(side: Side) -> Tensor:
        if not ridge:
            check_full_rank(name, moments, remedy, (side,))
        return _factor(moments.sxx if side == "x" else moments.syy, ridge)

    return [once(moments, side, partial(of, side)) for side in sides]


def _factor(scatter: Tensor, ridge: float = 0.0) -> Tensor:
    """The Cholesky factor. Unlike that of eigenvectors, its gradient is finite where eigenvalues coincide."""
    return torch.linalg.cholesky(scatter + ridge * scatter.diagonal().mean() * torch.eye(len(scatter)).to(scatter))


def _whitened(moments: SecondMoments, factor_x: Tensor, factor_y: Tensor) -> Tensor:
    """``Lx⁻¹ Sxy Ly⁻ᵀ``: its singular values are the canonical correlations."""
    half = torch.linalg.solve_triangular(factor_x, moments.sxy, upper=False)
    return torch.linalg.solve_triangular(factor_y, half.T, upper=False).T


def _whitening(moments: SecondMoments) -> Tensor:
    """The map of y to uncorrelated features of equal variance, ``(dy, rank of y)``.

    Directions whose variance is rounding are dropped.
    """
    values, vectors = torch.linalg.eigh(moments.syy)
    rounding = moments.n * (8 * _EPS * moments.mean_y.norm()) ** 2
    kept = values > torch.clamp(len(values) * _EPS * values[-1], min=rounding)
    return vectors[:, kept] / values[kept].sqrt()


def _settled(parts: Tensor, correlations: Tensor) -> Tensor:
    """Choose the principal axes as the basis of directions with equal correlations."""
    starts = torch.cat([correlations.new_ones(1, dtype=torch.bool), -correlations.diff() > _EQUAL])
    sizes = starts.nonzero()[:, 0].diff(append=torch.tensor([len(parts)], device=parts.device)).tolist()
    return torch.cat([group if len(group) == 1 else _axes(group) for group in parts.split(sizes)])


def _axes(parts: Tensor) -> Tensor:
    _, lengths, axes = torch.linalg.svd(parts, full_matrices=False)
    return lengths[:, None] * axes


def _leading(scatter: Tensor, variance: float) -> tuple[Tensor, Tensor]:
    """The fewest leading eigenvalues that reach this share of their sum, and their eigenvectors.

    Eigenvalues within rounding of 0 are dropped.
    """
    values, vectors = (part.flip(-1) for part in torch.linalg.eigh(scatter))
    values = values[values > len(values) * _EPS * values[0]]
    shares = values.cumsum(0)
    kept = int((shares < variance * shares[-1]).sum()) + 1
    return values[:kept], vectors[:, :kept]
