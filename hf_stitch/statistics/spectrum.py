"""Which directions of a side vary by more than rounding.

Networks compute in float32 or less, while sums over their activations are float64: the eps of the sums does not tell
which of their directions are rounding. Outputs of a LayerNorm, for example, lie in a hyperplane, so that one direction
has no variance, and a measured one of about ``eps²`` of the dtype in which the layer was computed. Its inverse would
multiply rounding errors by ``1 / eps``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

EPS = torch.finfo(torch.float64).eps
HALF = 1e-5  # eps of half precision is larger
ROUNDINGS = 4.0
"""Errors of features in float32 and float64, in units of eps; in half precision, whose sums are float32, they are 1.

Norms leave .2 (half precision) to 2 (float32, width 3072) in the direction that they remove.
"""
UNCERTAIN = 32.0
"""A direction whose standard deviation is at most that of so many errors counts only if it explains something of the
target; one whose standard deviation is at most that of one error does not count."""
NEGLIGIBLE = 5e-4
"""Share of the variance of the target that all uncertain directions left out may explain together."""

NOTHING_VARIES = "{} does not vary by more than rounding in its dtype: run the network in a wider dtype"

Side = Literal["x", "y"]


class SecondMoments(Protocol):
    """Counts, means, co-moments of two sides, and the machine epsilons of their rows, as ``Moments`` has them."""

    @property
    def n(self) -> int:
        """Number of rows."""

    @property
    def mean_x(self) -> Tensor:
        """Means of x, ``(dx,)``."""

    @property
    def mean_y(self) -> Tensor:
        """Means of y, ``(dy,)``."""

    @property
    def sxx(self) -> Tensor:
        """Co-moments of x, ``(dx, dx)``."""

    @property
    def syy(self) -> Tensor:
        """Co-moments of y, ``(dy, dy)``."""

    @property
    def sxy(self) -> Tensor:
        """Co-moments of x with y, ``(dx, dy)``."""

    @property
    def eps(self) -> Tensor:
        """Machine epsilons of the rows of x and of y."""


def eps_of(*rows: Tensor) -> Tensor:
    """Return the machine epsilon of the dtype of each matrix of rows, float64."""
    return torch.tensor([torch.finfo(side.dtype).eps for side in rows], dtype=torch.float64)


def rounding(moments: SecondMoments, side: Side) -> Tensor:
    """Return the scatter of rounding errors of each feature of a side, ``(e (√n + √d))² E[f²]``, ``(d,)`` float64.

    An error e is relative to the number that is rounded, so that it grows with the mean of a feature, too: eps in half
    precision, else ``ROUNDINGS`` times eps. The largest singular value of a matrix of n × d independent errors is at
    most ``√n + √d`` times their standard deviation.
    """
    mean, scatter = (moments.mean_x, moments.sxx) if side == "x" else (moments.mean_y, moments.syy)
    n, eps = moments.n, float(moments.eps["xy".index(side)])
    error = eps if eps > HALF else ROUNDINGS * eps
    squares = mean.square() + scatter.diagonal().detach().clamp(min=0) / n
    return (error * (math.sqrt(n) + math.sqrt(len(mean)))) ** 2 * squares.detach()


def above_rounding(values: Tensor, vectors: Tensor, errors: Tensor, times: float = 1.0) -> Tensor:
    """Return which eigenvectors of a scatter matrix, ``(d, k)``, vary by more than rounding, ``(k,)`` bool.

    ``errors`` are those of each feature, as :func:`rounding` returns them.
    """
    least = times**2 * (vectors.square() * errors[:, None]).sum(0)
    return values > torch.clamp(least, min=float(len(values) * EPS * values.max()))


@dataclass(frozen=True)
class Spectrum:
    """The directions of a side that vary by more than a threshold."""

    values: Tensor  # (rank,) eigenvalues of the scatter (sxx), ascending: the squared singular values of the rows
    vectors: Tensor  # (d, rank) eigenvectors
    rcond: float  # the largest singular value that may be left out, as a share of the largest of all

    @classmethod
    def of(
        cls, moments: SecondMoments, side: Side = "x", rcond: float | None = None, sxy: Tensor | None = None
    ) -> Spectrum:
        """Decompose the scatter matrix of a side.

        Directions are left out whose singular value is at most ``rcond`` times the largest; with None, directions that
        are rounding in the dtype of the rows, and, with the co-moments ``sxy`` of this side with the other one, those
        that may be rounding and explain nothing of it.
        """
        values, vectors = torch.linalg.eigh(moments.sxx if side == "x" else moments.syy)
        if rcond is not None:
            kept = values > rcond**2 * values[-1]
            return cls(values[kept], vectors[:, kept], rcond)
        errors = rounding(moments, side)
        kept = above_rounding(values, vectors, errors)
        if sxy is not None:
            total = (moments.syy if side == "x" else moments.sxx).trace()
            explained = (vectors.T @ sxy).square().sum(1) / torch.where(kept, values, torch.inf)
            doubtful = kept & ~above_rounding(values, vectors, errors, UNCERTAIN)
            # Those nearest to rounding go first; the others are needed.
            shares = torch.where(doubtful, explained, 0).cumsum(0) / total
            kept &= ~(doubtful & (shares <= NEGLIGIBLE))
        if not kept.any():
            raise ValueError(NOTHING_VARIES.format(side))
        largest = torch.where(kept, 0, values).max().clamp(min=float(len(values) * EPS * values[-1]))
        return cls(values[kept], vectors[:, kept], float((largest / values[-1]).sqrt()))

    @property
    def rank(self) -> int:
        """Number of directions: the numerical rank of the side."""
        return len(self.values)

    def solve(self, sxy: Tensor, ridge: float = 0.0) -> Tensor:
        """``(dx, dy)``: the W that minimises ``‖XW - Y‖² + ridge · ‖W‖²``; without ridge, of minimum norm."""
        return self.vectors @ ((self.vectors.T @ sxy) / (self.values + ridge)[:, None])
