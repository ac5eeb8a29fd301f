"""A matcher plugin for hf-stitch: one scale and one shift per feature."""

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
    """Matcher with a least-squares line from x to y for each feature.

    The slope is ``sxy / sxx`` and the line passes through ``(mean_x, mean_y)``. A feature that is constant in x gets
    scale 0, so that it is mapped to the mean of y.

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
        """Fit the diagonal map.

        Args:
            moments: Moments of paired rows x and y of equal width.
            dtype: Dtype of the weights.

        Returns:
            A linear stitching layer with a diagonal weight. Its ``fitted`` contains the number of rows ``n`` and the
            coefficient of determination ``r2``.

        Raises:
            ValueError: If the widths differ, fewer than 2 rows are passed, or a side does not vary.
        """
        if moments.dx != moments.dy:
            raise ValueError(f"diagonal requires equal widths, got {moments.dx} -> {moments.dy}; use 'lstsq'")
        sxx, sxy, syy = (scatter.diagonal() for scatter in (moments.sxx, moments.sxy, moments.syy))
        if moments.n < 2 or not sxx.any() or not syy.any():
            raise ValueError(f"diagonal requires at least 2 rows that differ in x and in y, got {moments}")
        # The scatter of a constant feature may exceed 0 due to rounding error of its mean.
        varies = sxx > moments.n * (8 * torch.finfo(sxx.dtype).eps * moments.mean_x).square()
        scale = torch.where(varies, sxy / sxx, 0)
        stitch = LinearStitch.of(weight=scale.diag(), bias=moments.mean_y - scale * moments.mean_x).to(dtype)
        stitch.fitted = {"n": moments.n, "r2": ((scale * sxy).sum() / syy.sum()).item()}
        return stitch
