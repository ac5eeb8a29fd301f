"""All pairs of layers of two sides at once, from n × n Gram matrices of rows in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_stitch.statistics.hsic import HSIC, inner_products, unbiased_pairs

# Numbers that are centred at a time, so that they stay in the cache, and bounds on the number of features: sums of many
# products lose digits in float32.
_ELEMENTS, _LEAST, _MOST = 2**18, 512, 4096
# Smallest block of rows whose products with each other are all computed.
_ROWS = 64


class Gram(NamedTuple):
    """Gram matrix of the centred rows of a minibatch."""

    products: Tensor  # (n, n); entries above the diagonal are ignored
    square: Tensor  # squared norm of the mean that was subtracted


class Grams:
    """Centred n × n Gram matrices of every layer in float64, computed once for all pairs.

    Memory is ``4 · n²`` bytes per layer at any width, and temporarily about ``24 · n²`` bytes more. Without ``y``, both
    sides are the same layers, which halves the cost.
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
        return unbiased(self._x, self._y) if debiased else inner_products(self._x.products, self._y.products)


class Packed(NamedTuple):
    """Centred Gram matrices of several layers in float64, with each pair of rows stored once.

    Inner products of ``products`` are those of the matrices.
    """

    products: Tensor  # for each layer the entries below the diagonal times √2, and the diagonal
    lengths: Tensor  # (layers, n): the diagonals


def packed(grams: Iterable[Gram], layers: int, n: int, device: torch.device) -> Packed:
    """Pack Gram matrices one after the other, with diagonals for which every row sums to zero.

    Gram matrices of centred rows have this property. Unbiased HSIC ignores the diagonal, so this removes the rounding
    error of the mean.
    """
    half, some, coming = n // 2, max(1, _ELEMENTS // n**2), iter(grams)
    products = torch.empty(layers, (n - half) * n + n, dtype=torch.float64, device=device)
    lengths = products[:, -n:]
    for start in range(0, layers, some):
        below = torch.stack([_without_rounding(gram) for gram in islice(coming, some)]).double().tril_(-1)
        torch.neg(below.sum(1).add_(below.sum(2)), out=lengths[start : start + some])
        folded = below[:, half:]  # the space above the diagonal stores the upper half of the triangle
        folded[:, :half, half : 2 * half] += below[:, :half, :half].mT
        torch.mul(folded.flatten(1), math.sqrt(2), out=products[start : start + some, :-n])
    return Packed(products, lengths)


def _exact_grams(layers: Sequence[Tensor]) -> Packed:
    grams = (gram_of(rows, torch.float64) for rows in layers)
    return packed(grams, len(layers), len(layers[0]), layers[0].device)


def gram_of(rows: Tensor, dtype: torch.dtype) -> Gram:
    """Products of centred rows with each other; some entries above the diagonal remain 0.

    Rows are centred first, because a large common part would cancel the other digits. Features are processed in chunks
    that fit the cache, and rows in blocks, so that no product is computed twice.
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
        with in_full_precision():
            for start in range(0, n, block):
                found[start:, start : start + block].addmm_(centred[start:], centred[start : start + block].T)
    return Gram(found, torch.stack(squares).sum())


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


def _without_rounding(gram: Gram) -> Tensor:
    """Set the matrix to zero if all rows are equal: the rounded mean leaves a small remainder."""
    products, square = gram
    dead = products.trace() <= len(products) * (8 * torch.finfo(products.dtype).eps) ** 2 * square
    return products.masked_fill_(dead, 0)


def _block(n: int) -> int:
    """Number of rows per block; with fewer rows, computing half of the products does not pay off."""
    return max(_ROWS, n // 8)


def unbiased(x: Packed, y: Packed) -> HSIC:
    """Unbiased HSIC from centred Gram matrices."""
    n, lengths = x.lengths.shape[1], inner_products(x.lengths, y.lengths)
    return unbiased_pairs(n, inner_products(x.products, y.products), x.lengths.sum(1), y.lengths.sum(1), lengths)
