"""Base class of stitches that look at several positions of a sample."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from hf_stitch.stitches.base import Stitch


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
        >>> from hf_stitch.stitches import AttentionStitch
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
