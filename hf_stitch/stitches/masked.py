"""The affine stitch some of whose weights are fixed at zero."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_stitch.papers import CSISZARIK_2021, Paper
from hf_stitch.stitches.linear import LinearStitch


class MaskedStitch(LinearStitch):
    """``x ↦ (mask ∘ weight) · x + bias``: an affine map that is sparse and stays so in training.

    The weight is kept whole; where the mask is false it takes no part and gets no gradient.

    Attributes:
        weight: ``(out_features, in_features)``.
        mask: ``(out_features, in_features)`` bool, a persistent buffer: which weights take part; all until loaded.
        bias: ``(out_features,)``, or None.

    Args:
        in_features: Width of the vectors that come in, at least 1.
        out_features: Width of the vectors that go out, at least 1.
        bias: Whether there is a bias.
        dtype: Of the parameters, as a ``torch.dtype`` or by name.

    Raises:
        ValueError: A width is below 1, or the dtype is no floating-point dtype.

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
        """The map without its bias, ``(out_features, in_features)``: zero where the mask is false."""
        return torch.where(self.mask, self.weight, 0)
