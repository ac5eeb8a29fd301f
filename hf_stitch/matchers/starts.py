"""Baselines without a fit, and initial values of training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_stitch.matchers._affine import affine_stitch, recorded, require
from hf_stitch.matchers.base import ClosedFormMatcher
from hf_stitch.matchers.regression import Penalty, Ridge
from hf_stitch.options import Count, Natural
from hf_stitch.papers import CSISZARIK_2021, Paper
from hf_stitch.statistics import Moments
from hf_stitch.statistics.spectrum import EPS, rounding
from hf_stitch.stitches import IdentityStitch, LinearStitch, LowRankStitch
from hf_stitch.stitches.linear import LowRankResidualStitch
from hf_stitch.stitches.sequence import AttentionStitch


@dataclass(frozen=True)
class Identity(ClosedFormMatcher):
    """Identity map; for unequal widths, features are cut or padded with zeros.

    Example:
        >>> x = torch.randn(20, 3)
        >>> Identity().fit(Moments(3, 3).update(x, x)).fitted
        {'n': 20, 'r2': 1.0}
    """

    name: ClassVar[str] = "identity"
    title: ClassVar[str] = "identity"

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> IdentityStitch:
        """Create the identity map and compute its R²."""
        require(moments, 2)
        return recorded(IdentityStitch(moments.dx, moments.dy), moments)


@dataclass(frozen=True)
class Random(ClosedFormMatcher):
    """Random map: weights sampled uniformly as in ``torch.nn.Linear``; the bias maps the mean of x to the mean of y.

    It serves as an initial value for training, although training may not converge well from it (Csiszárik et al. 2021,
    section 8), and as a baseline for the target's back half on random input.

    ``fitted`` contains ``n`` and ``r2``.

    Attributes:
        seed: Seed of the weights, at least 0.
        rank: Width of a bottleneck, at least 1, or None for a full matrix.

    Example:
        >>> x = torch.randn(50, 3)
        >>> Random(rank=2).fit(Moments(3, 3).update(x, x))
        LowRankStitch(in_features=3, out_features=3, rank=2, bias=True, dtype='float32')
    """

    name: ClassVar[str] = "random"
    title: ClassVar[str] = "random initialisation"
    invariances: ClassVar[tuple[str, ...]] = ("translation",)
    papers: ClassVar[tuple[Paper, ...]] = (CSISZARIK_2021,)

    seed: Natural = 0
    rank: Count | None = None

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LinearStitch | LowRankStitch:
        """Compute the map."""
        require(moments, 2)
        generator = torch.Generator().manual_seed(self.seed)

        def uniform_weights(rows: int, columns: int) -> torch.Tensor:
            uniform = torch.rand(rows, columns, generator=generator, dtype=torch.float64)
            return ((2 * uniform - 1) / math.sqrt(columns)).to(moments.device)

        if self.rank is None:
            weights = {"weight": uniform_weights(moments.dy, moments.dx)}
            return recorded(affine_stitch(LinearStitch, moments, weights, dtype), moments)
        weights = {"down": uniform_weights(self.rank, moments.dx), "up": uniform_weights(moments.dy, self.rank)}
        return recorded(affine_stitch(LowRankStitch, moments, weights, dtype, rank=self.rank), moments)


@dataclass(frozen=True)
class LowRankResidual(ClosedFormMatcher):
    """Ridge regression with frozen weights, and a low-rank correction that is initially 0.

    Initial value for :class:`hf_stitch.training.TaskLoss`, which then trains ``rank × (dx + dy)`` numbers instead of
    ``dx × dy``. The correction uses the leading principal directions of x, scaled to unit variance, without centring.

    ``fitted`` contains the results of :class:`~hf_stitch.matchers.regression.Ridge`.

    Attributes:
        rank: Rank of the correction, from 1 to the smaller width.
        ridge: Penalty of the ridge regression, as for :class:`~hf_stitch.matchers.regression.Ridge`.

    Example:
        >>> x = torch.randn(50, 4)
        >>> LowRankResidual(rank=2).fit(Moments(4, 3).update(x, x[:, :3]))
        LowRankResidualStitch(in_features=4, out_features=3, rank=2, dtype='float32')
    """

    name: ClassVar[str] = "low_rank_residual"
    title: ClassVar[str] = "ridge regression with a correction of low rank to be trained"
    invariances: ClassVar[tuple[str, ...]] = ("orthogonal", "permutation", "translation")
    counts_rows: ClassVar[bool] = True

    rank: Count = 8
    ridge: Penalty = "gcv"

    @torch.no_grad()
    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LowRankResidualStitch:
        """Compute the map."""
        require(moments, 2)
        ridge_stitch = Ridge(self.ridge).fit(moments, dtype)
        with torch.random.fork_rng():  # the random weights are replaced
            stitch = LowRankResidualStitch(moments.dx, moments.dy, self.rank, dtype)
        stitch.to(moments.device)
        values, vectors = (eigen[..., -self.rank :] for eigen in torch.linalg.eigh(moments.sxx / moments.n))
        # Directions of rounding errors stay small.
        smallest = torch.clamp(
            (vectors.square() * rounding(moments, "x")[:, None]).sum(0) / moments.n, min=float(EPS * values[-1])
        )
        stitch.down.copy_((vectors / torch.maximum(values, smallest).sqrt()).T)
        stitch.weight.copy_(ridge_stitch.weight)
        if ridge_stitch.bias is not None:
            stitch.bias.copy_(ridge_stitch.bias)
        stitch.fitted = ridge_stitch.fitted
        return stitch


@dataclass(frozen=True)
class Attention(ClosedFormMatcher):
    """Ridge regression with a parallel attention block over the positions, with an output that is initially 0.

    Initial value for :class:`hf_stitch.training.TaskLoss`, which trains both. Compare the result with the trained
    affine map, and with the same stitch after an untrained source (:func:`hf_stitch.adapters.untrained`), because such
    a stitch can take over work of the source.

    ``fitted`` contains the results of :class:`~hf_stitch.matchers.regression.Ridge`.

    Attributes:
        heads: Number of heads, which divides ``width``.
        width: Width of queries, keys and values together.
        causal: Whether positions attend only to themselves and earlier positions, as language models require.
        ridge: Penalty of the ridge regression, as for :class:`~hf_stitch.matchers.regression.Ridge`.
        seed: Seed of the queries, keys and values.

    Example:
        >>> x = torch.randn(50, 4)
        >>> Attention(heads=1, width=4).fit(Moments(4, 3).update(x, x[:, :3])).fitted["n"]
        50
    """

    name: ClassVar[str] = "attention"
    title: ClassVar[str] = "ridge regression with a parallel attention block"
    invariances: ClassVar[tuple[str, ...]] = ("orthogonal", "permutation", "translation")
    counts_rows: ClassVar[bool] = True

    heads: Count = 4
    width: Count = 64
    causal: bool = False
    ridge: Penalty = "gcv"
    seed: Natural = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise ValueError(f"heads must divide width, got {self.heads} and {self.width}")

    @torch.no_grad()
    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> AttentionStitch:
        """Compute the map."""
        require(moments, 2)
        ridge_stitch = Ridge(self.ridge).fit(moments, dtype)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            stitch = AttentionStitch(moments.dx, moments.dy, self.heads, self.width, self.causal, dtype)
        # The input of queries and keys has about unit variance for vectors of any length, without centring.
        stitch.read.div_((moments.sxx.trace() / (moments.n * moments.dx)).sqrt().to(dtype).cpu())
        stitch.to(moments.device)
        stitch.weight.copy_(ridge_stitch.weight)
        if ridge_stitch.bias is not None:
            stitch.bias.copy_(ridge_stitch.bias)
        stitch.fitted = ridge_stitch.fitted
        return stitch
