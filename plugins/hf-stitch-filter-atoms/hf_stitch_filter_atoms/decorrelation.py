"""Penalty that decorrelates channels."""

from __future__ import annotations

from torch import Tensor


def channel_decorrelation(activations: Tensor) -> Tensor:
    """Compute the channel decorrelation penalty of Chen, Miao and Qiu (2023), appendix A.3.

    Args:
        activations: Activations Z of a layer, ``(n, channels)``, or ``(n, channels, height, width)`` with each position
            as a row. Pass tokens ``(n, tokens, d)`` as rows: ``activations.flatten(0, 1)``.

    Returns:
        ``Σ_{i≠j} (ZᵀZ)²_ij``, a 0-d tensor with gradients, not normalised by the numbers of rows and channels.

    Raises:
        ValueError: If the activations have a different shape.

    Example:
        >>> import torch
        >>> channel_decorrelation(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
        tensor(8.)
    """
    if activations.ndim not in (2, 4):
        raise ValueError(
            f"activations must be (n, channels) or (n, channels, height, width), got {tuple(activations.shape)}; pass "
            "tokens as rows, activations.flatten(0, 1)"
        )
    rows = activations.flatten(2).transpose(1, 2).flatten(0, 1) if activations.ndim == 4 else activations
    gram = rows.T @ rows
    return (gram - gram.diagonal().diag()).square().sum()
