"""Rows in memory or in files, for computations that sums do not suffice for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

from hf_stitch.running import Processes
from hf_stitch.statistics.base import Rows, Statistic, as_tensor
from hf_stitch.statistics.grams import Grams
from hf_stitch.storage.tensors import RowStore

if TYPE_CHECKING:
    from accelerate import Accelerator


class Features(Statistic):
    """Paired rows, stored on the CPU in their dtype: all of them, or a uniform random sample of bounded size.

    With a limit, every row gets a random number, and the rows with the smallest numbers are stored (Efraimidis and
    Spirakis 2006). The selection depends on the order of the rows and the seed, not on the batches. Features with
    different seeds merge into a uniform sample of all rows.

    Attributes:
        limit: Maximum number of stored rows, or None to store all.
        x_parts: Stored x rows, by batch.
        y_parts: Stored y rows, by batch.
        draws: Random numbers of the stored rows.
        count: Number of rows added, as a tensor.

    Args:
        limit: Maximum number of rows, at least 2, or None.
        seed: Seed of the random numbers; use a different seed in every process.

    Example:
        >>> import torch
        >>> x = torch.arange(100.0)[:, None]
        >>> kept = Features(limit=5).update(x[:60], x[:60]).update(x[60:], x[60:])
        >>> kept.seen, len(kept.x), torch.equal(kept.x, kept.y)
        (100, 5, True)
    """

    x_parts: list[Tensor]
    y_parts: list[Tensor]
    draws: list[Tensor]
    count: Tensor

    def __init__(self, limit: int | None = None, seed: int = 0) -> None:
        if limit is not None and limit < 2:
            raise ValueError(f"limit must be at least 2, or None to store all rows, got {limit}")
        super().__init__()
        self.limit = limit
        self._random = np.random.default_rng(seed)
        self.add_state("most", torch.tensor(-1 if limit is None else limit), "same")
        self.add_state("count", torch.tensor(0), "sum")
        for name in ("x_parts", "y_parts", "draws"):
            self.add_state(name, None, "cat")

    @classmethod
    def _like(cls, state: Mapping[str, Tensor]) -> Self:
        most = int(state["most"])
        return cls(None if most < 0 else most)

    @property
    def seen(self) -> int:
        """Number of rows added, stored or not."""
        return int(self.count)

    @property
    def x(self) -> Tensor:
        """Stored x rows, in the order of addition."""
        return self._concatenated("x_parts")

    @property
    def y(self) -> Tensor:
        """Stored y rows; row i is paired with row i of ``x``."""
        return self._concatenated("y_parts")

    def update(self, x_rows: Rows, y_rows: Rows) -> Self:
        """Add a batch of paired rows.

        Args:
            x_rows: ``(n, dx)`` tensor of any dtype and device, or array; copied.
            y_rows: ``(n, dy)``.
        """
        x_rows, y_rows = as_tensor("x_rows", x_rows), as_tensor("y_rows", y_rows)
        if x_rows.ndim != 2 or y_rows.ndim != 2 or len(x_rows) != len(y_rows):
            raise ValueError(f"rows must pair up, got shapes {tuple(x_rows.shape)} and {tuple(y_rows.shape)}")
        self._check_widths(x_rows, y_rows)
        self.x_parts.append(x_rows.detach().to("cpu", copy=True))
        self.y_parts.append(y_rows.detach().to("cpu", copy=True))
        self.draws.append(torch.from_numpy(self._random.random(len(x_rows))))
        self.count = self.count + len(x_rows)
        self._keep_few()
        return self

    def merge(self, other: Self) -> Self:
        """Add the stored rows of ``other``, which does not change."""
        if other.limit != self.limit:
            raise ValueError(f"features must have equal limits to merge, got {self.limit} and {other.limit}")
        if other.x_parts:
            self._check_widths(other.x_parts[0], other.y_parts[0])
        super().merge(other)
        self._keep_few()
        return self

    def __repr__(self) -> str:
        return f"Features(limit={self.limit}, seen={self.seen})"

    def _check_widths(self, x: Tensor, y: Tensor) -> None:
        for side, parts, new in (("x", self.x_parts, x), ("y", self.y_parts, y)):
            if parts and parts[0].shape[1] != new.shape[1]:
                raise ValueError(
                    f"{side} rows must have width {parts[0].shape[1]} like earlier rows, got {new.shape[1]}"
                )

    def _keep_few(self) -> None:
        """Reduce the rows to the limit, keeping the smallest random numbers."""
        if self.limit is None or sum(map(len, self.draws)) <= self.limit:
            return
        selected = self._concatenated("draws").topk(self.limit, largest=False).indices.sort().values
        for name in ("x_parts", "y_parts", "draws"):
            setattr(self, name, [self._concatenated(name)[selected]])

    def _concatenated(self, name: str) -> Tensor:
        parts: list[Tensor] = getattr(self, name)
        if not parts:
            raise ValueError("features are empty; call update first")
        if len(parts) > 1:
            parts[:] = [torch.cat(parts)]
        return parts[0]


_MESSAGE_BYTES = 2**26
"""Bytes per message between processes."""


class LayerRows:
    """Rows of every layer in files, one per layer, which are memory-mapped for reading.

    The constructor uses only the width and dtype of its rows. Dtypes narrower than float32 are stored as float32, and
    returned in the original dtype.
    """

    def __init__(self, folder: Path, x: Sequence[Tensor], y: Sequence[Tensor] | None = None) -> None:
        self._folder, self._layers_x, self._same = folder, len(x), y is None
        self._dtypes = [rows.dtype for rows in (*x, *(y or ()))]
        self._like = [rows[:0].to("cpu", torch.promote_types(rows.dtype, torch.float32)) for rows in (*x, *(y or ()))]
        self._open_stores: list[RowStore] | None = None  # opened at the first rows: a run may be resumed

    def _open(self, ending: str, rows: int = 0) -> list[RowStore]:
        """Open the files and truncate them to a number of rows."""
        paths = (self._folder / f"{layer}.{ending}" for layer in range(len(self._like)))
        return [RowStore(path, resume=rows, like=like) for path, like in zip(paths, self._like, strict=True)]

    @property
    def _stores(self) -> list[RowStore]:
        if self._open_stores is None:
            self._open_stores = self._open("rows")
        return self._open_stores

    @property
    def n(self) -> int:
        """Number of rows."""
        return len(self._stores[0])

    def x(self, i: int) -> Tensor:
        """Return the rows of layer i of the first side, ``(n, dx)``."""
        return self._stores[i].rows().to(self._dtypes[i])

    def y(self, j: int) -> Tensor:
        """Return the rows of layer j of the second side, ``(n, dy)``."""
        return self.x(j if self._same else self._layers_x + j)

    @cached_property
    def grams(self) -> Grams:
        """Gram matrices of all layers, computed once."""
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
        """Truncate the files to the rows of the saved state."""
        self._open_stores = self._open("rows", int(state["count"]))
        for store, digest in zip(self._open_stores, state["digests"].cpu(), strict=True):
            if not torch.equal(store.digest(), digest):
                raise ValueError(f"{store.path} does not contain the saved rows")
        return self

    def all_reduce(self, accelerator: Accelerator) -> Self:
        """Gather the rows of all processes on every process, in the order of the ranks.

        All processes must call this method once, after the last row.
        """
        if accelerator.num_processes == 1:
            return self
        from accelerate.utils import broadcast

        processes = Processes(accelerator)
        counts = processes.gather(self.n)
        stores = self._open("all")
        for local, store, like in zip(self._stores, stores, self._like, strict=True):
            chunk_size = max(_MESSAGE_BYTES // max(like.shape[1] * like.element_size(), 1), 1)
            for rank, count in enumerate(counts):
                for start in range(0, count, chunk_size):
                    size = min(chunk_size, count - start)
                    chunk = (
                        local.rows()[start : start + size]
                        if processes.rank == rank
                        else like.new_empty(size, like.shape[1])
                    )
                    store.append(broadcast(chunk.to(accelerator.device, copy=True), from_process=rank).cpu())
        self._open_stores = stores
        return self
