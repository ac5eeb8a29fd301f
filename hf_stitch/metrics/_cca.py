"""Canonical correlation analysis: CCA, SVCCA and PWCCA."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

from hf_stitch.metrics._catalogue import built_in
from hf_stitch.metrics._rows import RowMoments, check_count, check_variation, nuclear, of_own_rows, once
from hf_stitch.metrics.base import MomentsMetric, Operand
from hf_stitch.options import NonNegative, Within, checked
from hf_stitch.papers import DING_2021, KORNBLITH_2019, MORCOS_2018, RAGHU_2017
from hf_stitch.statistics.spectrum import EPS, NOTHING_VARIES, SecondMoments, Side, Spectrum, above_rounding, rounding

_EQUAL = EPS**0.5
"""Difference of two canonical correlations that may be rounding."""


@of_own_rows
def cca(x: Tensor, y: Tensor, *, squared: bool = False, ridge: NonNegative = 0.0) -> Tensor:
    """Mean canonical correlation over all canonical directions, in [0, 1] (Hotelling 1936).

    The number of directions is the smaller of the ranks of x and y, without linearly dependent features and directions
    that are rounding errors in the dtype of the rows.

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        squared: Whether to average the squared correlations (``R²_CCA`` of Kornblith et al. 2019).
        ridge: Regularisation added to the covariance of each side, as a multiple of its mean variance. A ridge allows
            few rows, but the value is invariant only to orthogonal maps and scaling, not to all invertible maps.

    Example:
        >>> import torch
        >>> x = torch.randn(50, 4)
        >>> round(cca(x, x @ torch.randn(4, 4)).item(), 6)
        1.0
    """
    return _cca(RowMoments(x, y), squared=squared, ridge=ridge)


def _cca(moments: SecondMoments, *, squared: bool, ridge: float) -> Tensor:
    check_variation("cca", moments)
    cross = _whitened(moments, *_whitenings("cca", moments, "; set ridge, or use svcca", ridge))
    return (cross.square().sum() if squared else nuclear(cross, moments)) / min(cross.shape)


@built_in("cca")
class CCA(MomentsMetric):
    """Streaming ``cca``."""

    papers = (RAGHU_2017, KORNBLITH_2019)
    function = staticmethod(cca)
    formula = staticmethod(_cca)
    _by_axes = _of_own_rows = True
    differentiable = True

    def __init__(self, **options: bool | float) -> None:
        super().__init__(**options)
        if self.options["ridge"]:
            self.invariances = ("orthogonal", "scaling", "permutation", "translation")

    @checked
    def min_rows(self, side: Operand, width: int) -> int:
        """Return width + 2 without ridge, which suffices for any rank; 2 with ridge."""
        return 2 if self.options["ridge"] else least_for_full_rank(width)


@of_own_rows
def pwcca(x: Tensor, y: Tensor, *, directions: Literal["paired", "all"] = "paired") -> Tensor:
    """Projection-weighted CCA: canonical correlations, weighted by the share of x that each direction explains.

    The weight of direction i is ``Σⱼ |⟨hᵢ, xⱼ⟩|`` over the features xⱼ of x, where hᵢ is its canonical variate (Morcos
    et al. 2018). The value is in [0, 1]. The metric is asymmetric, and rotating x changes its value.

    ``directions`` determines which directions of x have a weight. ``"paired"``: directions with a partner in y, as in
    the paper. ``"all"``: all directions, as in the code of Ding et al. (2021) and of Balogh and Jelasity (2025);
    directions without a partner have the correlation 0, so the value falls with the part of x that y lacks. Directions
    that are rounding errors in the dtype of the rows do not count on either side.

    CCA does not determine a basis of directions with equal correlation (without a partner, or perfectly correlated),
    but the weights depend on it. This implementation uses the principal axes of the part of x that these directions
    explain. The code of the papers uses the basis that the SVD returns, so values may differ.

    Args:
        x: Activations of shape ``(n, dx)``, floating point. The weights are computed from this side. Row i of ``x`` and
            of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        directions: Directions of x with a weight, ``"paired"`` or ``"all"``.

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
    check_variation("pwcca", moments)
    map_x, map_y = _whitenings("pwcca", moments, "; use svcca")
    left, correlations, _ = torch.linalg.svd(_whitened(moments, map_x, map_y), full_matrices=directions == "all")
    correlations = torch.cat([correlations, correlations.new_zeros(left.shape[1] - len(correlations))])
    weights = _principal_basis(left.T @ map_x.whiten(moments.sxx), correlations).abs().sum(1)
    return correlations @ weights / weights.sum()


@built_in("pwcca")
class PWCCA(MomentsMetric):
    """Streaming ``pwcca``."""

    papers = (MORCOS_2018, DING_2021)
    function = staticmethod(pwcca)
    formula = staticmethod(_pwcca)
    _by_axes = _of_own_rows = True
    symmetric = False

    @checked
    def min_rows(self, side: Operand, width: int) -> int:
        """Return width + 2, which suffices for any rank; for y with all directions the number for rank one."""
        return least_for_full_rank(1 if side == "y" and self.options["directions"] == "all" else width)


