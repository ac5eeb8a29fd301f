"""Measuring what a load costs, and preventing connections and programs."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CPU_SECONDS, MEMORY = 2.0, 500 * 2**20
"""The budget of a load or a refusal, beyond what its own weights need; see docs/explanation/trust.md."""


class Contact:
    """Records and prevents connections and new processes, at the last step before the operating system."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def prevent(self, what: str) -> Callable[..., Any]:
        """Return a function that records its call and fails."""

        def fail(*args: Any, **options: Any) -> Any:
            self.made.append(f"{what}{args[:2]}")
            raise OSError(f"{what} in a test that allows none")

        return fail


class Cost:
    """What a block of code cost: CPU seconds, and growth of the peak of memory in bytes."""

    seconds: float
    memory: int


@contextmanager
def measured() -> Iterator[Cost]:
    """Measure a block of code, including blocks that raise an error."""
    cost = Cost()
    peak, start = _peak(reset=True), time.process_time()
    try:
        yield cost
    finally:
        cost.seconds, cost.memory = time.process_time() - start, max(_peak() - peak, 0)


def _peak(*, reset: bool = False) -> int:
    """Return the peak of memory in bytes, since the last reset where the system can reset it."""
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
