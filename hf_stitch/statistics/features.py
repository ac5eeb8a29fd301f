"""The rows themselves, for what no sum over rows can give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from accelerate import Accelerator


class Features:
    """Paired rows, kept on the CPU in their own dtype: all of them, or a uniform random part of bounded size.

    With a limit, every row that comes draws a random number and those of the smallest numbers stay (Efraimidis
    and Spirakis 2006). Which rows stay depends on their order and the seed, not on the batches; parts with
    different seeds merge into a uniform part of all rows.

    Attributes:
        limit: How many rows are kept at most, or None for all.

    Args:
        limit: At least 2, or None.
        seed: Of the random numbers; give every process its own.

    Raises:
        ValueError: The limit is below 2.

    Example:
        >>> import torch
        >>> x = torch.arange(100.0)[:, None]
        >>> kept = Features(limit=5).update(x[:60], x[:60]).update(x[60:], x[60:])
        >>> kept.seen, len(kept.x), torch.equal(kept.x, kept.y)
        (100, 5, True)
    """

    def __init__(self, limit: int | None = None, seed: int = 0) -> None:
        if limit is not None and limit < 2:
            raise ValueError(f"Features needs a limit >= 2, or None to keep all rows, got {limit}")
        self.limit = limit
        self._random = np.random.default_rng(seed)
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self._seen = 0

    @property
    def seen(self) -> int:
        """How many rows have come, kept or not."""
        return self._seen

    @property
    def x(self) -> Tensor:
        """The x rows kept, in the order they came."""
        return self._joined()[0]

    @property
    def y(self) -> Tensor:
        """The y rows kept; row i belongs to row i of ``x``."""
        return self._joined()[1]

    def update(self, x_rows: Tensor, y_rows: Tensor) -> Features:
        """Add a batch of paired rows.

        Args:
            x_rows: ``(n, dx)``, any dtype and device; copied.
            y_rows: ``(n, dy)``.

        Returns:
            These features.

        Raises:
            ValueError: The sides differ in length, are no matrices, or have other widths than the rows before.
        """
        if x_rows.ndim != 2 or y_rows.ndim != 2 or len(x_rows) != len(y_rows):
            raise ValueError(f"rows must pair up, got shapes {tuple(x_rows.shape)} and {tuple(y_rows.shape)}")
        draws = torch.from_numpy(self._random.random(len(x_rows)))
        part = (x_rows.detach().to("cpu", copy=True), y_rows.detach().to("cpu", copy=True), draws)
        return self._add(part, len(x_rows))

    def merge(self, other: Features) -> Features:
        """Add the rows that ``other`` kept; ``other`` stays as it is.

        Raises:
            ValueError: The limits or widths differ.
        """
        if self.limit != other.limit:
            raise ValueError(f"only features of equal limits merge, got {self.limit} and {other.limit}")
        return self._add(other._joined(), other.seen) if other._parts else self

    def all_reduce(self, accelerator: Accelerator) -> Features:
        """Give every process the rows of all, in the order of the ranks; to be called once, by all, after the last row.

        Args:
            accelerator: The ``accelerate.Accelerator`` that knows the processes.

        Returns:
            These features.
        """
        if accelerator.num_processes == 1:
            return self
        from accelerate.utils import gather_object

        states = gather_object([self.state_dict()])
        self._parts, self._seen = [], 0
        for state in states:
            self.merge(Features.from_state_dict(state, self.limit))
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """The rows, the numbers they drew and how many were seen, ready for safetensors; empty without rows."""
        if not self._parts:
            return {}
        x, y, draws = self._joined()
        return {"x": x.contiguous(), "y": y.contiguous(), "draws": draws, "seen": torch.tensor(self._seen)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor], limit: int | None = None, seed: int = 0) -> Features:
        """Rebuild what ``state_dict`` gave.

        Args:
            state: The dict, e.g. from ``safetensors.torch.load_file``.
            limit: As it was.
            seed: For rows yet to come; another one than before.

        Raises:
            ValueError: A key is missing or unknown.
        """
        features = cls(limit, seed)
        if state and state.keys() != {"x", "y", "draws", "seen"}:
            raise ValueError(f"a state of Features has the keys draws, seen, x and y, got {sorted(state)}")
        return features._add((state["x"], state["y"], state["draws"]), int(state["seen"])) if state else features

    def __repr__(self) -> str:
        """The limit and the rows seen."""
        return f"Features(limit={self.limit}, seen={self.seen})"

    def _add(self, part: tuple[Tensor, Tensor, Tensor], seen: int) -> Features:
        if self._parts:
            for side, have, new in zip("xy", self._parts[0], part, strict=False):
                if have.shape[1] != new.shape[1]:
                    raise ValueError(f"{side} rows must have width {have.shape[1]} as before, got {new.shape[1]}")
        self._parts.append(part)
        self._seen += seen
        if self.limit is not None:
            x, y, draws = self._joined()
            if len(draws) > self.limit:
                kept = draws.topk(self.limit, largest=False).indices.sort().values
                self._parts = [(x[kept], y[kept], draws[kept])]
        return self

    def _joined(self) -> tuple[Tensor, Tensor, Tensor]:
        if not self._parts:
            raise ValueError("no rows have come yet; call update first")
        if len(self._parts) > 1:
            x, y, draws = zip(*self._parts, strict=True)
            self._parts = [(torch.cat(x), torch.cat(y), torch.cat(draws))]
        return self._parts[0]
