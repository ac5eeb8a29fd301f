"""The processes that share a job: one, or those that ``accelerate launch`` started."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

T = TypeVar("T")


LAUNCHED = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables in which launchers say how many processes there are: torchrun's, and those of several mpirun."""


@dataclass(frozen=True)
class Processes:
    """The processes that share the samples; one, if there is no accelerator."""

    accelerator: Accelerator | None

    @classmethod
    def of(cls, accelerator: Accelerator | None) -> Processes:
        """Those that are given, or those that were launched."""
        if accelerator is None and any(int(os.environ.get(name, "1")) > 1 for name in LAUNCHED):
            from accelerate import Accelerator

            accelerator = Accelerator()
        return cls(accelerator)

    @property
    def count(self) -> int:
        """How many there are."""
        return 1 if self.accelerator is None else self.accelerator.num_processes

    @property
    def rank(self) -> int:
        """Which one this is."""
        return 0 if self.accelerator is None else self.accelerator.process_index

    def part(self, n: int) -> tuple[int, int]:
        """This process's share of n samples, from where to where: none is left out, none comes twice.

        Raises:
            ValueError: If there are fewer samples than processes.
        """
        if n < self.count:
            raise ValueError(f"{n} samples are not enough for {self.count} processes")
        return n * self.rank // self.count, n * (self.rank + 1) // self.count

    @property
    def device(self) -> torch.device | None:
        """Where this process runs networks; ``None`` without an accelerator."""
        return None if self.accelerator is None else self.accelerator.device

    def agree(self, value: T) -> T:
        """What the first process says."""
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]

    def gather(self, value: T) -> list[T]:
        """What every process says, in the order of the ranks."""
        if self.count == 1:
            return [value]
        from accelerate.utils import gather_object

        return gather_object([value])
