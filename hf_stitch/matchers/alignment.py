"""Maps that preserve lengths, features, the covariance of the target, or similarities to anchors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from hf_stitch.matchers._affine import Rcond, affine_stitch, recorded, require
from hf_stitch.matchers.base import ClosedFormMatcher
from hf_stitch.papers import DING_2021, LI_2015, MAIORCA_2024, MOSCHELLA_2023, Paper
from hf_stitch.statistics import Moments
from hf_stitch.statistics.spectrum import EPS, Spectrum, rounding
from hf_stitch.stitches import LinearStitch

Compare = Literal["correlation", "distance"]
RCOND = 0.1
"""Default threshold, well above the bfloat16 rounding errors that a norm leaves in a removed direction."""


@dataclass(frozen=True)
class Procrustes(ClosedFormMatcher):
    """(Semi-)orthogonal map ``Q = UVᵀ`` from ``XᵀY = USVᵀ`` (Schönemann 1966; Csiszárik et al. 2021, §4.2).

    The optimality criterion depends on the widths:

    - Equal: Q is orthogonal (reflections included) and minimises ``‖XQ - Y‖``.
    - x narrower: Q embeds x isometrically (``QQᵀ = I``) and minimises ``‖XQ - Y‖``.
    - x wider: Q projects x (``QᵀQ = I``) and maximises the inner product ``⟨XQ, Y⟩``. The minimum of ``‖XQ - Y‖`` does
      not have a closed form in this case, because ``‖XQ‖`` depends on Q.

    If the rank of ``XᵀY`` is below the smaller width, the optimal Q is not unique.

    ``fitted`` contains ``n``, ``r2``, the ``scale`` used and ``xy_rank``, the numerical rank of ``XᵀY``.

    Attributes:
        center: Whether to centre both sides; the bias of the stitch then maps mean to mean. Otherwise the map is
            optimal for the uncentred rows, without a bias.
        scale: Whether to multiply Q by the factor that minimises ``‖scale · XQ - Y‖``. For equal widths or a narrower x
            this is the joint optimum over Q and scale. If false, the factor is 1.

    Example:
        >>> x = torch.randn(50, 2, dtype=torch.float64)
        >>> stitch = Procrustes().fit(Moments(2, 2).update(x, x.flip(1)))
        >>> stitch.weight.detach().round(decimals=4).abs()
        tensor([[0., 1.],
                [1., 0.]])
    """

    name: ClassVar[str] = "procrustes"
    title: ClassVar[str] = "orthogonal Procrustes"
    invariances: ClassVar[tuple[str, ...]] = ("orthogonal", "permutation")
    papers: ClassVar[tuple[Paper, ...]] = (DING_2021,)

    center: bool = True
    scale: bool = False

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LinearStitch:
        """Compute the map."""
        require(moments, 2)
        fit_moments = moments if self.center else moments.about_origin()
        left, values, right = torch.linalg.svd(fit_moments.sxy, full_matrices=False)
        rotation = (left @ right).T
        scale = 1.0
        if self.scale:
            scale = (values.sum() / ((rotation @ fit_moments.sxx) * rotation).sum()).item()
        stitch = affine_stitch(LinearStitch, moments, {"weight": scale * rotation}, dtype, intercept=self.center)
        varies = values > values[0] * max(moments.dx, moments.dy) * EPS
        errors = rounding(fit_moments, "x"), rounding(fit_moments, "y")
        for directions, scatter, error in zip((left, right.T), (fit_moments.sxx, fit_moments.syy), errors, strict=True):
            spread = ((scatter @ directions) * directions).sum(0)
            varies &= spread > (directions.square() * error[:, None]).sum(0)
        return recorded(stitch, moments, scale=scale, xy_rank=int(varies.sum()))


@dataclass(frozen=True)
class Recoloured(ClosedFormMatcher):
    """Affine map with minimum squared error among maps with outputs that have the covariance of the target.

    Least squares predicts a conditional mean, so its outputs vary less than the target's activations, and are out of
    distribution for this reason alone. This map whitens x, rotates it and applies the covariance of y: with
    ``Sxx^(-1/2) Sxy Syy^(1/2) = P Σ Rᵀ``, it is ``Syy^(1/2) R Pᵀ Sxx^(-1/2)``, which maximises the inner product of its
    outputs with y. If x has at least as many directions as y, the outputs have the covariance of y and the error is
    minimal. Otherwise the outputs have the rank of x: in the whitened space of y, their covariance is a projection.

    ``fitted`` contains ``n``, ``r2``, the ``rcond`` used, and ``x_rank`` and ``y_rank``, the numbers of directions
    above it.

    Attributes:
        rcond: Threshold in [0, 1). Directions of a side with a singular value below ``rcond`` times the largest are
            dropped. None drops directions as :class:`~hf_stitch.matchers.regression.Lstsq` does, on both sides.

    Example:
        >>> x = torch.randn(200, 3, dtype=torch.float64)
        >>> y = x[:, :2] + torch.randn(200, 2, dtype=torch.float64)
        >>> stitch = Recoloured().fit(Moments(3, 2).update(x, y), torch.float64)
        >>> torch.allclose(stitch(x).T.cov(), y.T.cov())
        True
    """

    name: ClassVar[str] = "recoloured"
    title: ClassVar[str] = "least squares with the covariance of the target"
    invariances: ClassVar[tuple[str, ...]] = ("orthogonal", "scaling", "permutation", "translation")

    rcond: Rcond = None

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LinearStitch:
        """Compute the map."""
        require(moments, max(moments.dx + 1, 2))
        x = Spectrum.of(moments, "x", self.rcond, moments.sxy)
        y = Spectrum.of(moments, "y", self.rcond, moments.sxy.T)
        whiten, colour = x.vectors / x.values.sqrt(), y.vectors * y.values.sqrt()
        left, _, right = torch.linalg.svd(whiten.T @ moments.sxy @ colour, full_matrices=False)
        weights = {"weight": colour @ (left @ right).T @ whiten.T}
        stitch = affine_stitch(LinearStitch, moments, weights, dtype)
        return recorded(stitch, moments, rcond=max(x.rcond, y.rcond), x_rank=x.rank, y_rank=y.rank)


@dataclass(frozen=True)
class Permutation(ClosedFormMatcher):
    """Permutation: each feature of y is predicted by one feature of x, shifted to the mean of y.

    The Hungarian method finds a one-to-one assignment. It maximises the sum of correlations (Li et al. 2016, section
    3.1), or minimises the distance ``Σ‖ŷⱼ - yⱼ‖²`` over all centred features of y, which maximises ``Σ xᵢᵀyⱼ`` if every
    feature of x is matched (Ainsworth et al. 2023, section 3.1). For unequal widths ``min(dx, dy)`` features are
    matched, and an unmatched feature of y is predicted by its mean.

    Constant features are never matched, so a constant feature of y is predicted by its mean.

    ``fitted`` contains ``n``, ``r2``, ``matched`` (number of matched features of y) and their mean ``correlation``.

    Attributes:
        compare: ``"correlation"`` or ``"distance"``.
        semi: Whether each feature of y is matched independently with the best feature of x (semi-matching, Li et al.).

    Example:
        >>> x = torch.randn(50, 3, dtype=torch.float64)
        >>> Permutation().fit(Moments(3, 3).update(x, x[:, [2, 0, 1]] + 5)).weight.detach()
        tensor([[0., 0., 1.],
                [1., 0., 0.],
                [0., 1., 0.]])
    """

    name: ClassVar[str] = "permutation"
    title: ClassVar[str] = "one-to-one or semi-matching of features"
    invariances: ClassVar[tuple[str, ...]] = ("permutation", "translation")
    papers: ClassVar[tuple[Paper, ...]] = (LI_2015,)

    compare: Compare = "correlation"
    semi: bool = False

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LinearStitch:
        """Compute the map."""
        require(moments, 2)
        sources = _varying(moments.sxx.diagonal(), moments.mean_x, moments.n)
        targets = _varying(moments.syy.diagonal(), moments.mean_y, moments.n)
        sxx, syy = moments.sxx.diagonal()[sources], moments.syy.diagonal()[targets]
        sxy = moments.sxy[sources][:, targets]
        correlations = sxy / torch.outer(sxx.sqrt(), syy.sqrt())
        # The scatter of y is constant in the distance, so it is omitted.
        rows, columns = self._matched(-correlations if self.compare == "correlation" else sxx[:, None] - 2 * sxy)
        weight = moments.sxy.new_zeros(moments.dy, moments.dx)
        weight[targets[columns], sources[rows]] = 1
        stitch = affine_stitch(LinearStitch, moments, {"weight": weight}, dtype)
        correlation = correlations[rows, columns].mean().item()
        return recorded(stitch, moments, matched=len(columns), correlation=correlation)

    def _matched(self, costs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of matched features of x, and of the features of y that they predict."""
        if self.semi:
            return costs.argmin(0), torch.arange(costs.shape[1], device=costs.device)
        rows, columns = linear_sum_assignment(costs.cpu().numpy())
        return torch.from_numpy(rows).to(costs.device), torch.from_numpy(columns).to(costs.device)


