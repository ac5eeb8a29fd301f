"""Directions of a side that vary by more than rounding errors.

Networks compute in float32 or less, while sums over their activations are float64, so the eps of the sums does not show
which directions are rounding errors. Outputs of a LayerNorm, for example, lie in a hyperplane: the true variance of one
direction is 0, and its measured variance is about ``eps²`` for the dtype of the layer. The inverse of this direction
would multiply rounding errors by ``1 / eps``.
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
"""Errors of features in float32 and float64, in units of eps; 1 in half precision, because its sums are float32.

Norms leave .2 (half precision) to 2 (float32, width 3072) in the direction that they remove.
"""
UNCERTAIN = 32.0
"""Uncertain directions have a standard deviation of at most this many errors: they count only if they explain the
target. Directions with at most the standard deviation of one error do not count."""
NEGLIGIBLE = 5e-4
"""Largest share of the variance of the target that all omitted uncertain directions may explain together."""

NOTHING_VARIES = "{} does not vary by more than rounding in its dtype; run the network in a wider dtype"

Side = Literal["x", "y"]


class SecondMoments(Protocol):
    """Counts, means, co-moments of two sides, and the machine epsilons of their rows, as in ``Moments``."""

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

    An error e is relative to the rounded number, so it also grows with the mean of a feature: eps in half precision,
    else ``ROUNDINGS`` times eps. The largest singular value of a matrix of n × d independent errors is at most
    ``√n + √d`` times their standard deviation.
    """
    mean, scatter = (moments.mean_x, moments.sxx) if side == "x" else (moments.mean_y, moments.syy)
    n, eps = moments.n, float(moments.eps["xy".index(side)])
    error = eps if eps > HALF else ROUNDINGS * eps
    squares = mean.square() + scatter.diagonal().detach().clamp(min=0) / n
    return (error * (math.sqrt(n) + math.sqrt(len(mean)))) ** 2 * squares.detach()


def above_rounding(values: Tensor, vectors: Tensor, errors: Tensor, times: float = 1.0) -> Tensor:
    """Return which eigenvectors of a scatter matrix, ``(d, k)``, vary by more than rounding, ``(k,)`` bool.

    ``errors`` is the output of :func:`rounding`.
    """
    least = times**2 * (vectors.square() * errors[:, None]).sum(0)
    return values > torch.clamp(least, min=float(len(values) * EPS * values.max()))


@dataclass(frozen=True)
class Spectrum:
    """Directions of a side that vary by more than a threshold."""

    values: Tensor  # (rank,) eigenvalues of the scatter (sxx), ascending: the squared singular values of the rows
    vectors: Tensor  # (d, rank) eigenvectors
    rcond: float  # threshold for singular values, as a share of the largest one

    @classmethod
    def of(
        cls, moments: SecondMoments, side: Side = "x", rcond: float | None = None, sxy: Tensor | None = None
    ) -> Spectrum:
        """Decompose the scatter matrix of a side.

        Directions with a singular value of at most ``rcond`` times the largest are left out. None leaves out directions
        that are rounding errors in the dtype of the rows, and, with the co-moments ``sxy`` of this side with the second
        side, uncertain directions that do not explain the second side.
        """
        values, vectors = torch.linalg.eigh(moments.sxx if side == "x" else moments.syy)
        if rcond is not None:
            significant = values > rcond**2 * values[-1]
            return cls(values[significant], vectors[:, significant], rcond)
        errors = rounding(moments, side)
        significant = above_rounding(values, vectors, errors)
        if sxy is not None:
            total = (moments.syy if side == "x" else moments.sxx).trace()
            explained = (vectors.T @ sxy).square().sum(1) / torch.where(significant, values, torch.inf)
            doubtful = significant & ~above_rounding(values, vectors, errors, UNCERTAIN)
            # Drop the directions nearest to rounding first.
            shares = torch.where(doubtful, explained, 0).cumsum(0) / total
            significant &= ~(doubtful & (shares <= NEGLIGIBLE))
        if not significant.any():
            raise ValueError(NOTHING_VARIES.format(side))
        largest = torch.where(significant, 0, values).max().clamp(min=float(len(values) * EPS * values[-1]))
        return cls(values[significant], vectors[:, significant], float((largest / values[-1]).sqrt()))

    @property
    def rank(self) -> int:
        """Number of directions: the numerical rank of the side."""
        return len(self.values)

    def solve(self, sxy: Tensor, ridge: float = 0.0) -> Tensor:
        """Return ``(dx, dy)`` the W that minimises ``‖XW - Y‖² + ridge · ‖W‖²``; without ridge, of minimum norm."""
        return self.vectors @ ((self.vectors.T @ sxy) / (self.values + ridge)[:, None])
