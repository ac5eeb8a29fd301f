"""Linear HSIC of all pairs of layers of two sides, from n × n Gram matrices of all rows or of minibatches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from hf_stitch.statistics.base import Statistic


class HSIC(NamedTuple):
    """Linear HSIC of every pair of layers, and of every layer with itself, up to a common factor; float64."""

    xx: Tensor  # of each layer of x with itself, (layers of x,)
    xy: Tensor  # of each pair, (layers of x, layers of y)
    yy: Tensor  # of each layer of y with itself, (layers of y,)


def inner_products(x: Tensor, y: Tensor) -> HSIC:
    """Compute inner products of the rows of two matrices, and of each row with itself."""
    own_x, own_y = (torch.linalg.vector_norm(side, dim=1).square() for side in (x, y))
    return HSIC(own_x, x @ y.T, own_y)


def unbiased_hsic(n: int, squares: Tensor, traces: Tensor, kk: Tensor) -> Tensor:
    """Compute unbiased linear HSIC of x with x, x with y, and y with y from sums over centred rows.

    With the diagonals of the Gram matrices K and L omitted, ``HSIC = [tr KL + 1ᵀK1 1ᵀL1 / ((n-1)(n-2))
    - 2/(n-2) 1ᵀKL1] / (n(n-3))`` (Song et al. 2012). For centred rows ``1ᵀK1 = -Σ‖x‖²`` and ``1ᵀKL1 =
    Σ‖x‖²‖y‖²``.

    ``squares``: ``‖XᵀX‖²``, ``‖XᵀY‖²``, ``‖YᵀY‖²``. ``traces``: ``Σ‖x‖²``, ``Σ‖y‖²``. ``kk``: ``Σ‖x‖⁴``, ``Σ‖y‖⁴``
    on the diagonal, ``Σ‖x‖²‖y‖²`` off it.
    """
    if n < 4:
        raise ValueError(f"an unbiased estimate of HSIC requires at least 4 rows, got {n}; pass more rows")
    pairs = torch.stack([traces[0] ** 2, traces[0] * traces[1], traces[1] ** 2])
    fourth = torch.stack([kk[0, 0], kk[0, 1], kk[1, 1]])
    terms = torch.stack([squares, -n / (n - 2) * fourth, pairs / ((n - 1) * (n - 2))])
    total = terms.sum(0)
    rounding = 64 * torch.finfo(total.dtype).eps * terms.abs().sum(0)
    return torch.where(total.abs() <= rounding, 0, total) / (n * (n - 3))


def unbiased_pairs(n: int, squares: HSIC, traces_x: Tensor, traces_y: Tensor, lengths: HSIC) -> HSIC:
    """Apply :func:`unbiased_hsic` to all pairs; every sum is a matrix of pairs."""
    shape = squares.xy.shape
    traces = torch.stack([traces_x[:, None].expand(shape), traces_y.expand(shape)])
    xx, xy, yy = _spread(lengths)
    fourth = torch.stack([torch.stack([xx, xy]), torch.stack([xy, yy])])
    xx, xy, yy = unbiased_hsic(n, torch.stack(_spread(squares)), traces, fourth)
    return HSIC(xx[:, 0], xy, yy[0])


def _spread(hsic: HSIC) -> tuple[Tensor, Tensor, Tensor]:
    """Expand everything to the shape of the pairs."""
    shape = hsic.xy.shape
    return hsic.xx[:, None].expand(shape), hsic.xy, hsic.yy.expand(shape)


# Numbers that are centred at a time, to fit the cache, and bounds on the number of features: sums of many products lose
# digits in float32.
_ELEMENTS, _LEAST, _MOST = 2**19, 512, 4096
# Smallest block of rows with all products computed.
_ROWS = 64


class Gram(NamedTuple):
    """Gram matrix of the centred rows of a minibatch."""

    n: int  # number of rows
    products: Tensor  # by blocks of rows, each up to the diagonal; some entries above it
    square: Tensor  # squared norm of the mean that was subtracted


class Grams:
    """Centred n × n Gram matrices of every layer in float64, computed once for all pairs.

    Memory is about ``5 · n²`` bytes per layer at any width (up to ``8 · n²`` for few rows). Without ``y``, both sides
    are the same layers, which halves the cost.
    """

    @torch.no_grad()
    def __init__(self, x: Sequence[Tensor], y: Sequence[Tensor] | None = None) -> None:
        lengths = {len(rows) for rows in (*x, *(y or ()))}
        if not x or len(lengths) != 1:
            raise ValueError(f"all layers must have the same number of rows, got {sorted(lengths) or 'no layers'}")
        self._x = _exact_grams(x)
        self._y = self._x if y is None else _exact_grams(y)

    def hsic(self, debiased: bool = False) -> HSIC:
        """Compute HSIC of every pair; equal to :meth:`LayerMoments.hsic`."""
        return unbiased(self._x, self._y) if debiased else squares(self._x, self._y)


class Packed(NamedTuple):
    """Centred Gram matrices of several layers in float64, with each pair of rows stored once."""

    products: Tensor  # (layers, blocks of rows): the entries below the diagonals; the rest are 0
    lengths: Tensor  # (layers, n): the diagonals


def packed(grams: Sequence[Gram], products: Tensor) -> Packed:
    """Complete the float64 ``products`` of Gram matrices with diagonals that make every row sum to zero.

    Gram matrices of centred rows have this property. Unbiased HSIC ignores the diagonal, so this removes the rounding
    error of the mean. A matrix is set to zero if all rows are equal, because the rounded mean leaves a small remainder.
    """
    n, traces = grams[0].n, products.new_zeros(len(grams))
    lengths = products.new_zeros(len(grams), n)
    for start, stop, block in _blocks(products, n):
        traces += block.diagonal(start, 1, 2).sum(1)
        block.tril_(start - 1)
        lengths[:, start:stop] -= block.sum(2)
        lengths[:, :stop] -= block.sum(1)
    eps = torch.finfo(grams[0].products.dtype).eps
    is_constant = traces <= n * (8 * eps) ** 2 * torch.stack([gram.square for gram in grams])
    for tensor in (products, lengths):
        tensor.index_fill_(0, is_constant.nonzero()[:, 0], 0)
    return Packed(products, lengths)


def _exact_grams(layers: Sequence[Tensor]) -> Packed:
    products = layers[0].new_empty(len(layers), size_of(len(layers[0])), dtype=torch.float64)
    return packed([gram_of(rows, out) for rows, out in zip(layers, products, strict=True)], products)


def size_of(n: int) -> int:
    """Return the number of computed products of n rows: half of them, and the rest of the diagonal blocks."""
    return sum(min(_block(n), n - start) * min(start + _block(n), n) for start in range(0, n, _block(n)))


def _blocks(products: Tensor, n: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield each block of Gram matrices: its first row, the row after its last one, and (…, rows, columns)."""
    offset = 0
    for start in range(0, n, _block(n)):
        stop = min(start + _block(n), n)
        size = (stop - start) * stop
        yield start, stop, products[..., offset : offset + size].unflatten(-1, (stop - start, stop))
        offset += size


