"""The affine stitch."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_stitch.stitches.base import Stitch, as_dtype


class LinearStitch(Stitch):
    """``x ↦ weight · x + bias``: on a grid a 1-by-1 convolution, on tokens a linear layer.

    The parameters are plain and trainable; until they are fitted or loaded they hold the random values that
    ``torch.nn.Linear`` starts from.

    Attributes:
        weight: ``(out_features, in_features)``.
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
        >>> LinearStitch(3, 2)(torch.zeros(4, 5, 3)).shape
        torch.Size([4, 5, 2])
    """

    type: ClassVar[str] = "linear"

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, dtype: torch.dtype | str = torch.float32
    ) -> None:
        super().__init__(in_features, out_features)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=as_dtype(dtype)))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=as_dtype(dtype))) if bias else None
        bound = 1 / math.sqrt(in_features)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def transform(self, x: Tensor) -> Tensor:
        """``x · weightᵀ + bias``."""
        return functional.linear(x, self.weight, self.bias)

    def matrix(self) -> Tensor:
        """The map without its bias, ``(out_features, in_features)``."""
        return self.weight

    def config(self) -> dict[str, Any]:
        """The widths, whether there is a bias, and the name of the dtype."""
        return {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "bias": self.bias is not None,
            "dtype": str(self.weight.dtype).removeprefix("torch."),
        }
