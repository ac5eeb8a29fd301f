"""The sparse affine stitch."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_stitch.papers import CSISZARIK_2021, Paper
from hf_stitch.stitches.linear import LinearStitch


class MaskedStitch(LinearStitch):
    """``x ↦ (mask ∘ weight) · x + bias``: an affine map that stays sparse during training.

    The full weight is stored; entries where the mask is false are not used and receive no gradient.

    Attributes:
        weight: ``(out_features, in_features)``.
        mask: ``(out_features, in_features)`` bool, a persistent buffer: the weights that are used; initially all.
        bias: ``(out_features,)``, or None.

    Args:
        in_features: Width of the input vectors, at least 1.
        out_features: Width of the output vectors, at least 1.
        bias: Whether to add a bias.
        dtype: Dtype of the parameters, as a ``torch.dtype`` or its name.

    Raises:
        ValueError: A width is below 1, or the dtype is not floating point.

    Example:
        >>> import torch
        >>> stitch = MaskedStitch(2, 1, bias=False)
        >>> stitch.mask[0, 1] = False
        >>> bool(stitch(torch.tensor([0.0, 7.0])) == 0)
        True
    """

    name: ClassVar[str] = "masked"
    title: ClassVar[str] = "a sparse affine map"
    papers: ClassVar[tuple[Paper, ...]] = (CSISZARIK_2021,)
    mask: Tensor

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, dtype: torch.dtype | str = torch.float32
    ) -> None:
        super().__init__(in_features, out_features, bias, dtype)
        self.register_buffer("mask", torch.ones(out_features, in_features, dtype=torch.bool))

    def transform(self, x: Tensor) -> Tensor:
        """``x · (mask ∘ weight)ᵀ + bias``."""
        return functional.linear(x, self.matrix(), self.bias)

    def matrix(self) -> Tensor:
        """Return the map without its bias, ``(out_features, in_features)``: zero where the mask is false."""
        return torch.where(self.mask, self.weight, 0)
