"""The processes that share a job: a single one, or those that ``accelerate launch`` started."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

T = TypeVar("T")


LAUNCHED = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Environment variables with the number of processes: that of torchrun, and those of several mpirun."""


@dataclass(frozen=True)
class Processes:
    """The processes that share the samples.

    Attributes:
        accelerator: Accelerator of the processes; ``None`` for a single process.

    Example:
        >>> Processes(None).count, Processes(None).part(10)
        (1, (0, 10))
    """

    accelerator: Accelerator | None

    @classmethod
    def of(cls, accelerator: Accelerator | None) -> Processes:
        """Use the given accelerator, or create one if several processes were launched.

        Args:
            accelerator: Accelerator of the caller, or ``None``.

        Returns:
            The processes.
        """
        if accelerator is None and any(int(os.environ.get(name, "1")) > 1 for name in LAUNCHED):
            from accelerate import Accelerator

            accelerator = Accelerator()
        return cls(accelerator)

    @property
    def count(self) -> int:
        """Number of processes."""
        return 1 if self.accelerator is None else self.accelerator.num_processes

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""
        return 0 if self.accelerator is None else self.accelerator.process_index

    def part(self, n: int) -> tuple[int, int]:
        """Return the range of samples of this process; the ranges of all processes are a partition.

        Args:
            n: Number of samples.

        Returns:
            Index of the first sample, and index after the last sample.

        Raises:
            ValueError: If there are fewer samples than processes.
        """
        if n < self.count:
            raise ValueError(
                f"{n} samples are not enough for {self.count} processes: pass more samples or launch fewer processes"
            )
        return n * self.rank // self.count, n * (self.rank + 1) // self.count

    @property
    def device(self) -> torch.device | None:
        """Device on which this process runs networks; ``None`` without an accelerator."""
        return None if self.accelerator is None else self.accelerator.device

    def agree(self, value: T) -> T:
        """Broadcast a value from rank 0.

        Args:
            value: Value of this process; it must be possible to pickle it.

        Returns:
            The value of rank 0.
        """
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]

    def gather(self, value: T) -> list[T]:
        """Gather a value from every process.

        Args:
            value: Value of this process; it must be possible to pickle it.

        Returns:
            The values in the order of the ranks.
        """
        if self.count == 1:
            return [value]
        from accelerate.utils import gather_object

        return gather_object([value])
