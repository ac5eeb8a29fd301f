"""The rows of every layer of two sides, in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from hf_stitch.running import Processes
from hf_stitch.statistics.grams import Grams
from hf_stitch.storage.tensors import RowStore

if TYPE_CHECKING:
    from accelerate import Accelerator

_MESSAGE_BYTES = 2**26
"""Bytes per message to the other processes."""


class LayerRows:
    """The rows of every layer in files, one per layer, which are memory-mapped for reading.

    Of the rows with which it is made, width and dtype count. Dtypes narrower than float32 are stored as float32, and
    returned as they were.
    """

    def __init__(self, folder: Path, x: Sequence[Tensor], y: Sequence[Tensor] | None = None) -> None:
        self._folder, self._layers_x, self._same = folder, len(x), y is None
        self._dtypes = [rows.dtype for rows in (*x, *(y or ()))]
        self._like = [rows[:0].to("cpu", torch.promote_types(rows.dtype, torch.float32)) for rows in (*x, *(y or ()))]
        self._held: list[RowStore] | None = None  # opened with the first rows, because an earlier run may be resumed

    def _opened(self, ending: str, rows: int = 0) -> list[RowStore]:
        """Open the files and truncate them to some rows."""
        paths = (self._folder / f"{place}.{ending}" for place in range(len(self._like)))
        return [RowStore(path, resume=rows, like=like) for path, like in zip(paths, self._like, strict=True)]

    @property
    def _stores(self) -> list[RowStore]:
        if self._held is None:
            self._held = self._opened("rows")
        return self._held

    @property
    def n(self) -> int:
        """Number of rows."""
        return len(self._stores[0])

    def x(self, i: int) -> Tensor:
        """The rows of layer i of the first side, ``(n, dx)``."""
        return self._stores[i].rows().to(self._dtypes[i])

    def y(self, j: int) -> Tensor:
        """The rows of layer j of the second side, ``(n, dy)``."""
        return self.x(j if self._same else self._layers_x + j)

    @cached_property
    def grams(self) -> Grams:
        """The Gram matrices of all layers, computed once."""
        rows = [store.rows() for store in self._stores]
        return Grams(rows) if self._same else Grams(rows[: self._layers_x], rows[self._layers_x :])

    def update(self, x: Sequence[Tensor], y: Sequence[Tensor] | None = None) -> Self:
        """Add a batch of rows of every layer. Row i must be the same sample in every layer."""
        for store, like, rows in zip(self._stores, self._like, (*x, *(y or ())), strict=True):
            store.append(rows.to("cpu", like.dtype))
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Return the number of rows and the digests of the files that contain them."""
        return {"count": torch.tensor(self.n), "digests": torch.stack([store.digest() for store in self._stores])}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> Self:
        """Truncate the files to the rows that existed when the state was saved."""
        self._held = self._opened("rows", int(state["count"]))
        for store, digest in zip(self._held, state["digests"].cpu(), strict=True):
            if not torch.equal(store.digest(), digest):
                raise ValueError(f"{store.path} does not contain the rows that were saved")
        return self

    def all_reduce(self, accelerator: Accelerator) -> Self:
        """Give every process the rows of all processes, in the order of the ranks.

        All processes must call this method once, after the last row.
        """
        if accelerator.num_processes == 1:
            return self
        from accelerate.utils import broadcast

        processes = Processes(accelerator)
        counts = processes.gather(self.n)
        stores = self._opened("all")
        for own, store, like in zip(self._stores, stores, self._like, strict=True):
            some = max(_MESSAGE_BYTES // max(like.shape[1] * like.element_size(), 1), 1)
            for rank, count in enumerate(counts):
                for start in range(0, count, some):
                    size = min(some, count - start)
                    part = (
                        own.rows()[start : start + size]
                        if processes.rank == rank
                        else like.new_empty(size, like.shape[1])
                    )
                    store.append(broadcast(part.to(accelerator.device, copy=True), from_process=rank).cpu())
        self._held = stores
        return self
