"""Least-squares matcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_stitch.matchers._affine import affine_stitch, recorded
from hf_stitch.matchers._solve import Rcond, require
from hf_stitch.matchers.base import ClosedFormMatcher
from hf_stitch.papers import CSISZARIK_2021, Paper
from hf_stitch.statistics import Moments
from hf_stitch.statistics.spectrum import Spectrum
from hf_stitch.stitches import LinearStitch


@dataclass(frozen=True)
class Lstsq(ClosedFormMatcher):
    """Least squares: the affine map with minimum squared error, ``M_LS = A⁺B`` (Csiszárik et al. 2021, §4.2, eq. 2).

    If x is rank-deficient, the weights have minimum norm (about the mean; the intercept is free).

    ``fitted`` contains ``n``, ``r2``, the ``rcond`` used and ``x_rank``, the number of directions of x above it.

    Attributes:
        intercept: Whether to fit a bias. If false, rows are not centred.
        rcond: Threshold in [0, 1). Directions of x whose singular value is below ``rcond`` times the largest are
            dropped. The singular values are those of centred x (of x itself without an intercept). None drops the
            directions that are rounding in the dtype of x, for example the direction that a LayerNorm removes. In
            half precision it also drops directions near rounding, as long as they explain at most .0005 of the
            variance of y together.

    Example:
        >>> import torch
        >>> x = torch.randn(50, 3, dtype=torch.float64)
        >>> stitch = Lstsq().fit(Moments(3, 2).update(x, x[:, :2] + 1))
        >>> round(stitch.fitted["r2"], 6), stitch.fitted["x_rank"], stitch.bias.detach()
        (1.0, 3, tensor([1., 1.]))
    """

    name: ClassVar[str] = "lstsq"
    title: ClassVar[str] = "least squares"
    papers: ClassVar[tuple[Paper, ...]] = (CSISZARIK_2021,)

    intercept: bool = True
    rcond: Rcond = None

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LinearStitch:
        """Compute the map."""
        require(moments, max(moments.dx + self.intercept, 2), "give more rows, or use the matcher 'ridge'")
        centred = moments if self.intercept else moments.about_origin()
        spectrum = Spectrum.of(centred, "x", self.rcond, centred.sxy)
        weights = {"weight": spectrum.solve(centred.sxy).T}
        stitch = affine_stitch(LinearStitch, moments, weights, dtype, intercept=self.intercept)
        return recorded(stitch, moments, rcond=spectrum.rcond, x_rank=spectrum.rank)
