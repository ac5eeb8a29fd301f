"""All pairs of layers of two sides at once, streamed, from Gram matrices of minibatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from hf_stitch.statistics.base import Statistic
from hf_stitch.statistics.grams import Gram, Packed, gram_of, packed, size_of, unbiased
from hf_stitch.statistics.hsic import HSIC


class MinibatchGrams(Statistic):
    """Unbiased HSIC of every pair of layers, summed over minibatches of consecutive rows (Nguyen et al. 2021).

    ``hf_stitch.metrics.minibatch_cka`` is computed from this statistic, with the same rule: each minibatch is weighted
    by its size, and up to 3 remaining rows join the last one. Rows are regrouped into minibatches, so the sizes of the
    updates do not matter. A Gram matrix of centred rows is computed in the dtype of the rows, at least float32; all
    later steps use float64. If the number ``n`` of all rows is known, batches that coincide with minibatches need no
    copy of their rows.
    """

    count: Tensor  # rows in the minibatches computed so far, to which the sums belong
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
        for place in range(x + (y or 0)):
            self.add_state(f"pending_{place}", None, "cat")

    coming: Tensor
    pending_0: list[Tensor]  # rows of the first layer that wait; as many wait of the others

    @classmethod
    def _like(cls, state: Mapping[str, Tensor]) -> Self:
        size, x, y = state["form"].tolist()
        return cls(size, x, None if y < 0 else y, device=state["xy"].device)

    @property
    def _pending(self) -> list[list[Tensor]]:
        x, y = self._layers
        return [getattr(self, f"pending_{place}") for place in range(x + (y or 0))]

    @torch.no_grad()
    def keep(self, rows: Tensor) -> Tensor | Gram:
        """Copy the rows of a layer for :meth:`update`; a complete minibatch becomes its Gram matrix."""
        left = -1 if self.coming < 0 or self.pending_0 else int(self.coming - self.count)
        return _gram(rows) if len(rows) == (self.size if left >= self.size + 4 else left) else rows.clone()

    @torch.no_grad()
    def update(self, x: Sequence[Tensor | Gram], y: Sequence[Tensor | Gram] | None = None) -> Self:
        """Add a batch of rows; see :meth:`LayerMoments.update`. Rows are kept for some time, so pass copies."""
        layers = [*x, *(() if self._layers[1] is None else y or ())]
        grams = [layer for layer in layers if isinstance(layer, Gram)]
        rows = [layer for layer in layers if isinstance(layer, Tensor)]
        counts = [*(gram.n for gram in grams), *map(len, rows)]
        pending = self._pending
        if len(set(counts)) != 1 or (grams and rows) or len(layers) != len(pending):
            raise ValueError(f"{len(pending)} layers must have the same number of rows, got {counts}")
        if grams:
            self._add(grams)
        for chunks, part in zip(pending, rows, strict=False):
            chunks.append(part)
        while sum(map(len, pending[0])) >= self.size + 4:
            self._add([_gram(_take(chunks, self.size)) for chunks in pending])
        return self

    def hsic(self) -> HSIC:
        """Compute the sums over all minibatches, including the remaining rows."""
        sums, pending = HSIC(self.xx, self.xy, self.yy), self._pending
        if any(pending):
            return HSIC(*map(torch.add, sums, self._minibatch([_gram(torch.cat(chunks)) for chunks in pending])))
        if not self.count:
            raise ValueError("no rows have been added yet; call update first")
        return sums

    def _settle(self) -> None:
        """Compute the remaining rows: minibatches do not extend across processes."""
        if any(pending := self._pending):
            self._add([_gram(torch.cat(chunks)) for chunks in pending])
            for chunks in pending:
                chunks.clear()

    def __repr__(self) -> str:
        """The size of a minibatch."""
        return f"MinibatchGrams({self.size})"

    def _add(self, grams: Sequence[Gram]) -> None:
        for own, part in zip((self.xx, self.xy, self.yy), self._minibatch(grams), strict=True):
            own += part
        self.count = self.count + grams[0].n

    def _minibatch(self, grams: Sequence[Gram]) -> HSIC:
        """HSIC of one minibatch, weighted by its size."""
        n, (layers, others) = grams[0].n, self._layers
        both = packed(grams, torch.stack([gram.products for gram in grams]).double())
        x = Packed(*(part[:layers] for part in both))
        y = x if others is None else Packed(*(part[layers:] for part in both))
        return HSIC(*(part * n for part in unbiased(x, y)))


def _take(chunks: list[Tensor], count: int) -> Tensor:
    """Remove and return the first rows of some chunks."""
    taken: list[Tensor] = []
    while count:
        chunk = chunks.pop(0)
        taken.append(chunk[:count])
        if len(chunk) > count:
            chunks.insert(0, chunk[count:])
        count -= len(taken[-1])
    return taken[0] if len(taken) == 1 else torch.cat(taken)


def _gram(rows: Tensor) -> Gram:
    """The Gram matrix of a minibatch, in the dtype of its rows, at least float32."""
    return gram_of(rows, rows.new_empty(size_of(len(rows)), dtype=torch.promote_types(rows.dtype, torch.float32)))
