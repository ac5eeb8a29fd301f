"""Canonical correlations: CCA, SVCCA and PWCCA."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from hf_stitch.metrics._options import NonNegative, Within
from hf_stitch.metrics._rows import (
    RowMoments,
    SecondMoments,
    check_count,
    check_features_vary,
    check_variation,
    of_rows,
)
from hf_stitch.metrics.base import Invariances, MomentsMetric, Operand
from hf_stitch.papers import KORNBLITH_2019, MORCOS_2018, RAGHU_2017

_EPS = torch.finfo(torch.float64).eps


@of_rows
def cca(x: Tensor, y: Tensor, *, squared: bool = False, ridge: NonNegative = 0.0) -> Tensor:
    """Mean canonical correlation over the ``min(dx, dy)`` canonical directions (Hotelling 1936).

    Args:
        x: ``(n, dx)``.
        y: ``(n, dy)``.
        squared: Whether the mean is of the squared correlations (``R²_CCA`` of Kornblith et al. 2019).
        ridge: Added to the covariance of each side, as a multiple of its mean variance. Then rank-deficient sides and
            few rows are no obstacle, but only orthogonal maps and scaling leave the value as it is.

    Returns:
        In [0, 1].

    Raises:
        ValueError: Without ridge: n is not above both widths + 1, or a side does not have full rank. In any case: fewer
            than 2 rows, or the rows of a side are all equal.

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
    else:
        check_full_rank("cca", moments, "set ridge, or use svcca, which leaves out small directions")
    cross = _whitened(moments, *(_factor(s, ridge) for s in (moments.sxx, moments.syy)))
    if squared:
        return cross.square().sum() / min(cross.shape)
    return torch.linalg.svdvals(cross).mean()


class CCA(MomentsMetric):
    """Streams ``cca``."""

    name = "cca"
    title = "mean canonical correlation"
    papers = (
        RAGHU_2017,
        KORNBLITH_2019,
    )
    function = staticmethod(cca)
    formula = staticmethod(_cca)
    differentiable = True
    invariances: Invariances = ("invertible", "orthogonal", "scaling", "permutation", "translation")

    def __init__(self, **options: bool | float) -> None:
        super().__init__(**options)
        if self.options["ridge"]:
            self.invariances = ("orthogonal", "scaling", "permutation", "translation")

    def min_rows(self, side: Operand, width: int) -> int:
        """Of both sides more than their width, but for ridge."""
        return 2 if self.options["ridge"] else least_for_full_rank(width)


@of_rows
def pwcca(x: Tensor, y: Tensor) -> Tensor:
    """Projection-weighted CCA: correlations weighted by how much of x their directions account for.

    The weight of direction i is ``Σⱼ |⟨hᵢ, xⱼ⟩|`` over the features xⱼ of x, with hᵢ its canonical variate (Morcos et
    al. 2018), over the first ``min(dx, dy)`` directions: beyond them the basis is arbitrary. It is asymmetric, and
    rotating x changes it.

    Args:
        x: ``(n, dx)``, the reference: the weights are those of its directions.
        y: ``(n, dy)``.

    Returns:
        In [0, 1].

    Raises:
        ValueError: n is not above both widths + 1, or a side does not have full rank.

    Example:
        >>> import torch
        >>> x = torch.randn(50, 4)
        >>> round(pwcca(x, x @ torch.randn(4, 4)).item(), 6)
        1.0
    """
    return _pwcca(RowMoments(x, y))


def _pwcca(moments: SecondMoments) -> Tensor:
    check_full_rank("pwcca", moments, "use svcca, which leaves out small directions")
    factor = _factor(moments.sxx)
    left, correlations, _ = torch.linalg.svd(_whitened(moments, factor, _factor(moments.syy)), full_matrices=False)
    weights = (left.T @ factor.T).abs().sum(1)
    return correlations @ weights / weights.sum()


class PWCCA(MomentsMetric):
    """Streams ``pwcca``."""

    name = "pwcca"
    title = "projection-weighted CCA"
    papers = (MORCOS_2018,)
    function = staticmethod(pwcca)
    formula = staticmethod(_pwcca)
    symmetric = False
    invariances: Invariances = ("scaling", "permutation", "translation")

    def min_rows(self, side: Operand, width: int) -> int:
        """Of both sides more than their width."""
        return least_for_full_rank(width)


