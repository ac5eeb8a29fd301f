"""Pairwise distances between the rows of one side."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Distance = Literal["correlation", "cosine", "euclidean"]


def pairwise(rows: Tensor, distance: Distance) -> Tensor:
    """``(n, n)``: Euclidean distances between rows, or 1 minus the inner products of rows from ``directions``.

    Euclidean distances are computed from differences; computing them from inner products would lose half of the digits.
    """
    if distance == "euclidean":
        return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    return 1 - rows @ rows.T


def directions(name: str, side: str, rows: Tensor, distance: Distance = "cosine") -> Tensor:
    """Normalise rows so that their inner products are cosines or correlations; keep them for Euclidean distances."""
    if distance == "euclidean":
        return rows
    if distance == "correlation":
        lengths = rows.norm(dim=1)
        rows = rows - rows.mean(1, keepdim=True)
        flat = rows.norm(dim=1) <= 8 * torch.finfo(rows.dtype).eps * lengths
    else:
        flat = rows.norm(dim=1) == 0
    if flat.any():
        what = "constant" if distance == "correlation" else "zero"
        raise ValueError(
            f"{name}: row {int(flat.nonzero()[0])} of {side} is {what}, so its {distance} to others is undefined; "
            "drop the row on both sides, or choose another distance if the metric has that option"
        )
    return rows / rows.norm(dim=1, keepdim=True)


def upper(matrix: Tensor) -> Tensor:
    """The entries above the diagonal, ``(n (n - 1) / 2,)``."""
    i, j = torch.triu_indices(len(matrix), len(matrix), 1, device=matrix.device)
    return matrix[i, j]


def centred(matrix: Tensor) -> Tensor:
    """Subtract the means of the rows and of the columns."""
    return matrix - matrix.mean(0) - matrix.mean(1, keepdim=True) + matrix.mean()
