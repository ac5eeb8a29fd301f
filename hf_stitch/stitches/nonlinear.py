"""Nonlinear stitches: an affine map plus regional corrections, or plus a small network."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_stitch.stitches.base import Stitch, as_dtype


class PiecewiseStitch(Stitch):
    """``x ↦ Wx + b + Σ_k p_k(x) (W_k x + b_k)``, with ``p(x) = softmax(-‖x - c_k‖² / width²)`` over centres c_k.

    An affine map shared by all vectors, plus a correction near each centre; between centres, corrections are mixed.

    Attributes:
        weight: ``(out_features, in_features)`` of the common map.
        bias: ``(out_features,)`` of the common map.
        weights: ``(pieces, out_features, in_features)`` of the corrections.
        biases: ``(pieces, out_features)`` of the corrections.
        centres: ``(pieces, in_features)``.
        width: Scalar: the distance over which corrections are mixed.

    Args:
        in_features: Width of the input vectors, at least 1.
        out_features: Width of the output vectors, at least 1.
        pieces: Number of corrections, at least 1.
        dtype: Dtype of the parameters, as a ``torch.dtype`` or its name.

    Example:
        >>> stitch = PiecewiseStitch(4, 3, pieces=2)
        >>> stitch(torch.randn(5, 4)).shape
        torch.Size([5, 3])
    """

    name: ClassVar[str] = "piecewise"
    title: ClassVar[str] = "an affine map with a correction for each region"

    def __init__(
        self, in_features: int, out_features: int, pieces: int, dtype: torch.dtype | str = torch.float32
    ) -> None:
        super().__init__(in_features, out_features)
        if pieces < 1:
            raise ValueError(f"pieces must be at least 1, got {pieces}")
        self.pieces = pieces
        float_dtype, bound = as_dtype(dtype), 1 / math.sqrt(in_features)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=float_dtype).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=float_dtype))
        self.weights = nn.Parameter(torch.zeros(pieces, out_features, in_features, dtype=float_dtype))
        self.biases = nn.Parameter(torch.zeros(pieces, out_features, dtype=float_dtype))
        self.centres = nn.Parameter(torch.randn(pieces, in_features, dtype=float_dtype))
        self.width = nn.Parameter(torch.ones((), dtype=float_dtype))

    def shares(self, x: Tensor) -> Tensor:
        """Return the mixing weights of the corrections, ``(..., pieces)``; they add up to 1."""
        squares = (x[..., None, :] - self.centres).square().sum(-1)
        return torch.softmax(-squares / self.width.square(), -1)

    def transform(self, x: Tensor) -> Tensor:
        """``Wx + b + Σ_k p_k(x) (W_k x + b_k)``."""
        shares, mapped = self.shares(x), functional.linear(x, self.weight, self.bias)
        for piece in range(self.pieces):  # all at once would take `pieces` times the memory
            correction = functional.linear(x, self.weights[piece], self.biases[piece])
            mapped = mapped + shares[..., piece, None] * correction
        return mapped


class ResidualMLPStitch(Stitch):
    """``x ↦ Wx + b + V gelu(Ux + a)``: an affine map plus a network with one hidden layer.

    Attributes:
        weight: ``W``, ``(out_features, in_features)``.
        bias: ``b``, ``(out_features,)``.
        down: ``U``, ``(hidden, in_features)``.
        down_bias: ``a``, ``(hidden,)``.
        up: ``V``, ``(out_features, hidden)``; initially 0.

    Args:
        in_features: Width of the input vectors, at least 1.
        out_features: Width of the output vectors, at least 1.
        hidden: Width of the hidden layer, at least 1.
        dtype: Dtype of the parameters, as a ``torch.dtype`` or its name.

    Example:
        >>> stitch = ResidualMLPStitch(4, 3, hidden=8)
        >>> stitch(torch.randn(5, 4)).shape
        torch.Size([5, 3])
    """

    name: ClassVar[str] = "residual_mlp"
    title: ClassVar[str] = "an affine map plus a small network"

    def __init__(
        self, in_features: int, out_features: int, hidden: int, dtype: torch.dtype | str = torch.float32
    ) -> None:
        super().__init__(in_features, out_features)
        if hidden < 1:
            raise ValueError(f"hidden must be at least 1, got {hidden}")
        self.hidden = hidden
        float_dtype, bound = as_dtype(dtype), 1 / math.sqrt(in_features)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=float_dtype).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=float_dtype))
        self.down = nn.Parameter(torch.empty(hidden, in_features, dtype=float_dtype).uniform_(-bound, bound))
        self.down_bias = nn.Parameter(torch.zeros(hidden, dtype=float_dtype))
        self.up = nn.Parameter(torch.zeros(out_features, hidden, dtype=float_dtype))

    def transform(self, x: Tensor) -> Tensor:
        """``Wx + b + V gelu(Ux + a)``."""
        hidden = functional.gelu(functional.linear(x, self.down, self.down_bias))
        return functional.linear(x, self.weight, self.bias) + functional.linear(hidden, self.up)
