"""What matchers of rows share: checked rows, the affine map that they begin with, and the record of the fit."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from hf_stitch.matchers._affine import recorded
from hf_stitch.matchers.procrustes import Procrustes
from hf_stitch.matchers.ridge import Ridge
from hf_stitch.statistics import Moments
from hf_stitch.stitches import LinearStitch, Stitch

_Stitch = TypeVar("_Stitch", bound=Stitch)


def moments_of(x: Tensor, y: Tensor) -> Moments:
    """Return the moments of paired rows, which are checked."""
    for name, rows in (("x", x), ("y", y)):
        if rows.ndim != 2:
            raise ValueError(f"{name} must have shape (n, d), got {tuple(rows.shape)}")
    return Moments(x.shape[1], y.shape[1]).update(x, y)


def affine_part(moments: Moments) -> LinearStitch:
    """Return ridge regression in float64, with the penalty of least generalised cross-validation error."""
    return Ridge().fit(moments, dtype=torch.float64)


@torch.no_grad()
def orthogonal(moments: Moments, x: Tensor, y: Tensor, dtype: torch.dtype) -> LinearStitch:
    """Return the orthogonal map of pairs that were searched, with the means and the spread of all rows.

    Pairs that were searched are near, but not all are partners. The scale of least squares would shrink with their
    errors, and their means are those of the rows that happened to be paired.
    """
    found = Procrustes().fit(moments, torch.float64)
    rotation, of_x, of_y = found.weight.detach(), x.mean(0), y.mean(0)
    # Only the directions that the map joins: the wider side has others.
    spread_x, spread_y = (
        (rows @ turn).square().mean(0).sum() for rows, turn in ((x - of_x, rotation.T), (y - of_y, rotation))
    )
    scale = (spread_y / spread_x).sqrt()
    weight = (scale * rotation).to(dtype)
    stitch = LinearStitch.of(weight=weight, bias=(of_y - weight.double() @ of_x).to(dtype))
    return recorded(stitch, moments, scale=scale.item(), xy_rank=int(found.fitted["xy_rank"]))


@torch.no_grad()
def recorded_rows(stitch: _Stitch, x: Tensor, y: Tensor, **found: float | int) -> _Stitch:
    """Fill ``stitch.fitted`` with ``n``, ``r2`` over all outputs together, and other results."""
    y = y.double()
    left = sum(
        (stitch(some.to(next(stitch.parameters()).dtype)).double() - other).square().sum().item()
        for some, other in zip(x.split(8192), y.split(8192), strict=True)
    )
    stitch.fitted = {"n": len(x), "r2": 1 - left / (y - y.mean(0)).square().sum().item(), **found}
    return stitch.eval()


def check_unpaired(x: Tensor, y: Tensor, dx: int, dy: int) -> None:
    """Check rows of both sides that have no partners."""
    for side, rows, width in (("source", x, dx), ("target", y, dy)):
        if rows.ndim != 2 or rows.shape[1] != width or len(rows) < 2:
            raise ValueError(
                f"unpaired rows of the {side} must have shape (n, {width}) with n >= 2, got {tuple(rows.shape)}"
            )
        if not rows.is_floating_point():
            raise TypeError(f"unpaired rows of the {side} must be floating point, got {rows.dtype}")
        if not bool(rows.isfinite().all()):
            raise ValueError(f"unpaired rows of the {side} contain NaN or infinity; drop these rows")


def some_rows(rows: Tensor, count: int, seed: int) -> Tensor:
    """Return rows on the CPU in float64 and in random order, at most ``count``."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count]
    return rows.detach().cpu()[order].double()
