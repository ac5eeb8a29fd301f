"""Paired timings: functions run alternately, so that a drift of the machine affects all of them."""

from __future__ import annotations

import operator
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from rich.console import Console
from rich.table import Table


def paired(first: Callable[[], object], second: Callable[[], object], repeats: int) -> tuple[float, float, float]:
    """Time two functions alternately, after one warm-up run of each.

    Args:
        first: First function.
        second: Second function.
        repeats: Number of timed runs of each.

    Returns:
        Median seconds of the first, median seconds of the second, and the median over runs of the ratio first/second.
    """
    ways = {"first": first, "second": second}
    in_turn(ways, 1)
    seconds = in_turn(ways, repeats)
    ratios = map(operator.truediv, seconds["first"], seconds["second"])
    return statistics.median(seconds["first"]), statistics.median(seconds["second"]), statistics.median(ratios)


def in_turn(
    functions: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Time several functions alternately.

    Args:
        functions: Functions by name.
        repeats: Number of runs of each.
        clock: Returns the time in seconds.

    Returns:
        Name -> seconds of every run.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = clock()
            function()
            seconds[name].append(clock() - start)
    return seconds


def seconds(job: Callable[[], object], repeats: int = 1) -> list[float]:
    """Return the processor time of every run of a job."""
    return in_turn({"": job}, repeats, time.process_time)[""]


def alone(module: str, *arguments: str) -> str:
    """Run a benchmark in a separate process, and return the last line that it prints."""
    call = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    child = subprocess.run(call, capture_output=True, text=True, check=False)
    if child.returncode:
        raise RuntimeError(f"{module}, {arguments} ended with {child.returncode}: {child.stderr[-2000:]}")
    return child.stdout.splitlines()[-1]


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table with the machine in its title, after all rows are computed."""
    table = Table(*columns, title=f"{title} ({machine()})")
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=160).print(table)


def machine() -> str:
    """Describe the machine: processor architecture, number of threads and version of torch."""
    return f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
