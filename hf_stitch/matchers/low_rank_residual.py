"""A closed-form map that stays fixed, with a correction of low rank to be trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_stitch.matchers._solve import require
from hf_stitch.matchers.base import ClosedFormMatcher
from hf_stitch.matchers.ridge import Penalty, Ridge
from hf_stitch.options import Count
from hf_stitch.statistics import Moments
from hf_stitch.statistics.spectrum import EPS, rounding
from hf_stitch.stitches import LowRankResidualStitch


@dataclass(frozen=True)
class LowRankResidual(ClosedFormMatcher):
    """Ridge regression, whose weights stay fixed, with a correction of low rank that is 0 at first.

    It is a start for :class:`hf_stitch.training.TaskLoss`, which then trains ``rank × (dx + dy)`` numbers instead of
    ``dx × dy``. The correction reads the leading principal directions of x, scaled to unit variance;
    the mean of x stays in it.

    ``fitted`` contains the results of :class:`Ridge`.

    Attributes:
        rank: Rank of the correction, from 1 to the smaller width.
        ridge: Penalty of the ridge regression, as for :class:`Ridge`.

    Example:
        >>> x = torch.randn(50, 4)
        >>> LowRankResidual(rank=2).fit(Moments(4, 3).update(x, x[:, :3]))
        LowRankResidualStitch(in_features=4, out_features=3, rank=2, dtype='float32')
    """

    name: ClassVar[str] = "low_rank_residual"
    title: ClassVar[str] = "ridge regression with a correction of low rank to be trained"

    rank: Count = 8
    ridge: Penalty = "gcv"

    @torch.no_grad()
    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LowRankResidualStitch:
        """Compute the map."""
        require(moments, 2)
        common = Ridge(self.ridge).fit(moments, dtype)
        with torch.random.fork_rng():  # its random weights are replaced
            stitch = LowRankResidualStitch(moments.dx, moments.dy, self.rank, dtype)
        stitch.to(moments.device)
        values, vectors = (part[..., -self.rank :] for part in torch.linalg.eigh(moments.sxx / moments.n))
        # A direction that is rounding stays small.
        least = torch.clamp(
            (vectors.square() * rounding(moments, "x")[:, None]).sum(0) / moments.n, min=float(EPS * values[-1])
        )
        stitch.down.copy_((vectors / torch.maximum(values, least).sqrt()).T)
        stitch.weight.copy_(common.weight)
        if common.bias is not None:
            stitch.bias.copy_(common.bias)
        stitch.fitted = common.fitted
        return stitch
