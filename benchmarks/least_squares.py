"""Affine least squares on streamed rows compared with ``torch.linalg.lstsq`` on all rows at once."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.timing import alone, show
from hf_stitch.registry import registries
from hf_stitch.statistics import Moments

WIDTH, BATCH = 512, 10_000
SIZES = (100_000, 1_000_000)


def rows(n: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of paired float32 rows ``(BATCH, WIDTH)`` with a noisy linear relation."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    for _ in range(0, n, BATCH):
        x = torch.randn(BATCH, WIDTH, generator=generator) + 1
        yield x, x @ mixing + 0.1 * torch.randn(BATCH, WIDTH, generator=generator)


def streamed(n: int) -> tuple[float, Tensor]:
    """Return seconds and weights ``(WIDTH, WIDTH)`` of the fit from moments, without the time to generate rows."""
    seconds, moments = 0.0, Moments(WIDTH, WIDTH)
    for x, y in rows(n):
        start = time.perf_counter()
        moments.update(x, y)
        seconds += time.perf_counter() - start
    start = time.perf_counter()
    stitch = registries.matchers.build("lstsq").fit(moments)
    return seconds + time.perf_counter() - start, stitch.weight.detach()


def dense(n: int, driver: str) -> tuple[float, Tensor]:
    """Return seconds and weights ``(WIDTH, WIDTH)`` of ``torch.linalg.lstsq`` on [X|1] in float32."""
    x, y = torch.empty(n, WIDTH + 1), torch.empty(n, WIDTH)
    for i, (part_x, part_y) in enumerate(rows(n)):
        x[i * BATCH : (i + 1) * BATCH, :WIDTH] = part_x
        y[i * BATCH : (i + 1) * BATCH] = part_y
    x[:, WIDTH] = 1
    start = time.perf_counter()
    solution = torch.linalg.lstsq(x, y, driver=driver).solution
    return time.perf_counter() - start, solution[:WIDTH].T


def compared() -> Iterator[tuple[str, ...]]:
    """Run each method in a separate process, to measure its peak memory, and yield a row for each."""
    for n in SIZES:
        outcomes: dict[str, tuple[float, float, Tensor]] = {}
        for way in ("streamed", "gels", "gelsy"):
            seconds, peak, path = alone("least_squares", way, str(n)).split()
            outcomes[way] = (float(seconds), float(peak), torch.load(path, weights_only=True))
            ratio = outcomes[way][0] / outcomes["streamed"][0]
            gap = (outcomes[way][2] - outcomes["streamed"][2]).abs().max()
            label = way if way == "streamed" else f"torch.linalg.lstsq ({way})"
            yield f"{n:,}", label, f"{outcomes[way][0]:.1f}", f"{ratio:.2f}", f"{outcomes[way][1]:,.0f}", f"{gap:.1e}"


def main() -> None:
    """Run the benchmark and print its table."""
    columns = "rows", "method", "seconds", "over streamed", "peak memory MB", "largest difference"
    show(f"affine least squares {WIDTH} -> {WIDTH}, float32 rows", columns, compared())


if __name__ == "__main__":
    way, n = sys.argv[1], int(sys.argv[2])
    seconds, weight = streamed(n) if way == "streamed" else dense(n, way)
    with tempfile.NamedTemporaryFile(suffix=".pt", delete=False) as file:
        torch.save(weight.contiguous(), file)
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, file.name)
