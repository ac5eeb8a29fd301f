"""Orthogonal maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_stitch.matchers._affine import affine_stitch, recorded
from hf_stitch.matchers._solve import require
from hf_stitch.matchers.base import ClosedFormMatcher
from hf_stitch.papers import DING_2021, Paper
from hf_stitch.statistics import Moments
from hf_stitch.stitches import LinearStitch


@dataclass(frozen=True)
class Procrustes(ClosedFormMatcher):
    """The (semi-)orthogonal map ``Q = UVᵀ`` from ``XᵀY = USVᵀ`` (Schönemann 1966; Csiszárik et al. 2021, §4.2).

    What is optimal about it depends on the widths:

    - equal: Q is orthogonal (reflections included) and of all such has the least ``‖XQ - Y‖``;
    - x narrower: Q embeds x isometrically (``QQᵀ = I``) and of all such has the least ``‖XQ - Y‖``;
    - x wider: Q projects x (``QᵀQ = I``) and of all such has the greatest inner product ``⟨XQ, Y⟩``. The least
      ``‖XQ - Y‖`` has no closed form there, as ``‖XQ‖`` varies with Q.

    Where ``XᵀY`` has less rank than the smaller width, other Q are as good.

    ``fitted`` holds ``n``, ``r2``, the ``scale`` in force and ``xy_rank``, the numerical rank of ``XᵀY``.

    Attributes:
        center: Whether both sides are centred first; the stitch then maps mean to mean by a bias. Otherwise the map
            is optimal for the rows as they are, and has no bias.
        scale: Whether Q is multiplied by the number of least ``‖scale · XQ - Y‖``, which for equal widths or a
            narrower x is the optimum over Q and scale together. Otherwise lengths (of what Q keeps) are kept.

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

    def __post_init__(self) -> None:
        for option in ("center", "scale"):
            if not isinstance(getattr(self, option), bool):
                raise ValueError(f"{option} must be True or False, got {getattr(self, option)!r}")

    def fit(self, moments: Moments, dtype: torch.dtype = torch.float32) -> LinearStitch:
        """The map, with weights of ``dtype``.

        Raises:
            ValueError: There are fewer than 2 rows, or the rows of a side are all equal.
            torch.linalg.LinAlgError: The singular value decomposition did not converge.
        """
        require(moments, 2)
        centred = moments if self.center else moments.about_origin()
        left, values, right = torch.linalg.svd(centred.sxy, full_matrices=False)
        rotation = (left @ right).T
        scale = 1.0
        if self.scale:
            scale = (values.sum() / ((rotation @ centred.sxx) * rotation).sum()).item()
        stitch = affine_stitch(LinearStitch, moments, {"weight": scale * rotation}, dtype, intercept=self.center)
        rank = int((values > values[0] * max(moments.dx, moments.dy) * torch.finfo(torch.float64).eps).sum())
        return recorded(stitch, moments, scale=scale, xy_rank=rank)
