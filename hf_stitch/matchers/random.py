"""Random matcher: the baseline of a random map."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_stitch.matchers._affine import affine_stitch, recorded
from hf_stitch.matchers._solve import require
from hf_stitch.matchers.base import ClosedFormMatcher
from hf_stitch.options import Count, Natural
from hf_stitch.papers import CSISZARIK_2021, Paper
from hf_stitch.statistics import Moments
from hf_stitch.stitches import LinearStitch, LowRankStitch


@dataclass(frozen=True)
class Random(ClosedFormMatcher):
    """Random map: weights drawn uniformly as in ``torch.nn.Linear``; the bias maps the mean of x to the mean of y.

    It serves as an initial value for training, which may not converge well from it (Csiszárik et al. 2021, section 8),
    and as a baseline for the target's back half on random input.

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
    papers: ClassVar[tuple[Paper, ...]] = (CSISZARIK_2021,)

    seed: Natural = 0
    rank: Count | None = None

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LinearStitch | LowRankStitch:
        """Compute the map."""
        require(moments, 2)
        generator = torch.Generator().manual_seed(self.seed)

        def drawn(rows: int, columns: int) -> torch.Tensor:
            uniform = torch.rand(rows, columns, generator=generator, dtype=torch.float64)
            return ((2 * uniform - 1) / math.sqrt(columns)).to(moments.device)

        if self.rank is None:
            weights = {"weight": drawn(moments.dy, moments.dx)}
            return recorded(affine_stitch(LinearStitch, moments, weights, dtype), moments)
        weights = {"down": drawn(self.rank, moments.dx), "up": drawn(moments.dy, self.rank)}
        return recorded(affine_stitch(LowRankStitch, moments, weights, dtype, rank=self.rank), moments)
