"""All pairs of layers of two sides at once, by the Gram matrices of minibatches, streamed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from hf_stitch.statistics.base import Statistic
from hf_stitch.statistics.grams import Gram, Packed, gram_of, packed, unbiased
from hf_stitch.statistics.hsic import HSIC
from hf_stitch.statistics.layers import Cost, LayerStatistic, Workload


class MinibatchGrams(Statistic, LayerStatistic):
    """Unbiased HSIC of every pair of layers, summed over minibatches of consecutive rows (Nguyen et al. 2021).

    What ``hf_stitch.metrics.minibatch_cka`` is made of, and with its rule: a minibatch counts by its size, and up to 3
    rows left over join the last one. Rows are gathered to minibatches, so that it does not matter how they come in. A
    Gram matrix is computed in the dtype of its rows, but at least in float32, of centred rows; what follows is float64.

    Attributes:
        count: Rows in the minibatches that are computed, as a tensor.
        xx: As in :class:`HSIC`, of these minibatches.
        xy: As in :class:`HSIC`.
        yy: As in :class:`HSIC`.

    Args:
        size: Rows of a minibatch, at least 4.
        x: Number of layers of the first side.
        y: Of the second; ``None``: it is the first side once more, which saves half.
        n: How many rows will come, where that is known: of batches that are minibatches no row is kept then.
        device: Where the sums are; the CPU by default.

    Raises:
        ValueError: The size is below 4.

    Example:
        >>> x, y = torch.randn(50, 8), torch.randn(50, 6)
        >>> MinibatchGrams(10, 1, 2).update([x], [x, y]).hsic().xy.shape
        torch.Size([1, 2])
    """

    count: Tensor
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

    @classmethod
    def _like(cls, state: Mapping[str, Tensor]) -> Self:
        size, x, y = state["form"].tolist()
        return cls(size, x, None if y < 0 else y, device=state["xy"].device)

    @classmethod
    def cost(cls, work: Workload, **options: Any) -> Cost:
        """As in ``LayerStatistic``; ``size`` is that of the minibatches."""
        size, both = min(options["size"], work.n), sum(work.distinct)
        flops = work.n * size * (both / (8 / work.itemsize) + len(work.x) * len(work.y))
        return Cost(flops=flops, kept=2 * size * both * work.itemsize + 8 * size**2 * len(work.distinct))

    @property
    def _pending(self) -> list[list[Tensor]]:
        x, y = self._layers
        return [getattr(self, f"pending_{place}") for place in range(x + (y or 0))]

    @torch.no_grad()
    def keep(self, rows: Tensor) -> Tensor | Gram:
        """What is to be kept of the next batch of a layer, for :meth:`update`: a copy, or the Gram matrix.

        Args:
            rows: ``(n, d)``, of any float dtype.
        """
        left = -1 if self.coming < 0 or any(self._pending) else int(self.coming - self.count)
        return _gram(rows) if len(rows) == (self.size if left >= self.size + 4 else left) else rows.clone()

    @torch.no_grad()
    def update(self, x: Sequence[Tensor | Gram], y: Sequence[Tensor | Gram] | None = None) -> Self:
        """Add a batch of rows; see :meth:`LayerMoments.update`. Rows are kept for a while: hand over copies.

        Args:
            x: For each layer of the first side ``(n, dx)``, or what :meth:`keep` made of it.
            y: Of the second; left out if that is the first.

        Returns:
            These statistics.

        Raises:
            ValueError: Layers are missing or too many, or their rows do not pair up.
        """
        layers = [*x, *(() if self._layers[1] is None else y or ())]
        grams = [layer for layer in layers if isinstance(layer, Gram)]
        rows = [layer for layer in layers if isinstance(layer, Tensor)]
        counts = [*(len(gram.products) for gram in grams), *map(len, rows)]
        pending = self._pending
        if len(set(counts)) != 1 or (grams and rows) or len(layers) != len(pending):
            raise ValueError(f"{len(pending)} layers must have the same rows, got {counts}")
        if grams:
            self._add(grams)
        for chunks, part in zip(pending, rows, strict=False):
            chunks.append(part)
        while sum(map(len, pending[0])) >= self.size + 4:
            self._add([_gram(_take(chunks, self.size)) for chunks in pending])
        return self

    def hsic(self) -> HSIC:
        """The sums over all minibatches, the rest included.

        Raises:
            ValueError: There are fewer than 4 rows.
        """
        sums, pending = HSIC(self.xx, self.xy, self.yy), self._pending
        if any(pending):
            return HSIC(*map(torch.add, sums, self._minibatch([_gram(torch.cat(chunks)) for chunks in pending])))
        if not self.count:
            raise ValueError("no rows have come yet; call update first")
        return sums

    def _settle(self) -> None:
        """Take in the rest: minibatches do not cross from a process to the next."""
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
        self.count = self.count + len(grams[0].products)

    def _minibatch(self, grams: Sequence[Gram]) -> HSIC:
        """Of one minibatch, which counts by its size."""
        n, (layers, others) = len(grams[0].products), self._layers
        both = packed(grams, len(grams), n, grams[0].products.device)
        x = Packed(*(part[:layers] for part in both))
        y = x if others is None else Packed(*(part[layers:] for part in both))
        return HSIC(*(part * n for part in unbiased(x, y)))


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
    return gram_of(rows, torch.promote_types(rows.dtype, torch.float32))
