"""No matching at all: a random map."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_stitch.matchers._affine import affine_stitch, recorded
from hf_stitch.matchers._solve import require
from hf_stitch.matchers.base import ClosedFormMatcher
from hf_stitch.papers import CSISZARIK_2021, Paper
from hf_stitch.statistics import Moments
from hf_stitch.stitches import LinearStitch, LowRankStitch


@dataclass(frozen=True)
class Random(ClosedFormMatcher):
    """Weights drawn uniformly, as ``torch.nn.Linear`` draws them; the bias sends the mean of x to the mean of y.

    A start for training, from which it may get stuck (Csiszárik et al. 2021, section 8), and a baseline: what comes
    out of it, the target's half made of noise.

    ``fitted`` holds ``n`` and ``r2``.

    Attributes:
        seed: Of the draw, at least 0.
        rank: Through a bottleneck of this width, at least 1; None: no bottleneck.

    Example:
        >>> x = torch.randn(50, 3)
        >>> Random(rank=2).fit(Moments(3, 3).update(x, x))
        LowRankStitch(in_features=3, out_features=3, rank=2, bias=True, dtype='float32')
    """

    name: ClassVar[str] = "random"
    title: ClassVar[str] = "random initialisation"
    papers: ClassVar[tuple[Paper, ...]] = (CSISZARIK_2021,)

    seed: int = 0
    rank: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed must be an integer >= 0, got {self.seed!r}")
        if self.rank is not None and (isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1):
            raise ValueError(f"rank must be None or an integer >= 1, got {self.rank!r}")

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LinearStitch | LowRankStitch:
        """The map, with weights of ``dtype``.

        Raises:
            ValueError: There are fewer than 2 rows, the rows of a side are all equal, or the rank exceeds a width.
        """
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
