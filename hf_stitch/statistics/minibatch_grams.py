"""All pairs of layers of two sides at once, by the Gram matrices of minibatches, streamed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_stitch.statistics.grams import Gram, Packed, gram_of, packed, unbiased
from hf_stitch.statistics.hsic import HSIC
from hf_stitch.statistics.layer_moments import total_over_processes

if TYPE_CHECKING:
    from accelerate import Accelerator


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
        self._sums = HSIC(*(total_over_processes(part, accelerator) for part in self.hsic()))
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
        both = packed(grams, len(grams), n, grams[0].products.device)
        x = Packed(*(part[: self._layers_x] for part in both))
        y = x if self.same else Packed(*(part[self._layers_x :] for part in both))
        sums = (part * n for part in unbiased(x, y))
        return HSIC(*sums) if self._sums is None else HSIC(*map(torch.add, self._sums, sums))


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
