"""Processor time of permutation tests, relative to a new computation of the metric for every permutation.

Random activations with a falling spectrum, a part that both networks share and a ReLU; one thread. The new computation
runs for a few permutations, and its time is extrapolated.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.timing import seconds, show
from hf_stitch.analysis.permutation import maximum_test, pairing
from hf_stitch.registry import registries

PERMUTATIONS, MEMORY, ROUNDS = 200, 2**31, int(os.environ.get("ROUNDS", "3"))
RESNET = (64, 64, 128, 128, 256, 256, 512, 512)
CASES = [
    ("procrustes", "8 × 8 layers of ResNet-18, means", 359, RESNET, RESNET),
    ("procrustes", "wide by wide, flattened", 359, (4096,), (4096,)),
    ("procrustes", "wide by narrow", 359, (4096,), (64,)),
    ("procrustes", "width near the samples", 359, (512,), (512,)),
    ("procrustes", "narrow", 1000, (128,), (128,)),
    ("cca", "narrow", 1000, (128,), (128,)),
    ("pwcca", "narrow", 1000, (128,), (128,)),
    ("svcca", "narrow", 1000, (128,), (128,)),
    ("rsa", "any width", 500, (256,), (256,)),
    ("mutual_knn", "any width", 500, (256,), (256,)),
]
"""Metric, name, number of samples, widths of both sides."""


def activations(n: int, width: int, seed: int) -> Tensor:
    """Draw the activations of a layer."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(n, 16, generator=torch.Generator().manual_seed(99))
    noise = torch.randn(n, width, generator=generator) * torch.logspace(0, -2, width)
    return (shared @ torch.randn(16, width, generator=generator) / 4 + noise).relu().double()


def rows() -> Iterator[tuple[str, ...]]:
    """Yield a row for each case."""
    for name, case, n, widths_x, widths_y in CASES:
        metric = registries.metrics.build(name)
        x, y = ([activations(n, w, 10 * w + side) for w in widths] for side, widths in enumerate((widths_x, widths_y)))
        many = PERMUTATIONS if len(x) == 1 else PERMUTATIONS // 4
        ratios, before, after, apart = [], [], [], 0.0
        for round_index in range(ROUNDS):
            order = torch.from_numpy(np.random.default_rng(round_index).permutation(n))
            recomputed = np.empty((len(x), len(y)))

            def anew(
                recomputed: Any = recomputed, order: Tensor = order, x: Any = x, y: Any = y, metric: Any = metric
            ) -> None:
                for i, j in np.ndindex(recomputed.shape):
                    recomputed[i, j] = metric.function(x[i], y[j][order], **metric.options).item()

            before.append(PERMUTATIONS * seconds(anew)[0])
            shared = partial(maximum_test, metric, x, y, permutations=many, seed=round_index, memory=MEMORY)
            after.append(PERMUTATIONS / many * seconds(shared)[0])
            ratios.append(before[-1] / after[-1])
            apart = max(apart, abs(pairing(metric, x[-1], y[-1])(order) - recomputed[-1, -1]))
        figures = (f"{statistics.median(round_index):.1f}" for round_index in (before, after, ratios))
        yield name, case, str(n), *figures, f"{apart:.0e}"


def main() -> None:
    """Run the benchmark and print its table."""
    torch.set_num_threads(1)
    columns = "metric", "layers", "samples", "anew", "shared", "anew / shared", "largest difference"
    show(f"{PERMUTATIONS} permutations, processor seconds", columns, rows())
