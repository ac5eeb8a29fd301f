"""All pairs of layers of two sides at once, by their co-moments (d × d), streamed in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_stitch.statistics.hsic import HSIC, unbiased_pairs
from hf_stitch.statistics.moments import Moments

if TYPE_CHECKING:
    from accelerate import Accelerator


# Rows that are multiplied at a time: a product of fewer would mostly read and write the co-moments.
_CHUNK = 512


class LayerMoments:
    """First and second moments of the rows of every layer of two sides, and of all pairs of them, in float64.

    Sums are taken about an ``origin`` near the mean, the mean of a few rows for instance, so that means far from zero
    cost no precision. Each layer has one feature more, its squared distance from the origin: the co-moments of these
    are all that unbiased estimates of HSIC need beside. Rows are gathered until there are enough for a fast product,
    so that batching does not change a bit. Memory is ``8 · Σ dx · Σ dy`` bytes and little more.

    Attributes:
        n: Number of rows seen.

    Args:
        x: The origin of each layer of the first side, ``(dx,)`` each, on the device where all is kept.
        y: Of the second side; ``None``: it is the first side once more, which saves half.

    Example:
        >>> rows = [torch.randn(20, 3), torch.randn(20, 5)]
        >>> kept = LayerMoments([torch.zeros(3), torch.zeros(5)]).update(rows)
        >>> kept.moments(0, 1)
        Moments(dx=3, dy=5, n=20, device='cpu')
        >>> kept.hsic().xy.shape
        torch.Size([2, 2])
    """

    def __init__(self, x: Sequence[Tensor], y: Sequence[Tensor] | None = None) -> None:
        self._x = _Side(x)
        self._y = self._x if y is None else _Side(y)
        self._cross = self._x.sums.new_zeros(len(self._x.sums), len(self._y.sums))
        self._seen = self._pending = 0

    @property
    def n(self) -> int:
        """Number of rows seen."""
        return self._seen

    @torch.no_grad()
    def update(self, x: Sequence[Tensor], y: Sequence[Tensor] | None = None) -> LayerMoments:
        """Add a batch: the rows of every layer, of any float dtype; row i is the same everywhere.

        Args:
            x: ``(n, dx)`` for each layer of the first side.
            y: ``(n, dy)`` for each layer of the second; left out if that is the first.

        Returns:
            These moments.

        Raises:
            ValueError: Layers are missing or too many, or rows do not pair up or are not as wide as their origin.
        """
        n = len(x[0]) if x else 0
        if self._same and y is not None:
            raise ValueError("the second side is the first here; leave out its rows")
        sides = [(side, rows or []) for side, rows in zip(self._sides().values(), (x, y), strict=False)]
        for side, rows in sides:
            side.check(rows, n)
        done = 0
        while done < n:
            count = min(n - done, _CHUNK - self._pending)
            for side, rows in sides:
                side.put(self._pending, [layer[done : done + count] for layer in rows])
            done, self._pending = done + count, self._pending + count
            if self._pending == _CHUNK:
                self._multiply()
        self._seen += n
        return self

    def all_reduce(self, accelerator: Accelerator) -> LayerMoments:
        """Give every process the moments of the rows of all; to be called once, by all, after the last row.

        The origins must be the same everywhere.

        Args:
            accelerator: The ``accelerate.Accelerator`` that knows the processes.

        Returns:
            These moments.
        """
        if accelerator.num_processes == 1:
            return self
        self._multiply()
        for part in self._sums().values():
            part.copy_(total_over_processes(part, accelerator))
        self._seen = int(total_over_processes(torch.tensor(self._seen), accelerator))
        return self

    def moments(self, i: int, j: int) -> Moments:
        """The moments of layer i of the first side and layer j of the second."""
        self._multiply()
        state = {"n": torch.tensor(self.n), "sxy": self._scatter(i, j)}
        for key, side, place in (("x", self._x, i), ("y", self._y, j)):
            state[f"mean_{key}"] = side.origins[place] + self._offset(side, place)
            state[f"s{key}{key}"] = self._own(side, place)
        return Moments.from_state_dict({
            key: part[:-1, :-1] if part.dim() == 2 else part for key, part in state.items()
        })  # fmt: skip

    def hsic(self, debiased: bool = False) -> HSIC:
        """HSIC of every pair: ``‖XᵀY‖²`` of centred rows, or the unbiased estimate (Song et al. 2012).

        Raises:
            ValueError: Fewer than 4 rows, if debiased.
        """
        self._multiply()
        own_x, own_y = ([self._own(side, i) for i in range(len(side.blocks))] for side in (self._x, self._y))
        squares = HSIC(_stack(own_x, _squares), self._pairs(lambda pair, i, j: _squares(pair)), _stack(own_y, _squares))
        if not debiased:
            return squares
        # The squared distance of a row from the mean is, up to a constant, linear in its features and the added one.
        to_x, to_y = ([self._length(side, i) for i in range(len(side.blocks))] for side in (self._x, self._y))
        traces_x, traces_y = (_stack(own, lambda part: part.diagonal()[:-1].sum()) for own in (own_x, own_y))
        lengths = HSIC(
            torch.stack([w @ own @ w for w, own in zip(to_x, own_x, strict=True)]) + traces_x**2 / self.n,
            self._pairs(lambda pair, i, j: to_x[i] @ pair @ to_y[j]) + torch.outer(traces_x, traces_y) / self.n,
            torch.stack([w @ own @ w for w, own in zip(to_y, own_y, strict=True)]) + traces_y**2 / self.n,
        )
        return unbiased_pairs(self.n, squares, traces_x, traces_y, lengths)

    def state_dict(self) -> dict[str, Tensor]:
        """All there is as tensors, rows that wait to be multiplied too, ready for safetensors."""
        sides = self._sides().items()
        pending = {f"{key}.pending": side.buffer[: self._pending].clone() for key, side in sides}
        widths = {f"{key}.widths": torch.tensor([len(origin) for origin in side.origins]) for key, side in sides}
        sums = {key: part.clone() for key, part in self._sums().items()}
        return {"n": torch.tensor(self.n), **self._origins(), **widths, **sums, **pending}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> LayerMoments:
        """Rebuild what ``state_dict`` gave, bit for bit, on the device of its tensors.

        Raises:
            ValueError: A key is missing or unknown, or a tensor is not what it should be.
        """
        sides = [key for key in "xy" if f"{key}.origin" in state and f"{key}.widths" in state]
        if not sides or not {"n", *(f"{key}.pending" for key in sides)} <= state.keys():
            raise ValueError(f"a state of LayerMoments has n, x.origin, x.widths, x.pending …, got {sorted(state)}")
        built = cls(*(state[f"{key}.origin"].split(state[f"{key}.widths"].tolist()) for key in sides))
        if (expected := built.state_dict().keys()) != state.keys():
            raise ValueError(f"a state of LayerMoments has the keys {sorted(expected)}, got {sorted(state)}")
        for key, part in built._sums().items():
            if state[key].shape != part.shape or state[key].dtype != part.dtype:
                raise ValueError(f"{key} of a state of LayerMoments must be float64 of shape {tuple(part.shape)}")
            part.copy_(state[key])
        built._seen, built._pending = int(state["n"]), len(state["x.pending"])
        for key, side in built._sides().items():
            side.buffer[: built._pending] = state[f"{key}.pending"]
        return built

    def __repr__(self) -> str:
        """Layers and rows seen."""
        return f"LayerMoments({len(self._x.blocks)} x {len(self._y.blocks)} layers, n={self.n})"

    @property
    def _same(self) -> bool:
        return self._y is self._x

    def _sides(self) -> dict[str, _Side]:
        return {"x": self._x} if self._same else {"x": self._x, "y": self._y}

    def _origins(self) -> dict[str, Tensor]:
        return {f"{key}.origin": torch.cat(side.origins) for key, side in self._sides().items()}

    def _sums(self) -> dict[str, Tensor]:
        """What adds up over rows."""
        sides = self._sides().items()
        return {
            "cross": self._cross,
            **{f"{key}.sums": side.sums for key, side in sides},
            **{f"{key}.own": side.own for key, side in sides},
        }

    def _multiply(self) -> None:
        """Take the rows gathered into the sums."""
        if not self._pending:
            return
        x, y = (side.buffer[: self._pending] for side in (self._x, self._y))
        if self._same:
            for block in self._x.blocks:  # above the diagonal
                self._cross[block, block.stop :].addmm_(x[:, block].T, x[:, block.stop :])
        else:
            self._cross.addmm_(x.T, y)
        for side in self._sides().values():
            side.add(self._pending)
        self._pending = 0

    def _scatter(self, i: int, j: int) -> Tensor:
        """Co-moments of layer i of x and layer j of y about their means, the added feature last."""
        if self._same and i == j:
            return self._own(self._x, i)
        if self._same and j < i:
            return self._scatter(j, i).T
        x, y = self._x.blocks[i], self._y.blocks[j]
        return torch.addr(self._cross[x, y], self._x.sums[x], self._y.sums[y], alpha=-1 / self.n)

    def _own(self, side: _Side, i: int) -> Tensor:
        """Co-moments of a layer with itself."""
        sums = side.sums[side.blocks[i]]
        return torch.addr(side.owns[i], sums, sums, alpha=-1 / self.n)

    def _offset(self, side: _Side, i: int) -> Tensor:
        """The mean of a layer less its origin."""
        return side.sums[side.blocks[i]][:-1] / self.n

    def _length(self, side: _Side, i: int) -> Tensor:
        return torch.cat([-2 * self._offset(side, i), side.sums.new_ones(1)])

    def _pairs(self, number: Callable[[Tensor, int, int], Tensor]) -> Tensor:
        """A number of the co-moments of every pair; one pair is centred at a time."""
        rows, columns = len(self._x.blocks), len(self._y.blocks)
        return torch.stack(
            [torch.stack([number(self._scatter(i, j), i, j) for j in range(columns)]) for i in range(rows)]
        )


class _Side:
    """The layers of a side, next to each other in one buffer: of each its rows about the origin and their lengths."""

    def __init__(self, origins: Sequence[Tensor]) -> None:
        if not origins or any(origin.dim() != 1 or not len(origin) for origin in origins):
            raise ValueError(f"a side needs layers of width >= 1, got origins {[tuple(o.shape) for o in origins]}")
        self.origins = [origin.double() for origin in origins]
        sizes = [len(origin) + 1 for origin in origins]
        self.blocks = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        self.buffer = self.origins[0].new_empty(_CHUNK, sum(sizes))
        self.sums = self.origins[0].new_zeros(sum(sizes))
        self.own = self.sums.new_zeros(sum(size**2 for size in sizes))
        parts = self.own.split([size**2 for size in sizes])
        self.owns = [part.view(size, size) for part, size in zip(parts, sizes, strict=True)]

    def check(self, rows: Sequence[Tensor], n: int) -> None:
        expected = [(n, len(origin)) for origin in self.origins]
        if (got := [tuple(layer.shape) for layer in rows]) != expected:
            raise ValueError(f"rows must have the shapes {expected}, a layer each, got {got}")

    def put(self, place: int, rows: Sequence[Tensor]) -> None:
        for block, origin, layer in zip(self.blocks, self.origins, rows, strict=True):
            part = self.buffer[place : place + len(layer), block]
            features = part[:, :-1].copy_(layer).sub_(origin)
            part[:, -1] = features.square().sum(1)

    def add(self, count: int) -> None:
        """Take the first rows of the buffer into the sums."""
        rows = self.buffer[:count]
        self.sums += rows.sum(0)
        for block, own in zip(self.blocks, self.owns, strict=True):
            own.addmm_(rows[:, block].T, rows[:, block])


def _stack(parts: list[Tensor], number: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.stack([number(part) for part in parts])


def _squares(matrix: Tensor) -> Tensor:
    """The squared norm of what belongs to the features; the one added is left out."""
    return matrix[:-1, :-1].square().sum()


def total_over_processes(part: Tensor, accelerator: Accelerator) -> Tensor:
    """The sum over processes, on the device of the part; of the same bits everywhere."""
    from accelerate.utils import broadcast

    total = torch.zeros_like(part)
    for rank in range(accelerator.num_processes):
        total += broadcast(part.to(accelerator.device, copy=True), from_process=rank).to(part.device)
    return total
