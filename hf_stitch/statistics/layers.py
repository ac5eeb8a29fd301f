"""Statistics of all layers of two sides at once, and what each costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Workload:
    """What is compared with what, as far as costs depend on it.

    Attributes:
        n: Number of rows.
        x: Width of each layer of the first side.
        y: Of the second; the same where that is the first.
        same: Whether both sides are the same layers.
        distinct: Width of each distinct layer of both sides.
        itemsize: Bytes of a number in a row.
    """

    n: int
    x: tuple[int, ...]
    y: tuple[int, ...]
    same: bool
    distinct: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True)
class Cost:
    """What something takes.

    Attributes:
        flops: Floating-point operations, most of them in float64.
        kept: Bytes of memory that are kept.
        transient: Bytes of memory that are needed for a moment beside.
        disk: Bytes of rows in files.
    """

    flops: float = 0.0
    kept: float = 0.0
    transient: float = 0.0
    disk: float = 0.0

    @property
    def memory(self) -> int:
        """Bytes of memory at most."""
        return int(self.kept + self.transient)

    def __add__(self, other: Cost) -> Cost:
        """Both, one after the other."""
        transient = max(self.transient, other.transient)
        return Cost(self.flops + other.flops, self.kept + other.kept, transient, self.disk + other.disk)


class LayerStatistic(ABC):
    """A statistic of the rows of every layer of two sides, row i being the same sample everywhere."""

    @classmethod
    @abstractmethod
    def cost(cls, work: Workload, **options: Any) -> Cost:
        """What collecting it takes.

        Args:
            work: What is compared.
            **options: Of the statistic.
        """

    def keep(self, rows: Tensor) -> Any:
        """What is to be kept of the rows of one layer, until those of all others in the batch have come.

        Args:
            rows: ``(n, d)``, of any float dtype; overwritten afterwards.

        Returns:
            What :meth:`update` takes in its place: a copy, or less.
        """
        return rows.clone()

    @abstractmethod
    def update(self, x: Sequence[Any], y: Sequence[Any] | None = None) -> Self:
        """Add a batch.

        Args:
            x: For each layer of the first side its rows ``(n, d)``, or what :meth:`keep` made of them.
            y: Of the second; left out if that is the first.

        Returns:
            This statistic.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """A copy of everything as tensors, but for rows in files."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> Self:
        """Take up what :meth:`state_dict` gave.

        Args:
            state: The tensors.

        Returns:
            This statistic.
        """

    @abstractmethod
    def all_reduce(self, accelerator: Accelerator) -> Self:
        """Give every process what all have collected; to be called once, by all, after the last row.

        Args:
            accelerator: The ``accelerate.Accelerator`` that knows the processes.

        Returns:
            This statistic.
        """
