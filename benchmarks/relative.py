"""Relative representations and nearest neighbours compared with plain PyTorch, and memory for many rows.

Random rows, float32, cosine similarity. All methods search exactly, but may break ties differently. Each method runs in
a separate process, to measure its peak memory.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from benchmarks.timing import alone, show
from hf_stitch.relative import RelativeProjection, nearest

CHUNK, NEIGHBOURS, REPEATS = 4096, 10, 3
SPEED = (20_000, 300, 300)
MEMORY = (1_000_000, 768, 1_000)
"""Number of rows, width of a row, number of anchors."""

Sizes = tuple[int, int, int]
Way = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps rows and anchors to relative representations and the indices of their nearest neighbours."""


def made(n: int, width: int, anchors: int) -> tuple[Tensor, Tensor]:
    """Draw random rows ``(n, width)``, and use the first ``anchors`` of them as anchors."""
    rows = torch.randn(n, width, generator=torch.Generator().manual_seed(0))
    return rows, rows[:anchors].clone()


def ours(rows: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """Compute relative representations and neighbours with hf-stitch."""
    with torch.no_grad():
        relative = RelativeProjection.of(anchors)(rows)
    return relative, nearest(relative, relative, NEIGHBOURS)[1]


def in_chunks(rows: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """Compute relative representations and neighbours with hf-stitch on streamed rows."""
    with torch.no_grad():
        relative = RelativeProjection.of(anchors)(rows)
    return relative, nearest(relative, relative.split(CHUNK), NEIGHBOURS)[1]


def plain(rows: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """Compute relative representations and neighbours with plain PyTorch, for one chunk of queries at a time."""
    relative = functional.normalize(rows) @ functional.normalize(anchors).T
    unit = functional.normalize(relative)
    return relative, torch.cat([(queries @ unit.T).topk(NEIGHBOURS).indices for queries in unit.split(CHUNK)])


WAYS: dict[str, Way] = {"hf-stitch": ours, "hf-stitch in chunks": in_chunks, "plain": plain}


class Drawn:
    """A virtual array of random rows, generated one slice at a time."""

    def __init__(self, n: int, width: int) -> None:
        self.shape = (n, width)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: slice) -> NDArray[np.float32]:
        start, stop, _ = part.indices(len(self))
        return np.random.default_rng(start).standard_normal((stop - start, self.shape[1]), np.float32)


def timed(way: str, sizes: Sizes) -> tuple[float, Tensor, Tensor]:
    """Return the minimum seconds over several runs, the relative representations and the neighbours."""
    rows, anchors = made(*sizes)
    WAYS[way](rows[:100], anchors[:50])  # import libraries before the clock starts
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        relative, indices = WAYS[way](rows, anchors)
        seconds.append(time.perf_counter() - start)
    return min(seconds), relative, indices


def streamed(sizes: Sizes) -> tuple[float, Tensor, Tensor]:
    """Return seconds, relative representations and neighbours of 20 rows among a stream of many rows."""
    n, width, anchors = sizes
    rows: Any = Drawn(n, width)
    first = torch.from_numpy(rows[0:CHUNK])
    start = time.perf_counter()
    projection = RelativeProjection.of(first[:anchors])
    relative = projection(first[:20])
    indices = nearest(relative, projection.stream(rows, CHUNK), NEIGHBOURS)[1]
    return time.perf_counter() - start, relative, indices


def peak() -> float:
    """Return the peak memory of this process in MB. On Linux, the memory of the parent is excluded."""
    status = Path("/proc/self/status")
    if status.is_file():
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(way: str, sizes: Sizes) -> tuple[float, float, Tensor, Tensor]:
    """Run a method alone; return seconds, peak memory in MB, relative representations and neighbours."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.pt"
        seconds, most = map(float, alone("relative", way, str(path), *map(str, sizes)).split())
        return seconds, most, *torch.load(path, weights_only=True)


def compared(sizes: Sizes) -> Iterator[tuple[str, ...]]:
    """Compare all methods on the same rows."""
    outcomes = {way: measured(way, sizes) for way in WAYS}
    base = outcomes["plain"]
    for way, (seconds, most, relative, indices) in outcomes.items():
        gap = (relative - base[2]).abs().max()
        same = (indices[:, :, None] == base[3][:, None]).any(2).float().mean()
        yield way, f"{seconds:.2f}", f"{seconds / base[0]:.2f}", f"{most:,.0f}", f"{gap:.1e}", f"{same:.4%}"


def memory(sizes: Sizes) -> Iterator[tuple[str, ...]]:
    """Measure streams of few and of many rows."""
    n, width, anchors = sizes
    for count in (n // 50, n):
        seconds, most, *_ = measured("streamed", (count, width, anchors))
        yield f"{count:,}", f"{seconds:.1f}", f"{most:,.0f}"


def main() -> None:
    """Run the benchmark and print both tables."""
    n, width, anchors = SPEED
    columns = "method", "seconds", "over plain", "peak memory MB", "largest difference", "same neighbours"
    title = f"{n:,} rows x {width}, {anchors} anchors, {NEIGHBOURS} nearest neighbours"
    show(title, columns, compared(SPEED))
    _, width, anchors = MEMORY
    title = f"nearest neighbours of 20 rows among streamed rows x {width}, {anchors} anchors"
    show(title, ("rows", "seconds", "peak memory MB"), memory(MEMORY))


if __name__ == "__main__":
    way, place = sys.argv[1:3]
    n, width, anchors = map(int, sys.argv[3:])
    run = streamed((n, width, anchors)) if way == "streamed" else timed(way, (n, width, anchors))
    torch.save(run[1:], place)
    print(run[0], peak())
