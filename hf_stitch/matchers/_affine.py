"""From solved weights to an affine stitch that knows how well it fits."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor

from hf_stitch.statistics import Moments
from hf_stitch.stitches import IdentityStitch, LinearStitch, LowRankStitch

_Weighted = TypeVar("_Weighted", LinearStitch, LowRankStitch)
_Affine = TypeVar("_Affine", IdentityStitch, LinearStitch, LowRankStitch)


@torch.no_grad()
def affine_stitch(
    kind: type[_Weighted],
    moments: Moments,
    weights: dict[str, Tensor],
    dtype: torch.dtype,
    *,
    intercept: bool = True,
    **config: int,
) -> _Weighted:
    """A stitch of these weights; with an intercept, its bias sends the mean of x to the mean of y.

    The bias belongs to the weights as rounded to ``dtype``, so that rounding tilts the map but does not shift it.
    """
    state = {key: weight.to(dtype, copy=True, memory_format=torch.contiguous_format) for key, weight in weights.items()}
    if intercept:
        state["bias"] = torch.zeros(moments.dy, dtype=dtype, device=moments.device)
    with torch.device("meta"):  # where initialising costs nothing and draws no random numbers
        stitch = kind(moments.dx, moments.dy, bias=intercept, dtype=dtype, **config)
    stitch.load_state_dict(state, assign=True)
    if stitch.bias is not None:
        stitch.bias.copy_(moments.mean_y - _exact(stitch)(moments.mean_x))
    return stitch


@torch.no_grad()
def recorded(stitch: _Affine, moments: Moments, **found: float | int) -> _Affine:
    """The stitch with ``fitted`` filled: ``n``, ``r2`` and what else was found.

    ``r2 = 1 - RSS / TSS`` over the rows of the moments and all outputs together, with TSS about the mean of y; for
    the weights as stored.
    """
    exact = _exact(stitch)
    matrix = exact.matrix().to(moments.sxx)
    shift = moments.mean_y - exact(moments.mean_x)
    scatter = moments.syy.trace() - 2 * (matrix * moments.sxy.T).sum() + ((matrix @ moments.sxx) * matrix).sum()
    r2 = 1 - (scatter + moments.n * shift @ shift) / moments.syy.trace()
    stitch.fitted = {"n": moments.n, "r2": r2.item(), **found}
    return stitch


def _exact(stitch: _Affine) -> _Affine:
    """A twin that computes in float64 with the weights as stored."""
    return copy.deepcopy(stitch).double()
