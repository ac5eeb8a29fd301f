"""Affine stitches with a bottleneck: the whole map, or a correction of a fixed one."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_stitch.papers import CSISZARIK_2021, Paper
from hf_stitch.stitches.base import Stitch, as_dtype


class LowRankStitch(Stitch):
    """``x ↦ up · (down · x) + bias``: an affine map of rank at most ``rank`` (Csiszárik et al. 2021, §7).

    The parameters are plain and trainable; before they are fitted or loaded, they are
    initialised like two layers of ``torch.nn.Linear``.

    Attributes:
        rank: Width of the bottleneck.
        down: ``(rank, in_features)``.
        up: ``(out_features, rank)``.
        bias: ``(out_features,)``, or None.

    Args:
        in_features: Width of the input vectors, at least 1.
        out_features: Width of the output vectors, at least 1.
        rank: Width of the bottleneck, from 1 to the smaller of the two widths.
        bias: Whether to add a bias.
        dtype: Dtype of the parameters, as a ``torch.dtype`` or its name.

    Raises:
        ValueError: A width is below 1, the rank is out of its range, or the dtype is not floating point.

    Example:
        >>> stitch = LowRankStitch(64, 64, rank=4)
        >>> sum(parameter.numel() for parameter in stitch.parameters())
        576
    """

    name: ClassVar[str] = "low_rank"
    title: ClassVar[str] = "an affine map through a bottleneck"
    papers: ClassVar[tuple[Paper, ...]] = (CSISZARIK_2021,)
    affine: ClassVar[bool] = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        bias: bool = True,
        dtype: torch.dtype | str = torch.float32,
    ) -> None:
        super().__init__(in_features, out_features)
        _check_rank(rank, in_features, out_features)
        self.rank = rank
        self.down = nn.Parameter(torch.empty(rank, in_features, dtype=as_dtype(dtype)))
        self.up = nn.Parameter(torch.empty(out_features, rank, dtype=as_dtype(dtype)))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=as_dtype(dtype))) if bias else None
        for parameter, fan_in in zip(self.parameters(), (in_features, rank, rank), strict=False):
            nn.init.uniform_(parameter, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    def transform(self, x: Tensor) -> Tensor:
        """``(x · downᵀ) · upᵀ + bias``."""
        return functional.linear(functional.linear(x, self.down), self.up, self.bias)

    def matrix(self) -> Tensor:
        """Return the map without its bias, ``(out_features, in_features)``."""
        return self.up @ self.down


class LowRankResidualStitch(Stitch):
    """``x ↦ Wx + b + V(Ux)``: a fixed affine map, and a correction of rank at most ``rank``, which alone is trained.

    This is LoRA (Hu et al. 2022) on the map between two networks: with ``rank`` far below the widths, training changes
    few directions and keeps the others as they were fitted.

    Attributes:
        rank: Width of the bottleneck.
        weight: ``W``, ``(out_features, in_features)``; a buffer.
        bias: ``b``, ``(out_features,)``; a buffer.
        down: ``U``, ``(rank, in_features)``.
        up: ``V``, ``(out_features, rank)``; initially 0.

    Args:
        in_features: Width of the input vectors, at least 1.
        out_features: Width of the output vectors, at least 1.
        rank: Width of the bottleneck, from 1 to the smaller of the two widths.
        dtype: Dtype of the weights, as a ``torch.dtype`` or its name.

    Raises:
        ValueError: A width is below 1, the rank is out of its range, or the dtype is not floating point.

    Example:
        >>> stitch = LowRankResidualStitch(64, 32, rank=4)
        >>> sum(parameter.numel() for parameter in stitch.parameters())
        384
    """

    name: ClassVar[str] = "low_rank_residual"
    title: ClassVar[str] = "a fixed affine map with a correction of low rank"
    affine: ClassVar[bool] = True

    weight: Tensor
    bias: Tensor

    def __init__(
        self, in_features: int, out_features: int, rank: int, dtype: torch.dtype | str = torch.float32
    ) -> None:
        super().__init__(in_features, out_features)
        _check_rank(rank, in_features, out_features)
        self.rank, kind = rank, as_dtype(dtype)
        bound = in_features**-0.5
        self.register_buffer("weight", torch.empty(out_features, in_features, dtype=kind).uniform_(-bound, bound))
        self.register_buffer("bias", torch.zeros(out_features, dtype=kind))
        self.down = nn.Parameter(torch.empty(rank, in_features, dtype=kind).uniform_(-bound, bound))
        self.up = nn.Parameter(torch.zeros(out_features, rank, dtype=kind))

    def transform(self, x: Tensor) -> Tensor:
        """``Wx + b + V(Ux)``."""
        correction = functional.linear(functional.linear(x, self.down), self.up)
        return functional.linear(x, self.weight, self.bias) + correction

    def matrix(self) -> Tensor:
        """Return the map without its bias, ``(out_features, in_features)``."""
        return self.weight + self.up @ self.down


def _check_rank(rank: int, in_features: int, out_features: int) -> None:
    most = min(in_features, out_features)
    if not 1 <= rank <= most:
        raise ValueError(f"rank must be from 1 to {most} for widths {in_features} -> {out_features}, got {rank}")
