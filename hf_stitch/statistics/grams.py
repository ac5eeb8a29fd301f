"""All pairs of layers of two sides at once: what belongs to a layer is computed once, the pairs by matrix products.

Three ways to the HSIC of every pair, of which linear CKA is made: :class:`LayerMoments` (d × d, streams),
:class:`Grams` (n × n, of rows at hand) and :class:`MinibatchGrams` (n × n of each minibatch, streams; an estimator of
its own). The first two give the same value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hf_stitch.statistics.debiased import unbiased_hsic
from hf_stitch.statistics.moments import Moments

if TYPE_CHECKING:
    from accelerate import Accelerator

# Rows that are multiplied at a time: a product of fewer would mostly read and write the co-moments.
_CHUNK = 512
# Numbers that are centred at a time, so that they stay in the cache, and how many features at least and at most: sums
# of many products lose digits in float32.
_ELEMENTS, _LEAST, _MOST = 2**18, 512, 4096
# Rows whose products with each other are all computed.
_ROWS = 64


class HSIC(NamedTuple):
    """Linear HSIC of every pair of layers, and of every layer with itself, up to a common factor; float64.

    Attributes:
        xx: ``(layers of x,)``.
        xy: ``(layers of x, layers of y)``.
        yy: ``(layers of y,)``.
    """

    xx: Tensor
    xy: Tensor
    yy: Tensor


class Gram(NamedTuple):
    """The Gram matrix of the centred rows of a minibatch.

    Attributes:
        products: ``(n, n)``; what is above the diagonal does not count.
        square: Squared norm of the mean that was taken off.
    """

    products: Tensor
    square: Tensor


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
            part.copy_(_total(part, accelerator))
        self._seen = int(_total(torch.tensor(self._seen), accelerator))
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
        return _all_unbiased(self.n, squares, traces_x, traces_y, lengths)

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


class Grams:
    """The n × n Gram matrix of every layer, centred and in float64, computed once for all pairs.

    Memory is ``4 · n²`` bytes for each layer, however wide it is, and some ``24 · n²`` for a moment.

    Args:
        x: ``(n, dx)`` for each layer of the first side, of any float dtype.
        y: ``(n, dy)`` for each layer of the second; ``None``: it is the first side once more, which saves half.

    Raises:
        ValueError: There are no layers, or their rows do not pair up.

    Example:
        >>> x = torch.randn(20, 3)
        >>> hsic = Grams([x], [2 * x]).hsic(debiased=True)
        >>> round((hsic.xy / (hsic.xx * hsic.yy).sqrt()).item(), 6)
        1.0
    """

    @torch.no_grad()
    def __init__(self, x: Sequence[Tensor], y: Sequence[Tensor] | None = None) -> None:
        lengths = {len(rows) for rows in (*x, *(y or ()))}
        if not x or len(lengths) != 1:
            raise ValueError(f"every layer must have the same rows, got {sorted(lengths) or 'no layers'}")
        self._x = _exact_grams(x)
        self._y = self._x if y is None else _exact_grams(y)

    def hsic(self, debiased: bool = False) -> HSIC:
        """As :meth:`LayerMoments.hsic`, and with the same values."""
        return _unbiased(self._x, self._y) if debiased else _inner(self._x.products, self._y.products)


class MinibatchGrams:
    """Unbiased HSIC of every pair of layers, summed over minibatches of consecutive rows (Nguyen et al. 2021).

    What ``hf_stitch.metrics.minibatch_cka`` is made of, and with its rule: a minibatch counts by its size, and up to 3
    rows left over join the last one. Rows are gathered to minibatches, so that it does not matter how they come in. A
    Gram matrix is computed in the dtype of its rows, but at least in float32, of centred rows; what follows is float64.

    Args:
        size: Rows of a minibatch, at least 4.
        same: Whether the second side is the first once more, which saves half.
        n: How many rows will come, where that is known: of batches that are minibatches no row is kept then.

    Raises:
        ValueError: The size is below 4.

    Example:
        >>> x, y = torch.randn(50, 8), torch.randn(50, 6)
        >>> MinibatchGrams(10).update([x], [x, y]).hsic().xy.shape
        torch.Size([1, 2])
    """

    def __init__(self, size: int, same: bool = False, n: int | None = None) -> None:
        if size < 4:
            raise ValueError(f"a minibatch must have at least 4 rows, got {size}")
        self.size, self.same, self.n = size, same, n
        self._pending: list[list[Tensor]] = []
        self._sums: HSIC | None = None
        self._layers_x = self._done = 0

    @torch.no_grad()
    def reduce(self, rows: Tensor) -> Tensor | Gram:
        """What is to be kept of the next batch of a layer, for :meth:`update`: a copy, or the Gram matrix.

        Args:
            rows: ``(n, d)``, of any float dtype.
        """
        left = -1 if self.n is None or any(self._pending) else self.n - self._done
        return _gram(rows) if len(rows) == (self.size if left >= self.size + 4 else left) else rows.clone()

    @torch.no_grad()
    def update(self, x: Sequence[Tensor | Gram], y: Sequence[Tensor | Gram] | None = None) -> MinibatchGrams:
        """Add a batch of rows; see :meth:`LayerMoments.update`. Rows are kept for a while: hand over copies.

        Args:
            x: For each layer of the first side ``(n, dx)``, or what :meth:`reduce` made of it.
            y: Of the second; left out if that is the first.

        Returns:
            These statistics.

        Raises:
            ValueError: Layers are missing or too many, or their rows do not pair up.
        """
        layers = [*x, *(() if self.same else y or ())]
        grams = [layer for layer in layers if isinstance(layer, Gram)]
        rows = [layer for layer in layers if isinstance(layer, Tensor)]
        counts = [*(len(gram.products) for gram in grams), *map(len, rows)]
        uneven = len(set(counts)) != 1 or (grams and rows)
        if uneven or len(layers) != (len(self._pending) or len(layers)):
            raise ValueError(f"every layer must have the same rows, got {counts}")
        self._pending = self._pending or [[] for _ in layers]
        self._layers_x = len(x)
        if grams:
            self._add(grams)
        for chunks, part in zip(self._pending, rows, strict=False):
            chunks.append(part)
        while sum(map(len, self._pending[0])) >= self.size + 4:
            self._add([_gram(_take(chunks, self.size)) for chunks in self._pending])
        return self

    def hsic(self) -> HSIC:
        """The sums over all minibatches, the rest included.

        Raises:
            ValueError: There are fewer than 4 rows.
        """
        if any(self._pending):
            return self._plus([_gram(torch.cat(chunks)) for chunks in self._pending])
        if self._sums is None:
            raise ValueError("no rows have come yet; call update first")
        return self._sums

    def all_reduce(self, accelerator: Accelerator) -> MinibatchGrams:
        """Give every process the sums of all; to be called once, by all, after the last row.

        Minibatches do not cross from a process to the next, so that this estimator depends on their number.
        """
        if accelerator.num_processes == 1:
            return self
        self._sums = HSIC(*(_total(part, accelerator) for part in self.hsic()))
        self._pending = [[] for _ in self._pending]
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """The sums and the rows that wait, ready for safetensors."""
        pending = {f"pending.{i}": torch.cat(chunks) for i, chunks in enumerate(self._pending) if chunks}
        sums = {} if self._sums is None else {f"sums.{key}": part for key, part in self._sums._asdict().items()}
        return {"size": torch.tensor([self.size, self.same, self._layers_x, self._done]), **sums, **pending}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor], n: int | None = None) -> MinibatchGrams:
        """Rebuild what ``state_dict`` gave; ``n`` rows will come in all.

        Raises:
            ValueError: A key is unknown.
        """
        size, same, layers_x, done = state["size"].tolist()
        built = cls(size, bool(same), n)
        built._layers_x, built._done = layers_x, done
        sums = {key.removeprefix("sums."): part for key, part in state.items() if key.startswith("sums.")}
        pending = {int(key.removeprefix("pending.")): part for key, part in state.items() if key.startswith("pending.")}
        if unknown := len(state) - 1 - len(sums) - len(pending):
            raise ValueError(f"a state of MinibatchGrams has size, sums and pending rows, got {unknown} keys beside")
        built._sums = HSIC(**sums) if sums else None
        built._pending = [[pending[i]] for i in range(len(pending))]
        return built

    def __repr__(self) -> str:
        """The size of a minibatch."""
        return f"MinibatchGrams({self.size})"

    def _add(self, grams: Sequence[Gram]) -> None:
        self._sums = self._plus(grams)
        self._done += len(grams[0].products)

    def _plus(self, grams: Sequence[Gram]) -> HSIC:
        """The sums with one minibatch more, which counts by its size."""
        n = len(grams[0].products)
        packed = _packed(grams, len(grams), n, grams[0].products.device)
        x = _Packed(*(part[: self._layers_x] for part in packed))
        y = x if self.same else _Packed(*(part[self._layers_x :] for part in packed))
        sums = (part * n for part in _unbiased(x, y))
        return HSIC(*sums) if self._sums is None else HSIC(*map(torch.add, self._sums, sums))


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


def _take(chunks: list[Tensor], count: int) -> Tensor:
    """The first rows of some chunks, which lose them."""
    taken: list[Tensor] = []
    while count:
        chunk = chunks.pop(0)
        taken.append(chunk[:count])
        if len(chunk) > count:
            chunks.insert(0, chunk[count:])
        count -= len(taken[-1])
    return taken[0] if len(taken) == 1 else torch.cat(taken)


def _gram(rows: Tensor) -> Gram:
    """The Gram matrix of a minibatch, in the dtype of its rows, but at least in float32."""
    return _products(rows, torch.promote_types(rows.dtype, torch.float32))


class _Packed(NamedTuple):
    """Centred Gram matrices of some layers, float64, each pair of rows once.

    Attributes:
        products: Of each layer what is below the diagonal, times √2, and the diagonal: inner products of these vectors
            are those of the matrices.
        lengths: ``(layers, n)``: the diagonals.
    """

    products: Tensor
    lengths: Tensor


def _packed(grams: Iterable[Gram], layers: int, n: int, device: torch.device) -> _Packed:
    """Gram matrices, taken as they come, with the diagonals that let every row sum to zero.

    Those of centred rows do. HSIC without bias does not look at the diagonal, so that what rounding left of the mean
    goes.
    """
    half, some, coming = n // 2, max(1, _ELEMENTS // n**2), iter(grams)
    products = torch.empty(layers, (n - half) * n + n, dtype=torch.float64, device=device)
    lengths = products[:, -n:]
    for start in range(0, layers, some):
        below = torch.stack([_without_rounding(gram) for gram in islice(coming, some)]).double().tril_(-1)
        torch.neg(below.sum(1).add_(below.sum(2)), out=lengths[start : start + some])
        folded = below[:, half:]  # above the diagonal is room for the upper half of the triangle
        folded[:, :half, half : 2 * half] += below[:, :half, :half].mT
        torch.mul(folded.flatten(1), math.sqrt(2), out=products[start : start + some, :-n])
    return _Packed(products, lengths)


def _exact_grams(layers: Sequence[Tensor]) -> _Packed:
    grams = (_products(rows, torch.float64) for rows in layers)
    return _packed(grams, len(layers), len(layers[0]), layers[0].device)


def _products(rows: Tensor, dtype: torch.dtype) -> Gram:
    """Products of centred rows with each other; of those above the diagonal some are left 0.

    Rows are centred first, or their common part would swallow the rest. Some features at a time, so that the centred
    rows stay in the cache, and blocks of rows, so that no product is computed twice.
    """
    n, block = len(rows), _block(len(rows))
    features = min(max(_ELEMENTS // n, _LEAST), _MOST)
    found = torch.zeros(n, n, dtype=dtype, device=rows.device)
    room = found.new_empty(n, min(features, rows.shape[1]))
    squares = []
    for part in rows.split(features, 1):
        mean = part.mean(0, dtype=dtype)
        squares.append(mean @ mean)
        centred = torch.sub(part, mean, out=room[:, : part.shape[1]])
        for start in range(0, n, block):
            found[start:, start : start + block].addmm_(centred[start:], centred[start : start + block].T)
    return Gram(found, torch.stack(squares).sum())


def _without_rounding(gram: Gram) -> Tensor:
    """Zero where rows are all equal, for their mean is rounded and leaves a little of them."""
    products, square = gram
    dead = products.trace() <= len(products) * (8 * torch.finfo(products.dtype).eps) ** 2 * square
    return products.masked_fill_(dead, 0)


def _block(n: int) -> int:
    """Of how many rows each block has: for fewer, halving the work would not pay."""
    return max(_ROWS, n // 8)


def _unbiased(x: _Packed, y: _Packed) -> HSIC:
    """Unbiased HSIC of centred Gram matrices."""
    n, lengths = x.lengths.shape[1], _inner(x.lengths, y.lengths)
    return _all_unbiased(n, _inner(x.products, y.products), x.lengths.sum(1), y.lengths.sum(1), lengths)


def _inner(x: Tensor, y: Tensor) -> HSIC:
    """Inner products of the rows of two matrices, and of each with itself."""
    own_x, own_y = (torch.linalg.vector_norm(side, dim=1).square() for side in (x, y))
    return HSIC(own_x, x @ y.T, own_y)


def _all_unbiased(n: int, squares: HSIC, traces_x: Tensor, traces_y: Tensor, lengths: HSIC) -> HSIC:
    """:func:`unbiased_hsic` of all pairs: of its sums, every number is a matrix of pairs here."""
    shape = squares.xy.shape
    traces = torch.stack([traces_x[:, None].expand(shape), traces_y.expand(shape)])
    xx, xy, yy = _spread(lengths)
    fourth = torch.stack([torch.stack([xx, xy]), torch.stack([xy, yy])])
    xx, xy, yy = unbiased_hsic(n, torch.stack(_spread(squares)), traces, fourth)
    return HSIC(xx[:, 0], xy, yy[0])


def _spread(hsic: HSIC) -> tuple[Tensor, Tensor, Tensor]:
    """Everything in the shape of the pairs."""
    shape = hsic.xy.shape
    return hsic.xx[:, None].expand(shape), hsic.xy, hsic.yy.expand(shape)


def _stack(parts: list[Tensor], number: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.stack([number(part) for part in parts])


def _squares(matrix: Tensor) -> Tensor:
    """The squared norm of what belongs to the features; the one added is left out."""
    return matrix[:-1, :-1].square().sum()


def _total(part: Tensor, accelerator: Accelerator) -> Tensor:
    """The sum over processes, on the device of the part; of the same bits everywhere."""
    from accelerate.utils import broadcast

    total = torch.zeros_like(part)
    for rank in range(accelerator.num_processes):
        total += broadcast(part.to(accelerator.device, copy=True), from_process=rank).to(part.device)
    return total
