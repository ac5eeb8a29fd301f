"""Stitches that mix the positions of a sample."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_stitch.stitches.base import Stitch, as_dtype


class SequenceStitch(Stitch):
    """Base class of stitches with outputs that depend on several positions of a sample.

    The second-to-last axis of the input contains the positions: tokens in order, or a grid row by row. A subclass
    implements :meth:`transform_sequence` and follows the contract of :class:`Stitch`, except that vectors are not
    mapped independently:

    - masked positions do not affect other positions;
    - with ``causal``, later positions do not affect earlier ones. Stitched language models require causal stitches,
      because others would see the tokens to predict;
    - samples do not affect each other.

    These stitches do not have a cache: generation processes the whole text for each token.

    Attributes:
        causal: Whether a position depends only on itself and earlier positions.

    Args:
        in_features: Width of the input vectors, at least 1.
        out_features: Width of the output vectors, at least 1.
        causal: Whether a position depends only on itself and earlier positions.

    Example:
        >>> import torch
        >>> from hf_stitch.stitches.sequence import AttentionStitch
        >>> stitch = AttentionStitch(4, 6, heads=2, width=4, causal=True)
        >>> isinstance(stitch, SequenceStitch), stitch(torch.randn(5, 3, 4)).shape
        (True, torch.Size([5, 3, 6]))
    """

    def __init__(self, in_features: int, out_features: int, causal: bool) -> None:
        super().__init__(in_features, out_features)
        self.causal = causal

    def transform(self, x: Tensor) -> Tensor:
        """Map sequences without padding."""
        return self.transform_sequence(x[None], None)[0] if x.dim() == 1 else self.transform_sequence(x, None)

    def map_sequence(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map sequences.

        Args:
            x: ``(batch, positions, in_features)``, or ``(batch, in_features)`` for one vector per sample.
            mask: ``(batch, positions)`` bool, true for real positions. Default: all positions are real.

        Returns:
            The mapped sequences, with ``out_features`` on the last axis. Values at masked positions are undefined.
        """
        return self.transform_sequence(x[:, None], None)[:, 0] if x.dim() == 2 else self.transform_sequence(x, mask)

    @abstractmethod
    def transform_sequence(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Compute the map.

        Args:
            x: ``(..., positions, in_features)``.
            mask: ``(..., positions)`` bool, or None.

        Returns:
            ``(..., positions, out_features)``.
        """


class AttentionStitch(SequenceStitch):
    """``x ↦ Wx + b + O · attention(Qx, Kx, Vx)``: an affine map plus an attention block over the positions.

    Attributes:
        heads: Number of heads.
        width: Total width of the heads.
        weight: ``W``, ``(out_features, in_features)``.
        bias: ``b``, ``(out_features,)``.
        read: ``Q``, ``K`` and ``V``, ``(3 · width, in_features)``.
        write: ``O``, ``(out_features, width)``; initially 0.

    Args:
        in_features: Width of the input vectors, at least 1.
        out_features: Width of the output vectors, at least 1.
        heads: Number of heads; must divide ``width``.
        width: Total width of the heads.
        causal: Whether a position attends only to itself and earlier positions; required by language models.
        dtype: Dtype of the parameters, as a ``torch.dtype`` or its name.

    Example:
        >>> AttentionStitch(4, 6, heads=2, width=8)(torch.randn(5, 3, 4)).shape
        torch.Size([5, 3, 6])
    """

    name: ClassVar[str] = "attention"
    title: ClassVar[str] = "an affine map plus an attention block"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        heads: int,
        width: int,
        causal: bool = False,
        dtype: torch.dtype | str = torch.float32,
    ) -> None:
        super().__init__(in_features, out_features, causal)
        if heads < 1 or width < 1 or width % heads:
            raise ValueError(f"width must be a multiple of heads, got width={width} and heads={heads}")
        self.heads, self.width = heads, width
        float_dtype, bound = as_dtype(dtype), 1 / math.sqrt(in_features)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=float_dtype).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=float_dtype))
        self.read = nn.Parameter(torch.empty(3 * width, in_features, dtype=float_dtype).uniform_(-bound, bound))
        self.write = nn.Parameter(torch.zeros(out_features, width, dtype=float_dtype))

    def transform_sequence(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """``Wx + b + O · attention(Qx, Kx, Vx)``."""
        q, k, v = functional.linear(x, self.read).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-3, -2)
        attention_mask = None
        if mask is not None:
            diagonal = torch.eye(x.shape[-2], dtype=torch.bool, device=x.device)  # an empty row would be NaN
            attention_mask = mask[..., None, None, :] | diagonal
            if self.causal:
                attention_mask = attention_mask & diagonal.new_ones(diagonal.shape).tril()
        is_causal = self.causal and attention_mask is None
        heads_out = functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, is_causal=is_causal)
        correction = functional.linear(heads_out.transpose(-3, -2).flatten(-2), self.write)
        return functional.linear(x, self.weight, self.bias) + correction
