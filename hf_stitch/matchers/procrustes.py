"""Orthogonal Procrustes matcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_stitch.matchers._affine import affine_stitch, recorded
from hf_stitch.matchers._solve import require
from hf_stitch.matchers.base import ClosedFormMatcher
from hf_stitch.papers import DING_2021, Paper
from hf_stitch.statistics import Moments
from hf_stitch.statistics.spectrum import EPS, rounding
from hf_stitch.stitches import LinearStitch


@dataclass(frozen=True)
class Procrustes(ClosedFormMatcher):
    """The (semi-)orthogonal map ``Q = UVᵀ`` from ``XᵀY = USVᵀ`` (Schönemann 1966; Csiszárik et al. 2021, §4.2).

    The optimality criterion depends on the widths:

    - Equal: Q is orthogonal (reflections included) and minimises ``‖XQ - Y‖``.
    - x narrower: Q embeds x isometrically (``QQᵀ = I``) and minimises ``‖XQ - Y‖``.
    - x wider: Q projects x (``QᵀQ = I``) and maximises the inner product ``⟨XQ, Y⟩``. The minimum of ``‖XQ - Y‖`` has
      no closed form in this case, because ``‖XQ‖`` depends on Q.

    If the rank of ``XᵀY`` is below the smaller width, the optimal Q is not unique.

    ``fitted`` contains ``n``, ``r2``, the ``scale`` used and ``xy_rank``, the numerical rank of ``XᵀY``.

    Attributes:
        center: Whether to centre both sides; the bias of the stitch then maps mean to mean. Otherwise the map is
            optimal for the uncentred rows and has no bias.
        scale: Whether to multiply Q by the factor that minimises ``‖scale · XQ - Y‖``. For equal widths or a narrower x
            this is the joint optimum over Q and scale. If false, the factor is 1.

    Example:
        >>> import torch
        >>> x = torch.randn(50, 2, dtype=torch.float64)
        >>> stitch = Procrustes().fit(Moments(2, 2).update(x, x.flip(1)))
        >>> stitch.weight.detach().round(decimals=4).abs()
        tensor([[0., 1.],
                [1., 0.]])
    """

    name: ClassVar[str] = "procrustes"
    title: ClassVar[str] = "orthogonal Procrustes"
    papers: ClassVar[tuple[Paper, ...]] = (DING_2021,)

    center: bool = True
    scale: bool = False

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LinearStitch:
        """Compute the map."""
        require(moments, 2)
        centred = moments if self.center else moments.about_origin()
        left, values, right = torch.linalg.svd(centred.sxy, full_matrices=False)
        rotation = (left @ right).T
        scale = 1.0
        if self.scale:
            scale = (values.sum() / ((rotation @ centred.sxx) * rotation).sum()).item()
        stitch = affine_stitch(LinearStitch, moments, {"weight": scale * rotation}, dtype, intercept=self.center)
        varies = values > values[0] * max(moments.dx, moments.dy) * EPS
        errors = rounding(centred, "x"), rounding(centred, "y")
        for directions, scatter, error in zip((left, right.T), (centred.sxx, centred.syy), errors, strict=True):
            spread = ((scatter @ directions) * directions).sum(0)
            varies &= spread > (directions.square() * error[:, None]).sum(0)
        return recorded(stitch, moments, scale=scale, xy_rank=int(varies.sum()))