@of_own_rows
def svcca(x: Tensor, y: Tensor, *, variance: Annotated[float, Within(0, 1, above=True)] = 0.99) -> Tensor:
    """Mean canonical correlation of the leading principal components, in [0, 1] (Raghu et al. 2017).

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        variance: Share of the variance of each side to keep, in (0, 1]. The fewest leading components that reach this
            share are used.

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
        once(moments, "x", lambda: _leading(moments, "x", variance)),
        once(moments, "y", lambda: _leading(moments, "y", variance)),
    )
    for side, components in (("x", len(values_x)), ("y", len(values_y))):
        reason = f": {components} components of {side} explain {variance:g} of its variance; lower variance"
        check_count("svcca", moments.n, components + 2, reason)
    cross = (left.T @ moments.sxy @ right) / torch.outer(values_x.sqrt(), values_y.sqrt())
    return nuclear(cross, moments) / min(cross.shape)


@built_in("svcca")
class SVCCA(MomentsMetric):
    """Streaming ``svcca``."""

    papers = (RAGHU_2017,)
    function = staticmethod(svcca)
    formula = staticmethod(_svcca)
    _by_axes = _of_own_rows = True

    @checked
    def min_rows(self, side: Operand, width: int) -> int:
        """Return the number for one component; the number of components depends on the data."""
        return least_for_full_rank(1)


def least_for_full_rank(rank: int) -> int:
    """Return the smallest number of rows for informative canonical correlations of a side of this rank."""
    return rank + 2


def independent(name: str, moments: SecondMoments, side: Side, remedy: str) -> Tensor | None:
    """Return ``(d, rank)`` a basis of the directions of a side that vary by more than rounding; None if all do.

    The rank is the rank of the correlation matrix, so it does not depend on the scales of the features. The basis does
    not have a gradient: canonical correlations depend only on its span.
    """
    scatter, mean = (moments.sxx, moments.mean_x) if side == "x" else (moments.syy, moments.mean_y)
    scatter = scatter.detach()
    varies = scatter.diagonal() > moments.n * (8 * EPS * mean.detach()) ** 2
    scale = torch.where(varies, scatter.diagonal().rsqrt(), 0)
    values, vectors = torch.linalg.eigh(scatter * torch.outer(scale, scale))
    significant = above_rounding(values, vectors, rounding(moments, side) * scale.square())
    rank = int(significant.sum())
    if not rank:
        raise ValueError(NOTHING_VARIES.format(f"{name}: {side}"))
    reason = f", as {side} has rank {rank}: with n <= rank + 1 every canonical correlation is 1{remedy}"
    check_count(name, moments.n, least_for_full_rank(rank), reason)
    return None if rank == len(significant) else scale[:, None] * vectors[:, significant]


class _Whitening(NamedTuple):
    """Map to uncorrelated features of equal variance."""

    root: Tensor  # (rank, rank) lower triangular; times its transpose it is the scatter of the basis
    basis: Tensor | None  # (d, rank); None for the features themselves

    def whiten(self, products: Tensor) -> Tensor:
        """Return ``(rank, k)`` the products of the new features from the products of the old ones, ``(d, k)``."""
        projected = products if self.basis is None else self.basis.T @ products
        return torch.linalg.solve_triangular(self.root, projected, upper=False)


def _whitenings(name: str, moments: SecondMoments, remedy: str, ridge: float = 0.0) -> list[_Whitening]:
    """Return the maps of both sides."""

    def whitening_of(side: Side) -> _Whitening:
        scatter = moments.sxx if side == "x" else moments.syy
        basis = None if ridge else independent(name, moments, side, remedy)
        basis_scatter = scatter if basis is None else basis.T @ scatter @ basis
        # Unlike eigenvectors, a Cholesky factor has a finite gradient where eigenvalues coincide.
        ridge_matrix = ridge * scatter.diagonal().mean() * torch.eye(len(basis_scatter)).to(scatter)
        return _Whitening(torch.linalg.cholesky(basis_scatter + ridge_matrix), basis)

    return [once(moments, "x", partial(whitening_of, "x")), once(moments, "y", partial(whitening_of, "y"))]


def _whitened(moments: SecondMoments, whitening_x: _Whitening, whitening_y: _Whitening) -> Tensor:
    """Return the co-moments of the whitened sides; their singular values are the canonical correlations."""
    return whitening_y.whiten(whitening_x.whiten(moments.sxy).T).T


def _principal_basis(projections: Tensor, correlations: Tensor) -> Tensor:
    """Choose the principal axes as the basis of directions with equal correlations."""
    starts = torch.cat([correlations.new_ones(1, dtype=torch.bool), -correlations.diff() > _EQUAL])
    sizes = starts.nonzero()[:, 0].diff(append=torch.tensor([len(projections)], device=projections.device)).tolist()
    return torch.cat([group if len(group) == 1 else _axes(group) for group in projections.split(sizes)])


def _axes(projections: Tensor) -> Tensor:
    _, lengths, axes = torch.linalg.svd(projections, full_matrices=False)
    return lengths[:, None] * axes


def _leading(moments: SecondMoments, side: Side, variance: float) -> tuple[Tensor, Tensor]:
    """Return the fewest leading eigenvalues that reach a share of the sum of all above rounding, and their vectors."""
    spectrum = Spectrum.of(moments, side)
    values, vectors = spectrum.values.flip(0), spectrum.vectors.flip(1)
    shares = values.cumsum(0)
    count = int((shares < variance * shares[-1]).sum()) + 1
    return values[:count], vectors[:, :count]
