"""Random transformations that test declared invariances."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(rows: Tensor, invariance: str, seed: int) -> Tensor:
    """Apply a random transformation of the class that an invariance names."""
    generator, width = torch.Generator().manual_seed(seed), rows.shape[1]
    square = torch.randn(width, width, generator=generator, dtype=torch.float64)
    if invariance == "orthogonal":
        return rows @ torch.linalg.qr(square).Q
    if invariance == "invertible":
        return rows @ (square + 3 * torch.eye(width, dtype=torch.float64))
    if invariance == "permutation":
        return rows[:, torch.randperm(width, generator=generator)]
    return rows * (0.1 + 5 * seed) if invariance == "scaling" else rows + 10 * square[0]
