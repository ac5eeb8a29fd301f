"""Unit with unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from hf_stitch.matchers._affine import affine_stitch, recorded
from hf_stitch.matchers._solve import require
from hf_stitch.matchers.base import ClosedFormMatcher
from hf_stitch.statistics import Moments
from hf_stitch.stitches import LinearStitch

Compare = Literal["correlation", "distance"]


@dataclass(frozen=True)
class Permutation(ClosedFormMatcher):
    """Each feature of y is one feature of x, as it is, moved to the mean of y.

    One to one, found by the Hungarian method: of the greatest sum of correlations (Li et al. 2016, section 3.1), or of
    the least ``Σ‖xᵢ - yⱼ‖²`` of centred features, which is the greatest ``Σ xᵢᵀyⱼ`` (Ainsworth et al. 2023, section
    3.1). Of unequal widths the ``min(dx, dy)`` that match best are matched; a feature of y that gets none is its mean.

    A constant feature correlates with none.

    ``fitted`` holds ``n``, ``r2``, ``matched`` (how many features of y got one) and ``correlation`` (the mean over
    these).

    Attributes:
        compare: ``"correlation"`` or ``"distance"``.
        semi: Whether each feature of y takes the best of x, whatever the others take (the semi-matching of Li et al.).

    Example:
        >>> x = torch.randn(50, 3, dtype=torch.float64)
        >>> Permutation().fit(Moments(3, 3).update(x, x[:, [2, 0, 1]] + 5)).weight.detach()
        tensor([[0., 0., 1.],
                [1., 0., 0.],
                [0., 1., 0.]])
    """

    name: ClassVar[str] = "permutation"

    compare: Compare = "correlation"
    semi: bool = False

    def __post_init__(self) -> None:
        if self.compare not in get_args(Compare):
            raise ValueError(f"compare must be one of {', '.join(get_args(Compare))}, got {self.compare!r}")
        if not isinstance(self.semi, bool):
            raise ValueError(f"semi must be True or False, got {self.semi!r}")

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LinearStitch:
        """The map, with weights of ``dtype``.

        Raises:
            ValueError: There are fewer than 2 rows, or the rows of a side are all equal.
        """
        require(moments, 2)
        correlations = _correlations(moments)
        costs = -correlations
        if self.compare == "distance":
            costs = moments.sxx.diagonal()[:, None] + moments.syy.diagonal() - 2 * moments.sxy
        rows, columns = self._matched(costs)
        weight = moments.sxy.new_zeros(moments.dy, moments.dx)
        weight[columns, rows] = 1
        stitch = affine_stitch(LinearStitch, moments, {"weight": weight}, dtype)
        correlation = correlations[rows, columns].mean().item()
        return recorded(stitch, moments, matched=len(columns), correlation=correlation)

    def _matched(self, costs: Tensor) -> tuple[Tensor, Tensor]:
        """Features of x, and those of y that they become."""
        if self.semi:
            return costs.argmin(0), torch.arange(costs.shape[1], device=costs.device)
        rows, columns = linear_sum_assignment(costs.cpu().numpy())
        return torch.from_numpy(rows).to(costs.device), torch.from_numpy(columns).to(costs.device)


def _correlations(moments: Moments) -> Tensor:
    """``(dx, dy)``; 0 where a feature does not vary."""
    scale = torch.outer(moments.sxx.diagonal().sqrt(), moments.syy.diagonal().sqrt())
    return torch.where(scale > 0, moments.sxy / scale, 0)
