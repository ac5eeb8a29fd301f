"""Reduced-rank regression matcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_stitch.matchers._affine import affine_stitch, recorded
from hf_stitch.matchers._solve import Rcond, require
from hf_stitch.matchers.base import ClosedFormMatcher
from hf_stitch.options import Count
from hf_stitch.papers import CSISZARIK_2021, Paper
from hf_stitch.statistics import Moments
from hf_stitch.statistics.spectrum import Spectrum
from hf_stitch.stitches import LowRankStitch


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
        >>> import torch
        >>> x = torch.randn(50, 4)
        >>> LowRank(rank=2).fit(Moments(4, 3).update(x, x[:, :3]))
        LowRankStitch(in_features=4, out_features=3, rank=2, bias=True, dtype='float32')
    """

    name: ClassVar[str] = "low_rank"
    title: ClassVar[str] = "reduced-rank least squares"
    papers: ClassVar[tuple[Paper, ...]] = (CSISZARIK_2021,)

    rank: Count
    rcond: Rcond = None

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LowRankStitch:
        """Compute the map."""
        require(moments, moments.dx + 1, "give more rows")
        spectrum = Spectrum.of(moments, "x", self.rcond, moments.sxy)
        most = min(spectrum.rank, moments.dy)
        if self.rank > most:
            raise ValueError(
                f"rank must be <= {most}, got {self.rank}: x has {moments.dx} features of numerical rank "
                f"{spectrum.rank} (at rcond {spectrum.rcond:.1e}), y has {moments.dy} features"
            )
        # A M_LS = U · fitted_values, with U the orthonormal left singular vectors of A: same right singular vectors.
        fitted_values = (spectrum.vectors.T @ moments.sxy) / spectrum.values.sqrt()[:, None]
        right = torch.linalg.svd(fitted_values, full_matrices=False).Vh[: self.rank]
        weights = {"down": right @ spectrum.solve(moments.sxy).T, "up": right.T}
        stitch = affine_stitch(LowRankStitch, moments, weights, dtype, rank=self.rank)
        return recorded(stitch, moments, rcond=spectrum.rcond, x_rank=spectrum.rank)
