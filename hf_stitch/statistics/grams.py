"""All pairs of layers of two sides at once, by Gram matrices (n × n) of rows at hand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from hf_stitch.statistics.hsic import HSIC, inner_products, unbiased_pairs
from hf_stitch.statistics.layers import Cost, Workload

# Numbers that are centred at a time, so that they stay in the cache, and how many features at least and at most: sums
# of many products lose digits in float32.
_ELEMENTS, _LEAST, _MOST = 2**18, 512, 4096
# Operations for which there would be time while the numbers of a Gram matrix are put in order, for each of them.
_PASSES = 400
# Rows whose products with each other are all computed.
_ROWS = 64


class Gram(NamedTuple):
    """The Gram matrix of the centred rows of a minibatch.

    Attributes:
        products: ``(n, n)``; what is above the diagonal does not count.
        square: Squared norm of the mean that was taken off.
    """

    products: Tensor
    square: Tensor


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

    @staticmethod
    def cost(work: Workload) -> Cost:
        """What computing them, and HSIC of all pairs from them, takes."""
        n, pairs = work.n, len(work.x) * len(work.y)
        flops = n**2 * (sum(work.distinct) + pairs + _PASSES * len(work.distinct))  # half of a Gram matrix is computed
        return Cost(flops=flops, kept=8 * n**2 * (len(work.distinct) + 1))

    def hsic(self, debiased: bool = False) -> HSIC:
        """As :meth:`LayerMoments.hsic`, and with the same values."""
        return unbiased(self._x, self._y) if debiased else inner_products(self._x.products, self._y.products)


class Packed(NamedTuple):
    """Centred Gram matrices of some layers, float64, each pair of rows once.

    Attributes:
        products: Of each layer what is below the diagonal, times √2, and the diagonal: inner products of these vectors
            are those of the matrices.
        lengths: ``(layers, n)``: the diagonals.
    """

    products: Tensor
    lengths: Tensor


def packed(grams: Iterable[Gram], layers: int, n: int, device: torch.device) -> Packed:
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
    return Packed(products, lengths)


def _exact_grams(layers: Sequence[Tensor]) -> Packed:
    grams = (gram_of(rows, torch.float64) for rows in layers)
    return packed(grams, len(layers), len(layers[0]), layers[0].device)


def gram_of(rows: Tensor, dtype: torch.dtype) -> Gram:
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


def unbiased(x: Packed, y: Packed) -> HSIC:
    """Unbiased HSIC of centred Gram matrices."""
    n, lengths = x.lengths.shape[1], inner_products(x.lengths, y.lengths)
    return unbiased_pairs(n, inner_products(x.products, y.products), x.lengths.sum(1), y.lengths.sum(1), lengths)