def _varying(scatter: Tensor, mean: Tensor, n: int) -> Tensor:
    """Return the indices of features that vary beyond the rounding of their mean."""
    return (scatter > n * (8 * EPS * mean) ** 2).nonzero().flatten()


@dataclass(frozen=True)
class InverseRelative(ClosedFormMatcher):
    """Inverse relative projection (Maiorca et al. 2024, arXiv 2406.15057): ``x ↦ x Aₓᵀ (A_yᵀ)⁺``.

    A source vector is mapped to its inner products with the source's anchors ``Aₓ``. The pseudo-inverse of the target's
    anchors ``A_y`` maps these inner products to a target vector. A head that was trained on the target's representation
    can thus be used with another encoder. The two sides are not fitted to each other; the method assumes only that both
    encoders arrange the anchors similarly.

    The moments must be computed from the anchors: every pair of rows is one anchor. Because
    ``(A_yᵀ)⁺ = A_y (A_yᵀ A_y)⁺``, the map is ``Sxy Syy⁺``, and only the cost of the moments grows with the number of
    anchors. (It is the transpose of the least-squares map from y to x.) The map is exact if y is a rotated, shifted and
    scaled copy of x and the anchors span y above ``rcond``; otherwise it reaches only the span of the anchors.

    Inner products preserve lengths, unlike the cosines of the paper. Anchors normalised to length 1, with
    ``center=False``, give the map of the paper for vectors of any length, up to the length of the result.

    ``fitted`` contains ``n``, ``r2`` (far below least squares, which optimises it), the ``rcond`` and ``scale`` used
    and ``y_rank``, the number of directions of y above the threshold.

    Attributes:
        center: Whether to centre both sides by the mean of the anchors; the bias of the stitch then maps mean to mean.
        scale: Whether to rescale the result to the target, by the ratio ``tr Syy / tr Sxx``. Without it, the result is
            wrong by the square of the ratio of both scales, which does not affect a head that normalises its input.
        rcond: Threshold in [0, 1). Directions of y with a singular value below ``rcond`` times the largest are dropped.
            None means 0.1. The map amplifies components of x in small directions by the inverse square of the singular
            value, although encoders agree least in these directions, and a direction removed by a LayerNorm contains
            only rounding errors. With 1e-7, as published, heads of trained networks fail for about as many anchors as
            features. Decrease it if a few features dominate.

    Example:
        >>> x = torch.randn(50, 2, dtype=torch.float64)
        >>> stitch = InverseRelative().fit(Moments(2, 2).update(x, 3 * x.flip(1) + 1))
        >>> stitch.weight.detach().round(decimals=4).abs(), round(stitch.fitted["r2"], 6)
        (tensor([[0., 3.],
                [3., 0.]]), 1.0)
    """

    name: ClassVar[str] = "inverse_relative"
    title: ClassVar[str] = "inverse relative projection"
    invariances: ClassVar[tuple[str, ...]] = ("orthogonal", "permutation")
    papers: ClassVar[tuple[Paper, ...]] = (MOSCHELLA_2023, MAIORCA_2024)

    center: bool = True
    scale: bool = True
    rcond: Rcond = None

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LinearStitch:
        """Compute the map."""
        require(moments, 2, "pass more anchors")
        fit_moments = moments if self.center else moments.about_origin()
        spectrum = Spectrum.of(fit_moments, "y", RCOND if self.rcond is None else self.rcond)
        scale = (fit_moments.syy.trace() / fit_moments.sxx.trace()).item() if self.scale else 1.0
        weights = {"weight": scale * spectrum.solve(fit_moments.sxy.T)}
        stitch = affine_stitch(LinearStitch, moments, weights, dtype, intercept=self.center)
        return recorded(stitch, moments, rcond=spectrum.rcond, scale=scale, y_rank=spectrum.rank)
