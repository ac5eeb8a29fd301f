"""Stitches that look at several positions of a sample."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_stitch.stitches.base import Stitch, as_dtype


class SequenceStitch(Stitch):
    """Base class of stitches whose output at a position depends on other positions of the same sample too.

    The last but one axis of the input are positions: tokens in their order, or a grid row by row. A subclass implements
    :meth:`transform_sequence` and satisfies the contract of :class:`Stitch` otherwise, except that vectors are not
    mapped independently:

    - masked positions change no other position;
    - with ``causal``, no position changes an earlier one. Stitched language models refuse stitches that are not causal,
      because they would read the tokens that they predict;
    - samples do not change each other.

    Such a stitch has no cache: generation runs over the whole text for each token.

    Attributes:
        causal: Whether a position depends on itself and earlier ones only.

    Args:
        in_features: Width of the input vectors, at least 1.
        out_features: Width of the output vectors, at least 1.
        causal: Whether a position depends on itself and earlier ones only.

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
            mask: ``(batch, positions)`` bool, true for real positions. Default: all are.

        Returns:
            The same shape with ``out_features``. Values at masked positions have no meaning.
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
    """``x ↦ Wx + b + O · attention(Qx, Kx, Vx)``: an affine map, and a block of attention over the positions beside it.

    Attributes:
        heads: Number of heads.
        width: Width of queries, keys and values together.
        weight: ``W``, ``(out_features, in_features)``.
        bias: ``b``, ``(out_features,)``.
        read: ``Q``, ``K`` and ``V``, ``(3 · width, in_features)``.
        write: ``O``, ``(out_features, width)``; initially 0.

    Args:
        in_features: Width of the input vectors, at least 1.
        out_features: Width of the output vectors, at least 1.
        heads: Number of heads, which divides ``width``.
        width: Width of queries, keys and values together.
        causal: Whether a position attends to itself and earlier ones only, as language models need.
        dtype: Dtype of the parameters, as a ``torch.dtype`` or its name.

    Example:
        >>> AttentionStitch(4, 6, heads=2, width=8)(torch.randn(5, 3, 4)).shape
        torch.Size([5, 3, 6])
    """

    name: ClassVar[str] = "attention"
    title: ClassVar[str] = "an affine map with an attention block beside it"

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
            raise ValueError(f"the number of heads must divide the width of the attention, got {heads} and {width}")
        self.heads, self.width = heads, width
        kind, bound = as_dtype(dtype), 1 / math.sqrt(in_features)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=kind).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=kind))
        self.read = nn.Parameter(torch.empty(3 * width, in_features, dtype=kind).uniform_(-bound, bound))
        self.write = nn.Parameter(torch.zeros(out_features, width, dtype=kind))

    def transform_sequence(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """``Wx + b + O · attention(Qx, Kx, Vx)``."""
        q, k, v = functional.linear(x, self.read).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-3, -2)
        attends = None
        if mask is not None:
            itself = torch.eye(x.shape[-2], dtype=torch.bool, device=x.device)  # an empty row would be NaN
            attends = mask[..., None, None, :] | itself
            if self.causal:
                attends = attends & itself.new_ones(itself.shape).tril()
        alone = self.causal and attends is None
        found = functional.scaled_dot_product_attention(q, k, v, attn_mask=attends, is_causal=alone)
        beside = functional.linear(found.transpose(-3, -2).flatten(-2), self.write)
        return functional.linear(x, self.weight, self.bias) + beside
