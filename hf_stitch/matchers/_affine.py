"""Helpers of closed-form matchers: checks of moments, affine stitches from weights, and the record of the fit."""

from __future__ import annotations

import copy
from typing import Annotated, TypeVar

import torch
from torch import Tensor

from hf_stitch.options import Within
from hf_stitch.printing import see
from hf_stitch.statistics import Moments
from hf_stitch.statistics.spectrum import EPS
from hf_stitch.stitches import IdentityStitch, LinearStitch, LowRankStitch

Rcond = Annotated[float, Within(0, 1, below=True)] | None
"""Threshold on relative singular values; ``None`` for the default."""

_Weighted = TypeVar("_Weighted", LinearStitch, LowRankStitch)
_Affine = TypeVar("_Affine", IdentityStitch, LinearStitch, LowRankStitch)


def require(moments: Moments, rows: int, remedy: str = "pass more rows") -> None:
    """Raise an error unless moments have at least ``rows`` rows, and variation on both sides."""
    if moments.n < rows:
        raise ValueError(
            f"fitting {moments.dx} to {moments.dy} features requires at least {rows} rows, got {moments.n}; {remedy}"
            + see("too-few-samples")
        )
    for side, scatter, mean in (("x", moments.sxx, moments.mean_x), ("y", moments.syy, moments.mean_y)):
        # Equal rows may have a small variance, because their mean is rounded.
        if scatter.trace() <= moments.n * (8 * EPS * mean.norm()) ** 2:
            raise ValueError(f"rows of {side} must vary, but all {moments.n} are equal; is the layer dead?")


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
    """Build a stitch from weights; with an intercept, its bias maps the mean of x to the mean of y.

    The bias is computed for the weights in ``dtype``, so that rounding does not shift the map.
    """
    state = {key: weight.to(dtype, copy=True, memory_format=torch.contiguous_format) for key, weight in weights.items()}
    if intercept:
        state["bias"] = torch.zeros(moments.dy, dtype=dtype, device=moments.device)
    with torch.device("meta"):  # initialisation is free and does not draw random numbers here
        stitch = kind(moments.dx, moments.dy, bias=intercept, dtype=dtype, **config)
    stitch.load_state_dict(state, assign=True)
    if stitch.bias is not None:
        stitch.bias.copy_(moments.mean_y - _exact(stitch)(moments.mean_x))
    return stitch


@torch.no_grad()
def recorded(stitch: _Affine, moments: Moments, **results: float | int) -> _Affine:
    """Fill ``stitch.fitted`` with ``n``, ``r2`` and other results, and return the stitch.

    ``r2 = 1 - RSS / TSS`` over the rows of the moments and all outputs together, with TSS about the mean of y, for the
    stored weights.
    """
    exact = _exact(stitch)
    matrix = exact.matrix().to(moments.sxx)
    shift = moments.mean_y - exact(moments.mean_x)
    scatter = moments.syy.trace() - 2 * (matrix * moments.sxy.T).sum() + ((matrix @ moments.sxx) * matrix).sum()
    r2 = 1 - (scatter + moments.n * shift @ shift) / moments.syy.trace()
    stitch.fitted = {"n": moments.n, "r2": r2.item(), **results}
    return stitch


def _exact(stitch: _Affine) -> _Affine:
    """Return a copy that computes in float64 with the stored weights."""
    return copy.deepcopy(stitch).double()
