"""Least squares from moments, shared by lstsq, ridge and low_rank; and checks that every fit needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from hf_stitch.errors import see
from hf_stitch.options import Within
from hf_stitch.statistics import Moments

Rcond = Annotated[float, Within(0, 1, below=True)] | None
"""Threshold on relative singular values; ``None`` for the default."""
EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Spectrum:
    """The directions of a side whose singular value exceeds a threshold relative to the largest."""

    values: Tensor  # (rank,) eigenvalues of the scatter (sxx), ascending: the squared singular values of the rows
    vectors: Tensor  # (d, rank) eigenvectors

    @classmethod
    def of(cls, scatter: Tensor, rcond: float) -> Spectrum:
        """Decompose a scatter matrix and keep the eigenvalues above ``rcond²`` times the largest."""
        values, vectors = torch.linalg.eigh(scatter)
        kept = values > rcond**2 * values[-1]
        return cls(values[kept], vectors[:, kept])

    @property
    def rank(self) -> int:
        """Number of directions kept: the numerical rank of the side."""
        return len(self.values)

    def solve(self, sxy: Tensor, ridge: float = 0.0) -> Tensor:
        """``(dx, dy)``: the W that minimises ``‖XW - Y‖² + ridge · ‖W‖²``; without ridge, of minimum norm."""
        return self.vectors @ ((self.vectors.T @ sxy) / (self.values + ridge)[:, None])


def default_rcond(width: int) -> float:
    """``sqrt(width · eps)``: in a float64 ``sxx``, eigenvalues below ``width · eps`` of the largest are rounding."""
    return math.sqrt(width * EPS)


def require(moments: Moments, rows: int, remedy: str = "give more rows") -> None:
    """Check that moments determine a fit: at least ``rows`` rows, and variation on both sides."""
    if moments.n < rows:
        raise ValueError(
            f"fitting {moments.dx} to {moments.dy} features needs at least {rows} rows, got {moments.n}; {remedy}"
            + see("too-few-samples")
        )
    for side, scatter, mean in (("x", moments.sxx, moments.mean_x), ("y", moments.syy, moments.mean_y)):
        # Equal rows may have a small variance, because their mean is rounded.
        if scatter.trace() <= moments.n * (8 * EPS * mean.norm()) ** 2:
            raise ValueError(f"all {moments.n} rows of {side} are equal: there is nothing to match; is the layer dead?")
