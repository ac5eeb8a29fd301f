"""Jobs on a GPU: time over the bare forward passes, error against float64 on the CPU, and peak memory.

Random weights, real sizes. Forwards run in float32, in float32 with TF32, and in bfloat16; statistics never do. Without
a GPU the benchmark reports that it has not run. ``python -m benchmarks.gpu --device cpu --small`` runs the same code on
tiny networks, to check it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import timm
import torch
import transformers as hf
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import hf_stitch
from hf_stitch import Adapter
from hf_stitch.data import PairedSamples
from hf_stitch.pairs import CollectedPair, Pair
from hf_stitch.relative import nearest
from hf_stitch.running import Run

BATCH, REPEATS, NEIGHBOURS = 128, 3, 10
FORWARDS = {"float32": torch.float32, "TF32": torch.float32, "bfloat16": torch.bfloat16}
"""Name -> dtype of the weights."""


@dataclass(frozen=True)
class Case:
    """Two networks of one architecture and their samples.

    Attributes:
        create: Builds a network.
        samples: Draws ``n`` samples.
        n: Number of samples.
    """

    create: Callable[[], nn.Module]
    samples: Callable[[int], Tensor]
    n: int


def _images(size: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(0))


def _tokens(length: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(1000, 20000, (n, length), generator=torch.Generator().manual_seed(0))


def cases(small: bool) -> dict[str, Case]:
    """Return the networks: real sizes, or tiny ones that run on a CPU in seconds."""
    if small:
        tiny: Any = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
        return {
            "ResNet": Case(lambda: timm.create_model("resnet10t", num_classes=5), _images(32), 48),
            "BERT": Case(lambda: hf.BertModel(hf.BertConfig(**tiny)), _tokens(8), 48),
        }
    return {
        "ResNet-50, 224 px": Case(lambda: timm.create_model("resnet50"), _images(224), 4096),
        "ViT-B/16, 224 px": Case(lambda: timm.create_model("vit_base_patch16_224"), _images(224), 2048),
        "BERT-base, 128 tokens": Case(lambda: hf.BertModel(hf.BertConfig()), _tokens(128), 4096),
    }


def adapters(case: Case, dtype: torch.dtype, device: torch.device) -> tuple[Adapter, Adapter]:
    """Build two networks on a device."""
    loaded = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = case.create().eval().to(device, dtype)
        example = case.samples(2).to(device)
        loaded.append(hf_stitch.load(model, example_inputs=example.to(dtype) if example.is_floating_point() else None))
    return loaded[0], loaded[1]


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of several runs, after one warm-up run."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    seconds = []
    for _ in range(REPEATS):
        wait()
        start = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@torch.no_grad()
def bare(a: Adapter, b: Adapter, samples: Tensor) -> None:
    """Run both networks on all samples."""
    for start in range(0, len(samples), BATCH):
        for network in (a, b):
            network.forward(network.preprocess(list(samples[start : start + BATCH])))


def error(case: Case, a: Adapter, b: Adapter, samples: Tensor) -> float:
    """Return the largest error of linear CKA: statistics of the device against float64 on the CPU, same activations."""
    few = samples[: 4 * BATCH]
    measured = hf_stitch.compare(a, b, few, batch_size=BATCH, metrics=["linear_cka", "minibatch_cka"], progress=False)
    activations = [hf_stitch.analysis.extract_activations(net, few, batch_size=BATCH, progress=False) for net in (a, b)]
    wide = [
        hf_stitch.Activations({name: v.double() for name, v in side.values.items()}, side.ids, side.pooling)
        for side in activations
    ]
    exact = hf_stitch.compare(*wide, batch_size=BATCH, metrics=["linear_cka", "minibatch_cka"], progress=False)
    assert measured.undefined.keys() == exact.undefined.keys()  # pairs too wide for so few samples
    return max(float(np.nanmax(abs(measured[name] - exact[name]))) for name in ("linear_cka", "minibatch_cka"))


def measure(name: str, case: Case, forwards: str, device: torch.device) -> list[str]:
    """Return a row of the table."""
    torch.set_float32_matmul_precision("high" if forwards == "TF32" else "highest")
    a, b = adapters(case, FORWARDS[forwards], device)
    samples = case.samples(case.n)
    samples = samples.to(FORWARDS[forwards]) if samples.is_floating_point() else samples
    pair = (a.layers[len(a.layers) // 2], b.layers[len(b.layers) // 2])
    floor = seconds_of(lambda: bare(a, b, samples), device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    compared = seconds_of(lambda: hf_stitch.compare(a, b, samples, batch_size=BATCH, progress=False), device)
    both, data, run = Pair(a, b, "mean").at([pair]), PairedSamples.of(samples), Run(BATCH, progress=False)
    stitched = seconds_of(lambda: CollectedPair(both, data, run).moments(pair), device)
    peak = f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f}" if device.type == "cuda" else "–"
    figures = (f"{floor:.2f}", f"{compared / floor:.3f}", f"{stitched / floor:.3f}", peak)
    return [name, forwards, *figures, f"{error(case, a, b, samples):.1e}"]


def neighbours(n: int, width: int, device: torch.device) -> Table:
    """Compare the nearest rows with plain PyTorch, all similarities of a block at once."""
    rows = torch.randn(n, width, generator=torch.Generator().manual_seed(0)).to(device)

    def plain() -> Tensor:
        unit = nn.functional.normalize(rows)
        return torch.cat([(some @ unit.T).topk(NEIGHBOURS).indices for some in unit.split(4096)])

    ours = seconds_of(lambda: nearest(rows, rows, NEIGHBOURS), device)
    theirs = seconds_of(plain, device)
    same = (nearest(rows, rows, NEIGHBOURS)[1][:, :, None] == plain()[:, None]).any(2).float().mean()
    table = Table("nearest rows", "seconds", "over plain PyTorch", "same")
    table.add_row(f"{n:,} × {width}", f"{ours:.3f}", f"{ours / theirs:.2f}", f"{same:.2%}")
    return table


def run(device: torch.device, small: bool) -> list[Table]:
    """Measure everything.

    Args:
        device: The device.
        small: Whether to use tiny networks.
    """
    about = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU: a check of the code, not a result"
    title = f"over the bare forwards of both networks, batch {BATCH} ({about}, torch {torch.__version__})"
    columns = ("networks", "forwards in", "forwards s", "compare", "moments of a pair", "peak GiB", "error of CKA")
    table = Table(*columns, title=title)
    before = torch.get_float32_matmul_precision()
    try:
        for name, case in cases(small).items():
            for forwards in FORWARDS:
                table.add_row(*measure(name, case, forwards, device))
    finally:
        torch.set_float32_matmul_precision(before)
    return [table, neighbours(*((2000, 32) if small else (100_000, 768)), device)]


def main(device: str | None = None, small: bool = False) -> None:
    """Run the benchmark and print its tables, or report that there is no GPU."""
    console = Console(width=140)
    if device is None and not torch.cuda.is_available():
        console.print(
            "benchmarks.gpu has NOT run: it requires a GPU. python -m benchmarks.gpu --device cpu --small checks it"
        )
        return
    for table in run(torch.device(device or "cuda"), small):
        console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    main(options.device, options.small)
