"""One-to-one matching of features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from hf_stitch.matchers._affine import affine_stitch, recorded
from hf_stitch.matchers._solve import EPS, require
from hf_stitch.matchers.base import ClosedFormMatcher
from hf_stitch.papers import LI_2015, Paper
from hf_stitch.statistics import Moments
from hf_stitch.stitches import LinearStitch

Compare = Literal["correlation", "distance"]


@dataclass(frozen=True)
class Permutation(ClosedFormMatcher):
    """Permutation: each feature of y is predicted by one feature of x, shifted to the mean of y.

    The assignment is one to one and found by the Hungarian method. It maximises the sum of correlations (Li et al.
    2016, section 3.1), or minimises the distance ``Σ‖ŷⱼ - yⱼ‖²`` over all centred features of y, which maximises
    ``Σ xᵢᵀyⱼ`` if every feature of x is matched (Ainsworth et al. 2023, section 3.1). For unequal widths
    ``min(dx, dy)`` features are matched, and an unmatched feature of y is predicted by its mean.

    Constant features are never matched, so a constant feature of y is predicted by its mean.

    ``fitted`` contains ``n``, ``r2``, ``matched`` (number of matched features of y) and ``correlation`` (mean over
    these).

    Attributes:
        compare: ``"correlation"`` or ``"distance"``.
        semi: Whether each feature of y is matched with the best feature of x independently of the others (the
            semi-matching of Li et al.).

    Example:
        >>> x = torch.randn(50, 3, dtype=torch.float64)
        >>> Permutation().fit(Moments(3, 3).update(x, x[:, [2, 0, 1]] + 5)).weight.detach()
        tensor([[0., 0., 1.],
                [1., 0., 0.],
                [0., 1., 0.]])
    """

    name: ClassVar[str] = "permutation"
    title: ClassVar[str] = "one-to-one or semi-matching of features"
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
        """Indices of matched features of x, and of the features of y that they predict."""
        if self.semi:
            return costs.argmin(0), torch.arange(costs.shape[1], device=costs.device)
        rows, columns = linear_sum_assignment(costs.cpu().numpy())
        return torch.from_numpy(rows).to(costs.device), torch.from_numpy(columns).to(costs.device)


def _varying(scatter: Tensor, mean: Tensor, n: int) -> Tensor:
    """Indices of features that vary beyond the rounding of their mean."""
    return (scatter > n * (8 * EPS * mean) ** 2).nonzero().flatten()
