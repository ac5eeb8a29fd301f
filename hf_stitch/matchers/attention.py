"""A closed-form map with an attention block beside it, to be trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_stitch.matchers._solve import require
from hf_stitch.matchers.base import ClosedFormMatcher
from hf_stitch.matchers.ridge import Penalty, Ridge
from hf_stitch.options import Count, Natural
from hf_stitch.statistics import Moments
from hf_stitch.stitches import AttentionStitch


@dataclass(frozen=True)
class Attention(ClosedFormMatcher):
    """Ridge regression, with one block of attention over the positions beside it that writes nothing at first.

    It is a start for :class:`hf_stitch.training.TaskLoss`, which trains both. Compare the result with the trained
    affine map, and with the same stitch after an untrained source (:func:`hf_stitch.adapters.untrained`): such a stitch
    can do work of the source itself.

    ``fitted`` contains the results of :class:`Ridge`.

    Attributes:
        heads: Number of heads, which divides ``width``.
        width: Width of queries, keys and values together.
        causal: Whether positions attend to themselves and earlier ones only, as language models need.
        ridge: Penalty of the ridge regression, as for :class:`Ridge`.
        seed: Seed of the queries, keys and values.

    Raises:
        ValueError: If ``heads`` do not divide ``width``.

    Example:
        >>> x = torch.randn(50, 4)
        >>> Attention(heads=1, width=4).fit(Moments(4, 3).update(x, x[:, :3])).fitted["n"]
        50
    """

    name: ClassVar[str] = "attention"
    title: ClassVar[str] = "ridge regression with an attention block beside it"

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
        common = Ridge(self.ridge).fit(moments, dtype)
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            stitch = AttentionStitch(moments.dx, moments.dy, self.heads, self.width, self.causal, dtype)
        # Features vary by about one in what queries and keys see, however long the vectors are; means stay in it.
        stitch.read.div_((moments.sxx.trace() / (moments.n * moments.dx)).sqrt().to(dtype).cpu())
        stitch.to(moments.device)
        stitch.weight.copy_(common.weight)
        if common.bias is not None:
            stitch.bias.copy_(common.bias)
        stitch.fitted = common.fitted
        return stitch
