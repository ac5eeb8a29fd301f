"""All pairs of layers of two sides at once, from n × n Gram matrices of rows in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_stitch.statistics.hsic import HSIC, inner_products, unbiased_pairs

# Numbers that are centred at a time, so that they stay in the cache, and bounds on the number of features: sums of many
# products lose digits in float32.
_ELEMENTS, _LEAST, _MOST = 2**19, 512, 4096
# Smallest block of rows whose products with each other are all computed.
_ROWS = 64


class Gram(NamedTuple):
    """Gram matrix of the centred rows of a minibatch."""

    n: int  # number of rows
    products: Tensor  # by blocks of rows, each up to the diagonal; some entries above it
    square: Tensor  # squared norm of the mean that was subtracted


class Grams:
    """Centred n × n Gram matrices of every layer in float64, computed once for all pairs.

    Memory is about ``5 · n²`` bytes per layer at any width (of few rows up to 8). Without ``y``, both sides are the
    same layers, which halves the cost.
    """

    @torch.no_grad()
    def __init__(self, x: Sequence[Tensor], y: Sequence[Tensor] | None = None) -> None:
        lengths = {len(rows) for rows in (*x, *(y or ()))}
        if not x or len(lengths) != 1:
            raise ValueError(f"all layers must have the same number of rows, got {sorted(lengths) or 'no layers'}")
        self._x = _exact_grams(x)
        self._y = self._x if y is None else _exact_grams(y)

    def hsic(self, debiased: bool = False) -> HSIC:
        """Compute HSIC of every pair; the values equal those of :meth:`LayerMoments.hsic`."""
        return unbiased(self._x, self._y) if debiased else squares(self._x, self._y)


class Packed(NamedTuple):
    """Centred Gram matrices of several layers in float64, with each pair of rows stored once."""

    products: Tensor  # (layers, blocks of rows): the entries below the diagonals; the others are 0
    lengths: Tensor  # (layers, n): the diagonals


def packed(grams: Sequence[Gram], products: Tensor) -> Packed:
    """Complete ``products``, those of the Gram matrices in float64, with diagonals for which every row sums to zero.

    Gram matrices of centred rows have this property. Unbiased HSIC ignores the diagonal, so this removes the rounding
    error of the mean. A matrix is set to zero if all rows are equal: the rounded mean leaves a small remainder.
    """
    n, traces = grams[0].n, products.new_zeros(len(grams))
    lengths = products.new_zeros(len(grams), n)
    for start, stop, block in _blocks(products, n):
        traces += block.diagonal(start, 1, 2).sum(1)
        block.tril_(start - 1)
        lengths[:, start:stop] -= block.sum(2)
        lengths[:, :stop] -= block.sum(1)
    eps = torch.finfo(grams[0].products.dtype).eps
    dead = traces <= n * (8 * eps) ** 2 * torch.stack([gram.square for gram in grams])
    for part in (products, lengths):
        part.index_fill_(0, dead.nonzero()[:, 0], 0)
    return Packed(products, lengths)


def _exact_grams(layers: Sequence[Tensor]) -> Packed:
    products = layers[0].new_empty(len(layers), size_of(len(layers[0])), dtype=torch.float64)
    return packed([gram_of(rows, own) for rows, own in zip(layers, products, strict=True)], products)


def size_of(n: int) -> int:
    """Number of products of n rows that are computed: half of them, and those above the diagonal in its blocks."""
    return sum(min(_block(n), n - start) * min(start + _block(n), n) for start in range(0, n, _block(n)))


def _blocks(products: Tensor, n: int) -> Iterator[tuple[int, int, Tensor]]:
    """The first row of each block of Gram matrices, that after the last one, and the block: (…, rows, columns)."""
    place = 0
    for start in range(0, n, _block(n)):
        stop = min(start + _block(n), n)
        size = (stop - start) * stop
        yield start, stop, products[..., place : place + size].unflatten(-1, (stop - start, stop))
        place += size


def gram_of(rows: Tensor, products: Tensor) -> Gram:
    """Write the products of centred rows with each other, in the dtype of ``products``.

    Rows are centred first, because a large common part would cancel the other digits. Features are processed in chunks
    that fit the cache, and rows in blocks, so that no product is computed twice.
    """
    n = len(rows)
    means: list[Tensor] = []  # squared norms, by chunk
    features = min(max(_ELEMENTS // n, _LEAST), _MOST)
    room, blocks = products.new_empty(n, min(features, rows.shape[1])), [*_blocks(products, n)]
    with in_full_precision():
        for part in rows.split(features, 1):
            mean = part.mean(0, dtype=products.dtype)
            centred = torch.sub(part, mean, out=room[:, : part.shape[1]])
            for start, stop, block in blocks:
                block.addmm_(centred[start:stop], centred[:stop].T, beta=min(len(means), 1))
            means.append(mean @ mean)
    return Gram(n, products, torch.stack(means).sum())


@contextmanager
def in_full_precision() -> Iterator[None]:
    """Multiply float32 in float32, whatever precision forwards may use (TF32, bfloat16)."""
    backends: Any = torch.backends
    if not hasattr(backends.cuda.matmul, "fp32_precision"):  # before torch 2.9
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
        return
    places = (backends.cuda.matmul, backends.mkldnn.matmul)
    chosen = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "ieee"
        yield
    finally:
        for place, precision in zip(places, chosen, strict=True):
            place.fp32_precision = precision


def _block(n: int) -> int:
    """Number of rows per block; with fewer rows, computing half of the products does not pay off."""
    return max(_ROWS, n // 8)


def squares(x: Packed, y: Packed) -> HSIC:
    """Inner products of centred Gram matrices."""
    below, lengths = (inner_products(*parts) for parts in zip(x, y, strict=True))
    return HSIC(*(2 * pair + own for pair, own in zip(below, lengths, strict=True)))


def unbiased(x: Packed, y: Packed) -> HSIC:
    """Unbiased HSIC from centred Gram matrices."""
    n, lengths = x.lengths.shape[1], inner_products(x.lengths, y.lengths)
    return unbiased_pairs(n, squares(x, y), x.lengths.sum(1), y.lengths.sum(1), lengths)
