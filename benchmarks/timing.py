"""Paired timings: functions run in turn, so that a drift of the machine affects all of them."""

from __future__ import annotations

import operator
import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch


def paired(first: Callable[[], object], second: Callable[[], object], repeats: int) -> tuple[float, float, float]:
    """Time two functions in turn, after one warm-up run of each.

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
    """Time several functions in turn.

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


def machine() -> str:
    """Describe the machine: processor architecture, number of threads and version of torch."""
    return f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