@of_rows
def svcca(x: Tensor, y: Tensor, *, variance: Annotated[float, Within(0, 1, above=True)] = 0.99) -> Tensor:
    """Mean canonical correlation of the leading principal components of both sides (Raghu et al. 2017).

    Args:
        x: ``(n, dx)``.
        y: ``(n, dy)``.
        variance: Share of its variance that the components kept of a side account for at least, as few as do.

    Returns:
        In [0, 1].

    Raises:
        ValueError: n is not above the components kept + 1 (the value would be 1 for any data), or the rows of a side
            are all equal.

    Example:
        >>> import torch
        >>> x = torch.randn(50, 4)
        >>> round(svcca(x, 3 * x).item(), 6)
        1.0
    """
    return _svcca(RowMoments(x, y), variance=variance)


def _svcca(moments: SecondMoments, *, variance: float) -> Tensor:
    check_variation("svcca", moments)
    (values_x, left), (values_y, right) = (_leading(s, variance) for s in (moments.sxx, moments.syy))
    for side, kept in (("x", len(values_x)), ("y", len(values_y))):
        reason = f": {kept} components of {side} hold {variance:g} of its variance; keep less variance"
        check_count("svcca", moments.n, kept + 2, reason)
    cross = (left.T @ moments.sxy @ right) / torch.outer(values_x.sqrt(), values_y.sqrt())
    return torch.linalg.svdvals(cross).mean()


class SVCCA(MomentsMetric):
    """Streams ``svcca``."""

    name = "svcca"
    title = "singular vector CCA"
    papers = (RAGHU_2017,)
    function = staticmethod(svcca)
    formula = staticmethod(_svcca)
    invariances: Invariances = ("orthogonal", "scaling", "permutation", "translation")

    def min_rows(self, side: Operand, width: int) -> int:
        """More than one component takes; how many are kept, the data show."""
        return least_for_full_rank(1)


def least_for_full_rank(width: int) -> int:
    """The fewest rows from which canonical correlations of features that many say anything."""
    return width + 2


def check_full_rank(name: str, moments: SecondMoments, remedy: str) -> None:
    """Refuse what leaves canonical correlations undefined: too few rows, or features that depend on each other.

    The rank is that of the correlation matrix, so that it does not depend on the scales of the features.
    """
    check_features_vary(name, moments)
    for side, scatter in (("x", moments.sxx), ("y", moments.syy)):
        width = len(scatter)
        why = f": with n <= width + 1 = {width + 1} ({side}) every canonical correlation is 1; {remedy}"
        check_count(name, moments.n, least_for_full_rank(width), why)
        scale = scatter.detach().diagonal().rsqrt()
        values = torch.linalg.eigvalsh(scatter.detach() * torch.outer(scale, scale))
        rank = int((values > width * _EPS * values[-1]).sum())
        if rank < width:
            raise ValueError(
                f"{name}: the {width} features of {side} have rank {rank}, which leaves it undefined; {remedy}, or "
                "leave out features that follow from others"
            )


def _factor(scatter: Tensor, ridge: float = 0.0) -> Tensor:
    """The Cholesky factor, whose gradient, unlike that of eigenvectors, is finite where eigenvalues coincide."""
    return torch.linalg.cholesky(scatter + ridge * scatter.diagonal().mean() * torch.eye(len(scatter)).to(scatter))


def _whitened(moments: SecondMoments, factor_x: Tensor, factor_y: Tensor) -> Tensor:
    """``Lx⁻¹ Sxy Ly⁻ᵀ``: its singular values are the canonical correlations."""
    half = torch.linalg.solve_triangular(factor_x, moments.sxy, upper=False)
    return torch.linalg.solve_triangular(factor_y, half.T, upper=False).T


def _leading(scatter: Tensor, variance: float) -> tuple[Tensor, Tensor]:
    """The leading eigenvalues that sum to this share of all, and their vectors; rounding is no component."""
    values, vectors = (part.flip(-1) for part in torch.linalg.eigh(scatter))
    values = values[values > len(values) * _EPS * values[0]]
    shares = values.cumsum(0)
    kept = int((shares < variance * shares[-1]).sum()) + 1
    return values[:kept], vectors[:, :kept]
