"""What matchers of rows share: checked rows, the affine map that they begin with, and the record of the fit."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_stitch.matchers.ridge import Ridge
from hf_stitch.statistics import Moments
from hf_stitch.stitches import LinearStitch, Stitch


def moments_of(x: Tensor, y: Tensor) -> Moments:
    """Return the moments of paired rows, which are checked.

    Args:
        x: ``(n, dx)``.
        y: ``(n, dy)``.

    Returns:
        The moments.

    Raises:
        ValueError: The rows are not finite matrices of equal length.
        TypeError: They are not floating point.
    """
    for name, rows in (("x", x), ("y", y)):
        if rows.ndim != 2:
            raise ValueError(f"{name} must have shape (n, d), got {tuple(rows.shape)}")
    return Moments(x.shape[1], y.shape[1]).update(x, y)


def affine_part(moments: Moments) -> LinearStitch:
    """Return ridge regression in float64, with the penalty of least generalised cross-validation error.

    Args:
        moments: Moments of the rows.

    Returns:
        The affine stitch.
    """
    return Ridge().fit(moments, dtype=torch.float64)


@torch.no_grad()
def recorded_rows(stitch: Stitch, x: Tensor, y: Tensor, **found: float | int) -> Stitch:
    """Fill ``stitch.fitted`` with ``n``, ``r2`` over all outputs together, and other results.

    Args:
        stitch: The fitted stitch.
        x: ``(n, dx)``.
        y: ``(n, dy)``.
        **found: Other results.

    Returns:
        The stitch.
    """
    y = y.double()
    left = sum(
        (stitch(some.to(next(stitch.parameters()).dtype)).double() - other).square().sum().item()
        for some, other in zip(x.split(8192), y.split(8192), strict=True)
    )
    stitch.fitted = {"n": len(x), "r2": 1 - left / (y - y.mean(0)).square().sum().item(), **found}
    return stitch.eval()


def check_unpaired(x: Tensor, y: Tensor, dx: int, dy: int) -> None:
    """Check rows of both sides that have no partners.

    Args:
        x: ``(m, dx)``.
        y: ``(m', dy)``.
        dx: Width of the source.
        dy: Width of the target.

    Raises:
        ValueError: The rows are not finite matrices of these widths, or a side has fewer than 2.
        TypeError: They are not floating point.
    """
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
    """Return rows on the CPU in float64 and in random order, at most ``count``.

    Args:
        rows: ``(n, d)``.
        count: Greatest number of rows.
        seed: Seed of the order.

    Returns:
        ``(min(n, count), d)``.
    """
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count]
    return rows.detach().cpu()[order].double()
