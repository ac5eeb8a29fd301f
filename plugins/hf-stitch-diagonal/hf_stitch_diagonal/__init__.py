"""A matcher for hf-stitch: one scale and one shift per feature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_stitch.matchers import ClosedFormMatcher
from hf_stitch.statistics import Moments
from hf_stitch.stitches import LinearStitch

__all__ = ["Diagonal"]


@dataclass(frozen=True)
class Diagonal(ClosedFormMatcher):
    """Feature by feature, the least-squares line from x to y.

    Its slope is ``sxy / sxx``, and it goes through ``(mean_x, mean_y)``. A feature that is constant in x gets the
    scale 0, and so the mean of y.

    Example:
        >>> x = torch.randn(50, 2)
        >>> stitch = Diagonal().fit(Moments(2, 2).update(x, x * torch.tensor([2.0, -1.0]) + 3))
        >>> stitch.weight.detach().round(decimals=4)
        tensor([[ 2.,  0.],
                [ 0., -1.]])
    """

    name: ClassVar[str] = "diagonal"
    unequal_widths: ClassVar[bool] = False

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LinearStitch:
        """The diagonal map; ``fitted`` holds ``n`` and ``r2``.

        Raises:
            ValueError: The widths differ, there are fewer than 2 rows, or y does not vary.
        """
        if moments.dx != moments.dy:
            raise ValueError(f"diagonal matches equal widths only, got {moments.dx} -> {moments.dy}; use 'lstsq'")
        sxx, sxy, syy = (scatter.diagonal() for scatter in (moments.sxx, moments.sxy, moments.syy))
        if moments.n < 2 or not syy.any():
            raise ValueError(f"diagonal needs 2 rows or more that differ in y, got {moments}")
        # A constant feature may scatter a little, for its mean is rounded.
        varies = sxx > moments.n * (8 * torch.finfo(sxx.dtype).eps * moments.mean_x).square()
        scale = torch.where(varies, sxy / sxx, 0)
        stitch = LinearStitch(moments.dx, moments.dy, dtype=dtype).to(moments.device)
        stitch.load_state_dict({"weight": scale.diag(), "bias": moments.mean_y - scale * moments.mean_x})
        stitch.fitted = {"n": moments.n, "r2": ((scale * sxy).sum() / syy.sum()).item()}
        return stitch
