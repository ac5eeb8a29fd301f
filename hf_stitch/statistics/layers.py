"""Base class for statistics of all layers of two sides at once, and their costs."""

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
    """What is compared, as far as costs depend on it.

    Attributes:
        n: Number of rows.
        x: Width of each layer of the first side.
        y: Width of each layer of the second side; the same as ``x`` if both sides are the same layers.
        same: Whether both sides are the same layers.
        distinct: Width of each distinct layer of both sides.
        itemsize: Bytes of a number in a row.

    Example:
        >>> Workload(n=1000, x=(64, 128), y=(32,), same=False, distinct=(64, 128, 32), itemsize=4).n
        1000
    """

    n: int
    x: tuple[int, ...]
    y: tuple[int, ...]
    same: bool
    distinct: tuple[int, ...]
    itemsize: int


@dataclass(frozen=True)
class Cost:
    """Cost of a computation in operations, memory and disk.

    Attributes:
        flops: Floating-point operations, most of them in float64.
        kept: Bytes of memory that stay allocated.
        transient: Bytes of memory that are additionally needed for a short time.
        disk: Bytes of rows in files.

    Example:
        >>> (Cost(kept=100, transient=50) + Cost(kept=10, transient=80)).memory
        190
    """

    flops: float = 0.0
    kept: float = 0.0
    transient: float = 0.0
    disk: float = 0.0

    @property
    def memory(self) -> int:
        """Peak bytes of memory."""
        return int(self.kept + self.transient)

    def __add__(self, other: Cost) -> Cost:
        """The cost of both computations, one after the other."""
        transient = max(self.transient, other.transient)
        return Cost(self.flops + other.flops, self.kept + other.kept, transient, self.disk + other.disk)


class LayerStatistic(ABC):
    """Base class of statistics of the rows of every layer of two sides. Row i is the same sample in every layer.

    Example:
        >>> import torch
        >>> from hf_stitch.statistics import LayerMoments
        >>> statistic = LayerMoments([torch.zeros(3), torch.zeros(5)])
        >>> isinstance(statistic, LayerStatistic)
        True
    """

    @classmethod
    @abstractmethod
    def cost(cls, work: Workload, **options: Any) -> Cost:
        """Estimate the cost of collecting this statistic.

        Args:
            work: What is compared.
            **options: Options of the statistic.

        Returns:
            The cost.
        """

    def keep(self, rows: Tensor) -> Any:
        """Copy what is needed of the rows of one layer until the batch of all other layers is available.

        Args:
            rows: ``(n, d)``, any float dtype. They are overwritten after the call.

        Returns:
            What :meth:`update` accepts instead of the rows: a copy, or a smaller summary.
        """
        return rows.clone()

    @abstractmethod
    def update(self, x: Sequence[Any], y: Sequence[Any] | None = None) -> Self:
        """Add a batch.

        Args:
            x: For each layer of the first side its rows ``(n, d)``, or the result of :meth:`keep`.
            y: The same for the second side; None if both sides are the same layers.

        Returns:
            This statistic.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the state as tensors, except rows in files."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> Self:
        """Restore the state from :meth:`state_dict`.

        Args:
            state: The tensors.

        Returns:
            This statistic.
        """

    @abstractmethod
    def all_reduce(self, accelerator: Accelerator) -> Self:
        """Combine the statistics of all processes; every process then has the total.

        All processes must call this method once, after the last row.

        Args:
            accelerator: The ``accelerate.Accelerator`` of the processes.

        Returns:
            This statistic.
        """
