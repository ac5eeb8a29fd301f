"""Paired timings: two ways in turn, so that a drift of the machine meets both."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable

import torch


def paired(first: Callable[[], object], second: Callable[[], object], repeats: int) -> tuple[float, float, float]:
    """Median seconds of both, and the median of the ratios first/second pair by pair.

    One run of each is not counted.
    """
    seconds: list[tuple[float, float]] = []
    for _ in range(repeats + 1):
        pair = []
        for function in (first, second):
            start = time.perf_counter()
            function()
            pair.append(time.perf_counter() - start)
        seconds.append((pair[0], pair[1]))
    counted = seconds[1:]
    return (
        statistics.median(a for a, _ in counted),
        statistics.median(b for _, b in counted),
        statistics.median(a / b for a, b in counted),
    )


def machine() -> str:
    """What the figures were measured on."""
    return f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
