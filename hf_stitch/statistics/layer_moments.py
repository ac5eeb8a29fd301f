"""Moments of all pairs of layers of two sides, streamed in float64, as d × d co-moments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from hf_stitch.statistics.base import Statistic, product, within
from hf_stitch.statistics.grams import HSIC, unbiased_pairs
from hf_stitch.statistics.moments import Moments
from hf_stitch.statistics.spectrum import eps_of

# Smallest number of rows multiplied at a time (smaller products would mostly read and write the co-moments), and number
# of buffered values, which allows more rows of narrow layers.
_BUFFER_ROWS, _BUFFER = 512, 2**18


class LayerMoments(Statistic):
    """First and second moments of the rows of every layer of two sides, and of all pairs of layers, in float64.

    Sums are taken about an ``origin`` near the mean, for example the mean of a few rows, so that means far from zero do
    not reduce precision. Each layer has one additional feature, its squared distance from the origin; the co-moments
    with this feature are sufficient for unbiased estimates of HSIC. Rows are buffered for a fast product, so the result
    is bit-identical for any batching. Memory is ``8 · Σ dx · Σ dy`` bytes plus a small buffer.
    """

    count: Tensor
    cross: Tensor  # co-moments of every layer of x with every layer of y, about the origins

    def __init__(self, x: Sequence[Tensor], y: Sequence[Tensor] | None = None) -> None:
        """Set the origin of each layer; without ``y``, both sides are the same layers, which halves the cost."""
        super().__init__()
        self._x = _Side(x)
        self._y = self._x if y is None else _Side(y)
        self._rows = max(_BUFFER_ROWS, _BUFFER // sum(len(side.sums) for side in self._sides))
        for side in self._sides:
            side.buffer = side.sums.new_empty(self._rows, len(side.sums))
        self.add_part("x", self._x)
        if not self._same:
            self.add_part("y", self._y)
        self.add_state("count", torch.tensor(0), "sum")
        self.add_state("cross", self._x.sums.new_zeros(len(self._x.sums), len(self._y.sums)), "sum")

    @classmethod
    def _like(cls, state: Mapping[str, Tensor]) -> Self:
        sides = [within(f"{key}.", state) for key in "xy" if key == "x" or f"{key}.widths" in state]
        return cls(*(side["origin"].split(side["widths"].tolist()) for side in sides))

    @property
    def n(self) -> int:
        """Number of rows seen."""
        return int(self.count)

    @torch.no_grad()
    def update(self, x: Sequence[Tensor], y: Sequence[Tensor] | None = None) -> Self:
        """Add a batch of rows of every layer. Row i must be the same sample in every layer."""
        n = len(x[0]) if x else 0
        if self._same and y is not None:
            raise ValueError("both sides are the same layers; pass the rows of the first side only")
        sides = [(side, rows or []) for side, rows in zip(self._sides, (x, y), strict=False)]
        for side, rows in sides:
            side.check(rows, n)
        start = 0
        while start < n:
            count = min(n - start, self._rows - self._x.filled)
            for side, rows in sides:
                side.put([layer[start : start + count] for layer in rows])
            start += count
            if self._x.filled == self._rows:
                self._settle()
        self.count = self.count + n
        return self

    def moments(self, i: int, j: int) -> Moments:
        """Return the moments of layer i of the first side and layer j of the second side."""
        self._settle()
        means, owns = (
            [function(self._x, i), function(self._y, j)]
            for function in (lambda side, layer: side.origins[layer] + self._offset(side, layer), self._own)
        )
        sxx, syy, sxy = (scatter[:-1, :-1] for scatter in (*owns, self._scatter(i, j)))
        eps = torch.stack([self._x.eps[i], self._y.eps[j]])
        return Moments.of(self.n, means[0], means[1], sxx, syy, sxy, eps)

    def hsic(self, debiased: bool = False) -> HSIC:
        """Compute HSIC of every pair: ``‖XᵀY‖²`` of centred rows, or the unbiased estimator (Song et al. 2012)."""
        self._settle()
        own_x, own_y = ([self._own(side, i) for i in range(len(side.blocks))] for side in (self._x, self._y))
        squares = HSIC(_stack(own_x, _squares), self._pairs(lambda pair, i, j: _squares(pair)), _stack(own_y, _squares))
        if not debiased:
            return squares
        # The squared distance of a row from the mean is, up to a constant, linear in all its features.
        wx, wy = ([self._length(side, i) for i in range(len(side.blocks))] for side in (self._x, self._y))
        traces_x, traces_y = (_stack(square, lambda matrix: matrix.diagonal()[:-1].sum()) for square in (own_x, own_y))
        lengths = HSIC(
            torch.stack([w @ square @ w for w, square in zip(wx, own_x, strict=True)]) + traces_x**2 / self.n,
            self._pairs(lambda pair, i, j: wx[i] @ pair @ wy[j]) + torch.outer(traces_x, traces_y) / self.n,
            torch.stack([w @ square @ w for w, square in zip(wy, own_y, strict=True)]) + traces_y**2 / self.n,
        )
        return unbiased_pairs(self.n, squares, traces_x, traces_y, lengths)

    def __repr__(self) -> str:
        return f"LayerMoments({len(self._x.blocks)} x {len(self._y.blocks)} layers, n={self.n})"

    @property
    def _same(self) -> bool:
        return self._y is self._x

    @property
    def _sides(self) -> list[_Side]:
        return [self._x] if self._same else [self._x, self._y]

    def _settle(self) -> None:
        """Multiply the buffered rows and add the products to the sums."""
        if not self._x.filled:
            return
        x, y = (side.buffer[: side.filled] for side in (self._x, self._y))
        if self._same:
            for block in self._x.blocks:  # above the diagonal
                self.cross[block, block.stop :] += product(x[:, block].T, x[:, block.stop :])
        else:
            for block in self._x.blocks:
                self.cross[block] += product(x[:, block].T, y)
        for side in self._sides:
            side.settle()

    def _scatter(self, i: int, j: int) -> Tensor:
        """Return co-moments of layer i of x and layer j of y about their means, with the additional feature last."""
        if self._same and i == j:
            return self._own(self._x, i)
        if self._same and j < i:
            return self._scatter(j, i).T
        x, y = self._x.blocks[i], self._y.blocks[j]
        return torch.addr(self.cross[x, y], self._x.sums[x], self._y.sums[y], alpha=-1 / self.n)

    def _own(self, side: _Side, i: int) -> Tensor:
        """Return the co-moments of a layer with itself."""
        sums = side.sums[side.blocks[i]]
        return torch.addr(side.owns[i], sums, sums, alpha=-1 / self.n)

    def _offset(self, side: _Side, i: int) -> Tensor:
        """Return the mean of a layer minus its origin."""
        return side.sums[side.blocks[i]][:-1] / self.n

    def _length(self, side: _Side, i: int) -> Tensor:
        return torch.cat([-2 * self._offset(side, i), side.sums.new_ones(1)])

    def _pairs(self, number: Callable[[Tensor, int, int], Tensor]) -> Tensor:
        """Compute a number from the co-moments of every pair, centring one pair at a time."""
        rows, columns = len(self._x.blocks), len(self._y.blocks)
        return torch.stack(
            [torch.stack([number(self._scatter(i, j), i, j) for j in range(columns)]) for i in range(rows)]
        )


class _Side(Statistic):
    """Layers of a side, side by side in one buffer: rows about the origin, each with its squared length."""

    sums: Tensor
    own: Tensor
    eps: Tensor  # of the coarsest dtype of each layer
    buffer: Tensor
    pending: list[Tensor]  # the filled part of the buffer, if any

    def __init__(self, origins: Sequence[Tensor]) -> None:
        if not origins or any(origin.dim() != 1 or not len(origin) for origin in origins):
            raise ValueError(f"a side requires layers of width >= 1, got origins {[tuple(o.shape) for o in origins]}")
        super().__init__()
        self.origins = [origin.double() for origin in origins]
        self._sizes = sizes = [len(origin) + 1 for origin in origins]
        self.blocks = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        self.add_state("widths", torch.tensor([len(origin) for origin in origins]), "same")
        self.add_state("origin", torch.cat(self.origins), "same")
        self.add_state("sums", self.origins[0].new_zeros(sum(sizes)), "sum")
        self.add_state("own", self.sums.new_zeros(sum(size**2 for size in sizes)), "sum")
        self.add_state("eps", torch.zeros(len(origins), dtype=torch.float64), "max")
        self.add_state("pending", None, "cat")

    @classmethod
    def _like(cls, state: Mapping[str, Tensor]) -> Self:
        return cls(state["origin"].split(state["widths"].tolist()))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> Self:
        super().load_state_dict(state)
        if self.pending:
            self.buffer[: self.filled] = self.pending[0]
            self.pending = [self.buffer[: self.filled]]
        return self

    @property
    def filled(self) -> int:
        """Number of buffered rows."""
        return len(self.pending[0]) if self.pending else 0

    @property
    def owns(self) -> list[Tensor]:
        """The co-moments of each layer with itself."""
        flat = self.own.split([size**2 for size in self._sizes])
        return [comoments.view(size, size) for comoments, size in zip(flat, self._sizes, strict=True)]

    def check(self, rows: Sequence[Tensor], n: int) -> None:
        expected = [(n, len(origin)) for origin in self.origins]
        if (got := [tuple(layer.shape) for layer in rows]) != expected:
            raise ValueError(f"rows must have the shapes {expected}, one per layer, got {got}")

    def put(self, rows: Sequence[Tensor]) -> None:
        start, end = self.filled, self.filled + len(rows[0])
        self.eps = torch.maximum(self.eps, eps_of(*rows))
        for block, origin, layer in zip(self.blocks, self.origins, rows, strict=True):
            block_rows = self.buffer[start:end, block]
            features = block_rows[:, :-1].copy_(layer).sub_(origin)
            block_rows[:, -1] = features.square().sum(1)
        self.pending = [self.buffer[:end]]

    def settle(self) -> None:
        """Add the buffered rows to the sums."""
        rows = self.buffer[: self.filled]
        self.sums += rows.sum(0)
        for block, comoments in zip(self.blocks, self.owns, strict=True):
            comoments += product(rows[:, block].T, rows[:, block])
        self.pending = []


def _stack(matrices: list[Tensor], number: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.stack([number(matrix) for matrix in matrices])


def _squares(matrix: Tensor) -> Tensor:
    """Compute the squared norm without the row and column of the additional feature."""
    return matrix[:-1, :-1].square().sum()


Grid = tuple[int, int]


class InterpolatedMoments(Statistic):
    """Moments of pairs of layers of two sides, with the first side interpolated to the grid of the second (bilinear).

    The interpolation is implicit: with the matrix U that interpolates a small grid, ``(UX)ᵀUX = Xᵀ(UᵀU)X`` and
    ``(UX)ᵀY = Xᵀ(UᵀY)``. With the Cholesky factor of ``UᵀU = CCᵀ``, these are products of the rows ``CᵀX`` and
    ``C⁻¹UᵀY``, one for each position of the small grid. Sums are taken about an origin, in float64. The moments of the
    second side alone require all of its positions; they are collected elsewhere, once for all grids of the first side.
    """

    grids: Tensor
    layers: Tensor
    widths: Tensor
    origins: Tensor
    eps: Tensor  # of the coarsest dtype of each layer of the first side
    rows: LayerMoments

    def __init__(self, x: Sequence[Tensor], y: Sequence[Tensor], small: Grid, large: Grid) -> None:
        """Set the origin of each layer of both sides, and the grids."""
        super().__init__()
        if any(a > b for a, b in zip(small, large, strict=True)):
            raise ValueError(f"the second grid must be at least as high and wide as the first, got {small} and {large}")
        device = x[0].device
        self._x, self._y = ([origin.double() for origin in side] for side in (x, y))
        factors = [_factors(a, b, device) for a, b in zip(small, large, strict=True)]
        self._root, self._adjoint = ([pair[index] for pair in factors] for index in (0, 1))
        # The adjoint of a constant, to compute sums over the large grid from the small grid.
        ones = torch.ones(1, math.prod(large), 1, dtype=torch.float64, device=device)
        self._ones = _along(self._adjoint, ones, large)
        self.add_state("grids", torch.tensor([small, large]), "same")
        self.add_state("layers", torch.tensor(len(x)), "same")
        self.add_state("widths", torch.tensor([len(origin) for origin in (*x, *y)]), "same")
        self.add_state("origins", torch.cat([*self._x, *self._y]), "same")
        self.add_state("eps", torch.zeros(len(x), dtype=torch.float64), "max")
        zeros = [[torch.zeros_like(origin) for origin in side] for side in (self._x, self._y)]
        self.add_part("rows", LayerMoments(zeros[0], [*zeros[1], self._ones.new_zeros(1)]))

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
        rows_x = [_along(self._root, v.to(o) - o, small) for v, o in zip(x, self._x, strict=True)]
        # Subtract the origin on the small grid.
        rows_y = [_along(self._adjoint, v.to(o), large) - self._ones * o for v, o in zip(y, self._y, strict=True)]
        rows_y.append(self._ones.expand(len(x[0]), -1, -1))
        self.rows.update([rows.flatten(0, 1) for rows in rows_x], [rows.flatten(0, 1) for rows in rows_y])
        return self

    def moments(self, i: int, j: int, full_y: Moments) -> Moments:
        """Return the moments of a pair of layers; ``full_y`` has all positions of the second side as y rows."""
        pair, ones = self.rows.moments(i, j), self.rows.moments(i, len(self._y))
        mean_x = _about_origin(ones.sxy, ones.mean_x, ones.mean_y, ones.n)[:, 0] / full_y.n
        mean_y = full_y.mean_y - self._y[j]
        sxx = _about_origin(pair.sxx, pair.mean_x, pair.mean_x, pair.n)
        sxy = _about_origin(pair.sxy, pair.mean_x, pair.mean_y, pair.n)
        return Moments.of(
            full_y.n, mean_x + self._x[i], full_y.mean_y, torch.addr(sxx, mean_x, mean_x, alpha=-full_y.n), full_y.syy,
            torch.addr(sxy, mean_x, mean_y, alpha=-full_y.n), torch.stack([self.eps[i], full_y.eps[1]]),
        )  # fmt: skip

    def __repr__(self) -> str:
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
    """Undo the centring of co-moments with rows about an origin of zero."""
    return torch.addr(centred, mean_x, mean_y, alpha=n)
