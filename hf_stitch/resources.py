"""Free memory and disk space, running time, and torch threads."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hf_stitch.printing import see

if TYPE_CHECKING:
    import torch


def free_memory(device: torch.device) -> int:
    """Return the free memory of a device in bytes."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    import psutil  # type: ignore[import-untyped]

    return int(psutil.virtual_memory().available)


def free_disk(folder: Path) -> int:
    """Return the free bytes of the disk of a folder."""
    existing = next(ancestor for ancestor in (folder.absolute(), *folder.absolute().parents) if ancestor.exists())
    return shutil.disk_usage(existing).free


def sized(count: float) -> str:
    """Format a number of bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def check_fits(data: str, size: int, device: torch.device, instead: str) -> None:
    """Raise an error if data do not fit into memory."""
    if size > (free := free_memory(device)):
        raise ValueError(
            f"{data} take {sized(size)} of memory, but {sized(free)} are free: {instead}{see('too-large')}"
        )


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the running time of the second run of a function, in seconds."""

    def wait() -> None:
        if device.type == "cuda":
            import torch

            torch.cuda.synchronize(device)

    work()
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, because several threads slow down networks of a few thousand weights."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
