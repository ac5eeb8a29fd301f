"""Regressions of the rows of y on the rows of x."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hf_stitch.matchers._affine import Rcond, affine_stitch, recorded, require
from hf_stitch.matchers.base import ClosedFormMatcher
from hf_stitch.options import Count, NonNegative, Positive
from hf_stitch.papers import CSISZARIK_2021, Paper
from hf_stitch.statistics import Moments
from hf_stitch.statistics.spectrum import EPS, Spectrum
from hf_stitch.stitches import LinearStitch, LowRankStitch

Penalty = NonNegative | Literal["gcv"]
"""Ridge penalty, or the method that chooses it."""
_SWEEPS = 10_000  # largest number of passes of the lasso over the features


@dataclass(frozen=True)
class Lstsq(ClosedFormMatcher):
    """Least squares: the affine map with minimum squared error, ``M_LS = A⁺B`` (Csiszárik et al. 2021, §4.2, eq. 2).

    If x is rank-deficient, the weights have minimum norm (about the mean; the intercept is free).

    ``fitted`` contains ``n``, ``r2``, the ``rcond`` used and ``x_rank``, the number of directions of x above it.

    Attributes:
        intercept: Whether to fit a bias. If false, rows are not centred.
        rcond: Threshold in [0, 1). Directions of x with a singular value below ``rcond`` times the largest are dropped.
            Singular values are computed from centred x (uncentred without an intercept). None drops directions that are
            rounding errors in the dtype of x, for example the direction that a LayerNorm removes. In half precision it
            also drops directions near rounding, as long as they explain at most .0005 of the variance of y together.

    Example:
        >>> x = torch.randn(50, 3, dtype=torch.float64)
        >>> stitch = Lstsq().fit(Moments(3, 2).update(x, x[:, :2] + 1))
        >>> round(stitch.fitted["r2"], 6), stitch.fitted["x_rank"], stitch.bias.detach()
        (1.0, 3, tensor([1., 1.]))
    """

    name: ClassVar[str] = "lstsq"
    title: ClassVar[str] = "least squares"
    invariances: ClassVar[tuple[str, ...]] = ("orthogonal", "scaling", "invertible", "permutation")
    papers: ClassVar[tuple[Paper, ...]] = (CSISZARIK_2021,)

    intercept: bool = True
    rcond: Rcond = None

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LinearStitch:
        """Compute the map."""
        require(moments, max(moments.dx + self.intercept, 2), "pass more rows, or use the matcher 'ridge'")
        fit_moments = moments if self.intercept else moments.about_origin()
        spectrum = Spectrum.of(fit_moments, "x", self.rcond, fit_moments.sxy)
        weights = {"weight": spectrum.solve(fit_moments.sxy).T}
        stitch = affine_stitch(LinearStitch, moments, weights, dtype, intercept=self.intercept)
        return recorded(stitch, moments, rcond=spectrum.rcond, x_rank=spectrum.rank)


@dataclass(frozen=True)
class Ridge(ClosedFormMatcher):
    """Affine map that minimises ``‖XW + b - Y‖² + ridge · ‖W‖²``; the intercept b is not penalised.

    The error is a sum over rows, not a mean, as in scikit-learn's ``Ridge(alpha=ridge)``. Works with fewer rows than
    features. Directions of x that are rounding errors do not count, as for :class:`Lstsq`.

    ``fitted`` contains ``n``, ``r2``, the ``ridge`` used and ``df``, the effective degrees of freedom per output.

    Attributes:
        ridge: Penalty >= 0 (0 is least squares, of minimum norm if the rows do not determine the map), or ``"gcv"``:
            the penalty with the lowest generalised cross-validation error (Golub, Heath and Wahba 1979, eq. 1.4), one
            for all outputs, from a grid with ten values per decade between ``dx · eps`` and 1000 times the largest
            eigenvalue of ``sxx``. GCV assumes independent rows. For positions of the same image or tokens of the same
            text, which are not independent, the selected penalty is too small.

    Example:
        >>> x = torch.randn(50, 3, dtype=torch.float64)
        >>> Ridge(ridge=1e3).fit(Moments(3, 3).update(x, x)).fitted["df"] < 2
        True
    """

    name: ClassVar[str] = "ridge"
    title: ClassVar[str] = "ridge regression"
    invariances: ClassVar[tuple[str, ...]] = ("orthogonal", "permutation", "translation")
    counts_rows: ClassVar[bool] = True

    ridge: Penalty = "gcv"

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LinearStitch:
        """Compute the map."""
        require(moments, 2)
        weight, results = penalised(moments, self.ridge)
        return recorded(affine_stitch(LinearStitch, moments, {"weight": weight}, dtype), moments, **results)


def penalised(moments: Moments, ridge: float | Literal["gcv"]) -> tuple[Tensor, dict[str, float]]:
    """Solve ridge regression."""
    given_penalty = None if ridge == "gcv" else float(ridge)
    spectrum = Spectrum.of(moments, "x", sxy=moments.sxy)
    penalty = _least_gcv(moments, spectrum) if given_penalty is None else given_penalty
    df = 1 + (spectrum.values / (spectrum.values + penalty)).sum().item()
    return spectrum.solve(moments.sxy, penalty).T, {"ridge": penalty, "df": df}


def _least_gcv(moments: Moments, spectrum: Spectrum) -> float:
    """Return the penalty that minimises ``(RSS / n) / (1 - df / n)²``, from the moments.

    With u_i the left singular vectors of centred X, a penalty leaves the share ``s_i = ridge / (value_i + ridge)`` of
    ``u_iᵀY`` unexplained, hence ``RSS = RSS(0) + Σ s_i² ‖u_iᵀY‖²`` and ``n - df = n - 1 - rank + Σ s_i``.
    """
    explained = (spectrum.vectors.T @ moments.sxy).square().sum(1) / spectrum.values
    # Both differences are non-negative up to rounding. If X spans all rows, the residual of least squares is 0.
    spare = max(moments.n - 1 - spectrum.rank, 0)
    residual = max((moments.syy.trace() - explained.sum()).item(), 0.0) if spare else 0.0
    low, high = math.log10(moments.dx * EPS), 3.0
    grid = torch.logspace(low, high, round(10 * (high - low)) + 1, dtype=torch.float64, device=moments.device)
    grid = (grid * spectrum.values[-1])[:, None]
    unexplained = grid / (spectrum.values + grid)
    score = (residual + (unexplained.square() * explained).sum(1)) / (spare + unexplained.sum(1)).square()
    return grid[score.argmin()].item()


@dataclass(frozen=True)
class RidgeToIdentity(ClosedFormMatcher):
    """Affine map that minimises ``‖XW + b - Y‖² + ridge · ‖W - I‖²``; the intercept b is not penalised.

    It is the identity plus a ridge regression of ``Y - X``. Few rows suffice for two similar representations of equal
    width, for example of a network and its fine-tuned copy: undetermined directions stay unchanged, whereas
    :class:`Ridge` removes them.

    ``fitted`` contains ``n``, ``r2``, the ``ridge`` used and ``df``, the effective degrees of freedom per output.

    Attributes:
        ridge: Penalty >= 0, or ``"gcv"`` for the lowest generalised cross-validation error, as for :class:`Ridge`.

    Example:
        >>> x = torch.randn(5, 8, dtype=torch.float64)
        >>> stitch = RidgeToIdentity().fit(Moments(8, 8).update(x, x + 1), dtype=torch.float64)
        >>> torch.allclose(stitch(torch.ones(8).double()), torch.full((8,), 2.0).double())
        True
    """

    name: ClassVar[str] = "ridge_to_identity"
    title: ClassVar[str] = "ridge regression towards the identity"
    invariances: ClassVar[tuple[str, ...]] = ("translation",)
    counts_rows: ClassVar[bool] = True
    unequal_widths: ClassVar[bool] = False

    ridge: Penalty = "gcv"

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LinearStitch:
        """Compute the map."""
        if moments.dx != moments.dy:
            raise ValueError(f"ridge_to_identity requires equal widths, got {moments.dx} -> {moments.dy}; use 'ridge'")
        require(moments, 2)
        change = Moments.of(
            moments.n,
            moments.mean_x,
            moments.mean_y - moments.mean_x,
            moments.sxx,
            moments.sxx + moments.syy - moments.sxy - moments.sxy.T,
            moments.sxy - moments.sxx,
            moments.eps,
        )
        weight, results = penalised(change, self.ridge)
        weight = weight + torch.eye(moments.dx, dtype=weight.dtype, device=weight.device)
        return recorded(affine_stitch(LinearStitch, moments, {"weight": weight}, dtype), moments, **results)


@dataclass(frozen=True)
class LowRank(ClosedFormMatcher):
    """Reduced-rank regression: the affine map with minimum squared error among maps of limited rank (Izenman 1975).

    The map is ``M_LS V_k V_kᵀ``, where V_k are the leading right singular vectors of the fitted values ``A M_LS``, not
    of the map (Csiszárik et al. 2021, §4.2); A and B are centred.

    ``fitted`` contains ``n``, ``r2``, the ``rcond`` used and ``x_rank``, the number of directions of x above it.

    Attributes:
        rank: Rank of the map, from 1 to the smaller width, and at most the numerical rank of x.
        rcond: As in ``Lstsq``.

    Example:
        >>> x = torch.randn(50, 4)
        >>> LowRank(rank=2).fit(Moments(4, 3).update(x, x[:, :3]))
        LowRankStitch(in_features=4, out_features=3, rank=2, bias=True, dtype='float32')
    """

    name: ClassVar[str] = "low_rank"
    title: ClassVar[str] = "reduced-rank least squares"
    invariances: ClassVar[tuple[str, ...]] = ("orthogonal", "scaling", "permutation", "translation")
    papers: ClassVar[tuple[Paper, ...]] = (CSISZARIK_2021,)

    rank: Count
    rcond: Rcond = None

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LowRankStitch:
        """Compute the map."""
        require(moments, moments.dx + 1)
        spectrum = Spectrum.of(moments, "x", self.rcond, moments.sxy)
        max_rank = min(spectrum.rank, moments.dy)
        if self.rank > max_rank:
            raise ValueError(
                f"rank must be <= {max_rank}, got {self.rank}: x has {moments.dx} features of numerical rank "
                f"{spectrum.rank} (at rcond {spectrum.rcond:.1e}), y has {moments.dy} features"
            )
        # A M_LS = U · fitted_values, with U the orthonormal left singular vectors of A: same right singular vectors.
        fitted_values = (spectrum.vectors.T @ moments.sxy) / spectrum.values.sqrt()[:, None]
        right = torch.linalg.svd(fitted_values, full_matrices=False).Vh[: self.rank]
        weights = {"down": right @ spectrum.solve(moments.sxy).T, "up": right.T}
        stitch = affine_stitch(LowRankStitch, moments, weights, dtype, rank=self.rank)
        return recorded(stitch, moments, rcond=spectrum.rcond, x_rank=spectrum.rank)


@dataclass(frozen=True)
class Lasso(ClosedFormMatcher):
    """Lasso: the affine map that minimises ``‖XW + b - Y‖² / (2n) + alpha · Σ|W|``; the intercept b is not penalised.

    Equivalent to scikit-learn's ``Lasso(alpha)`` for each output. Many weights are exactly 0; the rest show which
    features of the source each feature of the target requires (Li et al. 2016). Equation 3 of Csiszárik et al. (2021)
    uses the norm without the square, so its α has a different scale.

    The solver is coordinate descent on the moments, for all outputs at once, until the total duality gap is below
    ``tolerance`` times ``‖Y‖² / (2n)``.

    ``fitted`` contains ``n``, ``r2``, ``zeros`` (the share of weights that are 0) and ``sweeps``.

    Attributes:
        alpha: Penalty, greater than 0, in units of the target times units of the source.
        tolerance: Relative duality gap, greater than 0.

    Example:
        >>> x = torch.randn(200, 4, dtype=torch.float64)
        >>> Lasso(alpha=0.2).fit(Moments(4, 2).update(x, x[:, :2])).fitted["zeros"]
        0.75
    """

    name: ClassVar[str] = "lasso"
    title: ClassVar[str] = "sparse least squares (lasso)"
    invariances: ClassVar[tuple[str, ...]] = ("permutation", "translation")
    papers: ClassVar[tuple[Paper, ...]] = (CSISZARIK_2021,)

    alpha: Positive
    tolerance: Positive = 1e-12

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LinearStitch:
        """Compute the map."""
        require(moments, 2)
        weight, sweeps = self._descend(moments.sxx / moments.n, moments.sxy / moments.n, moments.syy / moments.n)
        stitch = affine_stitch(LinearStitch, moments, {"weight": weight.T}, dtype)
        return recorded(stitch, moments, zeros=(stitch.weight == 0).double().mean().item(), sweeps=sweeps)

    def _descend(self, sxx: Tensor, sxy: Tensor, syy: Tensor) -> tuple[Tensor, int]:
        """Return the weights ``(dx, dy)``, and the number of sweeps over the features."""
        weight = torch.zeros_like(sxy)
        gradient = sxy.clone()  # negative gradient of the squared error: sxy - sxx · weight
        varying = [j for j, variance in enumerate(sxx.diagonal().tolist()) if variance > 0]
        max_gap = self.tolerance * syy.trace() / 2
        for sweep in range(1, _SWEEPS + 1):
            for j in varying:
                target = gradient[j] + sxx[j, j] * weight[j]
                new_weights = target.sign() * (target.abs() - self.alpha).clamp(min=0) / sxx[j, j]
                gradient -= torch.outer(sxx[:, j], new_weights - weight[j])
                weight[j] = new_weights
            if self._gap(weight, gradient, sxx, sxy, syy) <= max_gap:
                return weight, sweep
        raise ArithmeticError(
            f"the lasso did not reach a duality gap of {self.tolerance:g} in {_SWEEPS} sweeps, because the features of "
            "the source are strongly correlated; increase alpha or tolerance"
        )

    def _gap(self, weight: Tensor, gradient: Tensor, sxx: Tensor, sxy: Tensor, syy: Tensor) -> Tensor:
        """Compute the duality gap, summed over the outputs (Kim et al. 2007, section III.B)."""
        squares = syy.diagonal() - 2 * (weight * sxy).sum(0) + (weight * (sxx @ weight)).sum(0)
        scale = (self.alpha / gradient.abs().amax(0).clamp(min=1e-300)).clamp(max=1)
        dual = scale * (syy.diagonal() - (weight * sxy).sum(0)) - scale.square() * squares / 2
        return (squares / 2 + self.alpha * weight.abs().sum(0) - dual).sum()