def gram_of(rows: Tensor, products: Tensor) -> Gram:
    """Write the products of centred rows with each other, in the dtype of ``products``.

    Rows are centred first, because a large common part would cancel digits. Features are processed in chunks that fit
    the cache, and rows in blocks, so that products are not computed twice.
    """
    n = len(rows)
    squared_means: list[Tensor] = []  # squared norms, by chunk
    features = min(max(_ELEMENTS // n, _LEAST), _MOST)
    buffer, blocks = products.new_empty(n, min(features, rows.shape[1])), [*_blocks(products, n)]
    with in_full_precision():
        for chunk in rows.split(features, 1):
            mean = chunk.mean(0, dtype=products.dtype)
            centred = torch.sub(chunk, mean, out=buffer[:, : chunk.shape[1]])
            for start, stop, block in blocks:
                block.addmm_(centred[start:stop], centred[:stop].T, beta=min(len(squared_means), 1))
            squared_means.append(mean @ mean)
    return Gram(n, products, torch.stack(squared_means).sum())


@contextmanager
def in_full_precision() -> Iterator[None]:
    """Multiply float32 in float32, for any precision setting of forward passes (TF32, bfloat16)."""
    backends: Any = torch.backends
    if not hasattr(backends.cuda.matmul, "fp32_precision"):  # before torch 2.9
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
        return
    matmuls = (backends.cuda.matmul, backends.mkldnn.matmul)
    precisions = [matmul.fp32_precision for matmul in matmuls]
    try:
        for matmul in matmuls:
            matmul.fp32_precision = "ieee"
        yield
    finally:
        for matmul, precision in zip(matmuls, precisions, strict=True):
            matmul.fp32_precision = precision


def _block(n: int) -> int:
    """Return the number of rows per block; for fewer rows, computing half of the products does not pay off."""
    return max(_ROWS, n // 8)


def squares(x: Packed, y: Packed) -> HSIC:
    """Compute inner products of centred Gram matrices."""
    below, lengths = (inner_products(*parts) for parts in zip(x, y, strict=True))
    return HSIC(*(2 * pair + squared_lengths for pair, squared_lengths in zip(below, lengths, strict=True)))


def unbiased(x: Packed, y: Packed) -> HSIC:
    """Compute unbiased HSIC from centred Gram matrices."""
    n, lengths = x.lengths.shape[1], inner_products(x.lengths, y.lengths)
    return unbiased_pairs(n, squares(x, y), x.lengths.sum(1), y.lengths.sum(1), lengths)


class MinibatchGrams(Statistic):
    """Unbiased HSIC of every pair of layers, summed over minibatches of consecutive rows (Nguyen et al. 2021).

    ``hf_stitch.metrics.minibatch_cka`` uses this statistic, with the same rule: each minibatch is weighted by its size,
    and up to 3 remaining rows join the last one. Rows are regrouped into minibatches, so the sizes of the updates do
    not matter. A Gram matrix of centred rows is computed in the dtype of the rows, at least float32; all later steps
    use float64. If the number ``n`` of all rows is known, batches that coincide with minibatches are not copied.
    """

    count: Tensor  # rows in the minibatches computed so far
    xx: Tensor
    xy: Tensor
    yy: Tensor

    def __init__(
        self, size: int, x: int, y: int | None = None, n: int | None = None, device: torch.device | str | None = None
    ) -> None:
        if size < 4:
            raise ValueError(f"a minibatch must have at least 4 rows, got {size}")
        super().__init__()
        self.size = size
        self._layers = (x, y)
        self.add_state("form", torch.tensor([size, x, -1 if y is None else y]), "same")
        self.add_state("coming", torch.tensor(-1 if n is None else n), "own")
        self.add_state("count", torch.tensor(0), "sum")
        columns = x if y is None else y
        for name, shape in (("xx", (x,)), ("xy", (x, columns)), ("yy", (columns,))):
            self.add_state(name, torch.zeros(shape, dtype=torch.float64, device=device), "sum")
        for layer in range(x + (y or 0)):
            self.add_state(f"pending_{layer}", None, "cat")

    coming: Tensor
    pending_0: list[Tensor]  # buffered rows of the first layer; equally many of all layers

    @classmethod
    def _like(cls, state: Mapping[str, Tensor]) -> Self:
        size, x, y = state["form"].tolist()
        return cls(size, x, None if y < 0 else y, device=state["xy"].device)

    @property
    def _pending(self) -> list[list[Tensor]]:
        x, y = self._layers
        return [getattr(self, f"pending_{layer}") for layer in range(x + (y or 0))]

    @torch.no_grad()
    def keep(self, rows: Tensor) -> Tensor | Gram:
        """Copy the rows of a layer for :meth:`update`; return the Gram matrix of a complete minibatch."""
        remaining = -1 if self.coming < 0 or self.pending_0 else int(self.coming - self.count)
        return _gram(rows) if len(rows) == (self.size if remaining >= self.size + 4 else remaining) else rows.clone()

    @torch.no_grad()
    def update(self, x: Sequence[Tensor | Gram], y: Sequence[Tensor | Gram] | None = None) -> Self:
        """Add a batch of rows; see :meth:`LayerMoments.update`. Rows are buffered, so pass copies."""
        layers = [*x, *(() if self._layers[1] is None else y or ())]
        grams = [layer for layer in layers if isinstance(layer, Gram)]
        rows = [layer for layer in layers if isinstance(layer, Tensor)]
        counts = [*(gram.n for gram in grams), *map(len, rows)]
        pending = self._pending
        if len(set(counts)) != 1 or (grams and rows) or len(layers) != len(pending):
            raise ValueError(f"{len(pending)} layers must have the same number of rows, got {counts}")
        if grams:
            self._add(grams)
        for chunks, layer_rows in zip(pending, rows, strict=False):
            chunks.append(layer_rows)
        while sum(map(len, pending[0])) >= self.size + 4:
            self._add([_gram(_take(chunks, self.size)) for chunks in pending])
        return self

    def hsic(self) -> HSIC:
        """Compute the sums over all minibatches, including the remaining rows."""
        sums, pending = HSIC(self.xx, self.xy, self.yy), self._pending
        if any(pending):
            return HSIC(*map(torch.add, sums, self._minibatch([_gram(torch.cat(chunks)) for chunks in pending])))
        if not self.count:
            raise ValueError("hsic requires rows; call update first")
        return sums

    def _settle(self) -> None:
        """Add the remaining rows to the sums: minibatches do not extend across processes."""
        if any(pending := self._pending):
            self._add([_gram(torch.cat(chunks)) for chunks in pending])
            for chunks in pending:
                chunks.clear()

    def __repr__(self) -> str:
        return f"MinibatchGrams({self.size})"

    def _add(self, grams: Sequence[Gram]) -> None:
        for total, hsic in zip((self.xx, self.xy, self.yy), self._minibatch(grams), strict=True):
            total += hsic
        self.count = self.count + grams[0].n

    def _minibatch(self, grams: Sequence[Gram]) -> HSIC:
        """Compute HSIC of one minibatch, weighted by its size."""
        n, (layers_x, layers_y) = grams[0].n, self._layers
        stacked = packed(grams, torch.stack([gram.products for gram in grams]).double())
        x = Packed(*(tensor[:layers_x] for tensor in stacked))
        y = x if layers_y is None else Packed(*(tensor[layers_x:] for tensor in stacked))
        return HSIC(*(tensor * n for tensor in unbiased(x, y)))


def _take(chunks: list[Tensor], count: int) -> Tensor:
    """Remove and return the first rows of the chunks."""
    pieces: list[Tensor] = []
    while count:
        chunk = chunks.pop(0)
        pieces.append(chunk[:count])
        if len(chunk) > count:
            chunks.insert(0, chunk[count:])
        count -= len(pieces[-1])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _gram(rows: Tensor) -> Gram:
    """Compute the Gram matrix of a minibatch, in the dtype of its rows, at least float32."""
    return gram_of(rows, rows.new_empty(size_of(len(rows)), dtype=torch.promote_types(rows.dtype, torch.float32)))
