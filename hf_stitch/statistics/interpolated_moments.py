"""Moments of positions on a grid that is interpolated to that of another layer, without interpolating them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from hf_stitch.statistics.base import Statistic, product
from hf_stitch.statistics.layer_moments import LayerMoments
from hf_stitch.statistics.moments import Moments
from hf_stitch.statistics.spectrum import eps_of

Grid = tuple[int, int]


class InterpolatedMoments(Statistic):
    """Moments of pairs of layers of two sides, of which the first is enlarged to the grid of the second (bilinear).

    Nothing is enlarged: with the matrix U that interpolates a small grid, ``(UX)ᵀUX = Xᵀ(UᵀU)X`` and
    ``(UX)ᵀY = Xᵀ(UᵀY)``. With the Cholesky factor of ``UᵀU = CCᵀ``, these are products of the rows ``CᵀX`` and
    ``C⁻¹UᵀY``, of which there are as many as small positions. Sums are taken about an origin, in float64. The moments
    of the second side alone need all of its positions; they are collected elsewhere, once for all grids of the first.
    """

    grids: Tensor
    layers: Tensor
    widths: Tensor
    origins: Tensor
    eps: Tensor  # of the coarsest dtype of each layer of the first side
    rows: LayerMoments

    def __init__(self, x: Sequence[Tensor], y: Sequence[Tensor], small: Grid, large: Grid) -> None:
        """Take the origin of each layer of both sides, and the grids."""
        super().__init__()
        if any(a > b for a, b in zip(small, large, strict=True)):
            raise ValueError(f"the second grid must be at least as high and as wide as the first, got {small}, {large}")
        device = x[0].device
        self._x, self._y = ([origin.double() for origin in side] for side in (x, y))
        factors = [_factors(a, b, device) for a, b in zip(small, large, strict=True)]
        self._root, self._adjoint = ([pair[place] for pair in factors] for place in (0, 1))
        # The adjoint of a constant, with which sums over the large grid follow from the small one.
        ones = torch.ones(1, math.prod(large), 1, dtype=torch.float64, device=device)
        self._ones = _along(self._adjoint, ones, large)
        self.add_state("grids", torch.tensor([small, large]), "same")
        self.add_state("layers", torch.tensor(len(x)), "same")
        self.add_state("widths", torch.tensor([len(origin) for origin in (*x, *y)]), "same")
        self.add_state("origins", torch.cat([*self._x, *self._y]), "same")
        self.add_state("eps", torch.zeros(len(x), dtype=torch.float64), "max")
        about = [[torch.zeros_like(origin) for origin in side] for side in (self._x, self._y)]
        self.add_part("rows", LayerMoments(about[0], [*about[1], self._ones.new_zeros(1)]))

    @classmethod
    def _like(cls, state: Mapping[str, Tensor]) -> Self:
        origins, layers = state["origins"].split(state["widths"].tolist()), int(state["layers"])
        small, large = (tuple(grid) for grid in state["grids"].tolist())
        return cls(origins[:layers], origins[layers:], small, large)

    @torch.no_grad()
    def update(self, x: Sequence[Tensor], y: Sequence[Tensor]) -> Self:
        """Add a batch, ``(batch, positions, width)`` for each layer."""
        small, large = (tuple(grid) for grid in self.grids.tolist())
        self.eps = torch.maximum(self.eps, eps_of(*x))
        first = [_along(self._root, v.to(o) - o, small) for v, o in zip(x, self._x, strict=True)]
        # The origin is subtracted where positions are few.
        second = [_along(self._adjoint, v.to(o), large) - self._ones * o for v, o in zip(y, self._y, strict=True)]
        second.append(self._ones.expand(len(x[0]), -1, -1))
        self.rows.update([rows.flatten(0, 1) for rows in first], [rows.flatten(0, 1) for rows in second])
        return self

    def moments(self, i: int, j: int, own: Moments) -> Moments:
        """Return the moments of a pair of layers; the y rows of ``own`` are all positions of the second side."""
        pair, ones = self.rows.moments(i, j), self.rows.moments(i, len(self._y))
        mean_x = _about_origin(ones.sxy, ones.mean_x, ones.mean_y, ones.n)[:, 0] / own.n
        mean_y = own.mean_y - self._y[j]
        sxx = _about_origin(pair.sxx, pair.mean_x, pair.mean_x, pair.n)
        sxy = _about_origin(pair.sxy, pair.mean_x, pair.mean_y, pair.n)
        return Moments.of(
            own.n, mean_x + self._x[i], own.mean_y, torch.addr(sxx, mean_x, mean_x, alpha=-own.n), own.syy,
            torch.addr(sxy, mean_x, mean_y, alpha=-own.n), torch.stack([self.eps[i], own.eps[1]]),
        )  # fmt: skip

    def __repr__(self) -> str:
        """Layers and grids."""
        small, large = self.grids.tolist()
        return f"InterpolatedMoments({len(self._x)} x {len(self._y)} layers, {small} -> {large})"


def _factors(small: int, large: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ``Cᵀ`` and ``C⁻¹Uᵀ`` of one axis, where U interpolates it and ``UᵀU = CCᵀ``."""
    unit = torch.eye(small, dtype=torch.float64)
    matrix = functional.interpolate(unit[None], size=large, mode="linear", align_corners=False)[0].T
    root = torch.linalg.cholesky(matrix.T @ matrix)
    return root.T.to(device), torch.linalg.solve_triangular(root, matrix.T, upper=False).to(device)


def _along(matrices: Sequence[Tensor], values: Tensor, grid: Grid) -> Tensor:
    """Multiply ``(batch, positions, d)`` on a grid by a matrix along each axis."""
    high = product(matrices[0], values.unflatten(1, grid).flatten(2))
    return product(matrices[1], high.unflatten(2, (grid[1], -1))).flatten(1, 2)


def _about_origin(centred: Tensor, mean_x: Tensor, mean_y: Tensor, n: int) -> Tensor:
    """Undo the centring of co-moments, whose rows are about an origin of zero."""
    return torch.addr(centred, mean_x, mean_y, alpha=n)
