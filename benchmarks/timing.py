"""Paired timings: two ways in turn, so that a drift of the machine meets both."""

from __future__ import annotations

import operator
import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch


def paired(first: Callable[[], object], second: Callable[[], object], repeats: int) -> tuple[float, float, float]:
    """Median seconds of both, and the median of the ratios first/second pair by pair.

    One run of each is not counted.
    """
    ways = {"first": first, "second": second}
    in_turn(ways, 1)
    seconds = in_turn(ways, repeats)
    ratios = map(operator.truediv, seconds["first"], seconds["second"])
    return statistics.median(seconds["first"]), statistics.median(seconds["second"]), statistics.median(ratios)


def in_turn(
    functions: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of every run of each, all of them in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = clock()
            function()
            seconds[name].append(clock() - start)
    return seconds


def machine() -> str:
    """What the figures were measured on."""
    return f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
