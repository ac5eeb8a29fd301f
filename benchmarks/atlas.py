"""Every pair of layers against the bare forwards of both networks; random weights, real sizes, float32.

Minibatch CKA of ``flatten`` rows, and debiased CKA (all data, exact) of ``mean`` rows. The error is that of pairs drawn
at random, against float64 from the same activations; below the table, with their means moved.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import timm
import torch
import transformers as hf
from rich.console import Console
from rich.table import Table
from torch import nn

import hf_stitch
from benchmarks.timing import machine, paired
from hf_stitch import Adapter, NotACutError, Samples
from hf_stitch.analysis.activations import Activations, record
from hf_stitch.analysis.atlas import compare
from hf_stitch.metrics import build_metric, minibatch_cka

REPEATS, PAIRS, TOKENS = 5, 4, 128


def _resnet() -> nn.Module:
    return timm.create_model("resnet18", num_classes=10, zero_init_last=False)  # zeros leave CKA undefined


def _bert() -> nn.Module:
    return hf.BertModel(hf.BertConfig())


# network, image size, all modules or blocks only, samples, batch
CASES: dict[str, tuple[Callable[[], nn.Module], int, bool, int, int]] = {
    "ResNet-18, blocks, 64 px": (_resnet, 64, False, 1024, 64),
    "ResNet-18, all modules, 32 px": (_resnet, 32, True, 1024, 256),
    "ViT-Ti/16, blocks, 224 px": (lambda: timm.create_model("vit_tiny_patch16_224"), 224, False, 64, 16),
    "BERT-base, blocks, 128 tokens": (_bert, 0, False, 32, 8),
}


def _adapter(create: Callable[[], nn.Module], size: int, seed: int) -> Adapter:
    torch.manual_seed(seed)
    return hf_stitch.load(create().eval(), example_inputs=torch.randn(2, 3, size, size) if size else None)


def _samples(size: int, n: int) -> Samples:
    torch.manual_seed(0)
    return Samples.of(torch.randn(n, 3, size, size) if size else torch.randint(1000, 20000, (n, TOKENS)))


def _all_modules(adapter: Adapter) -> list[str]:
    """All that run once and return a representation."""
    names = []
    for name, _ in adapter.model.named_modules():
        try:
            adapter.form(name)
            names.append(name)
        except NotACutError:
            continue
    return names


def _bare(a: Adapter, b: Adapter, samples: Samples, batch: int) -> Callable[[], None]:
    def run() -> None:
        for part in samples.batches(batch):
            for adapter in (a, b):
                adapter.forward(adapter.preprocess(part.samples))

    return run


def _error(x: Activations, y: Activations, batch: int) -> float:
    metric = build_metric("minibatch_cka", batch_size=batch)
    atlas = compare(x, y, metrics=[metric], rows="flatten", batch_size=batch, progress=False)
    (values,) = atlas.values.values()
    pairs = random.Random(0).sample([(i, j) for i in range(len(x.layers)) for j in range(len(y.layers))], PAIRS)
    exact = {
        (i, j): minibatch_cka(x.values[x.layers[i]], y.values[y.layers[j]], batch_size=batch).item() for i, j in pairs
    }
    return max(abs(values[pair] - value) for pair, value in exact.items())


def _moved(activations: Activations, deviations: float) -> Activations:
    values = {name: rows + deviations * rows.std() for name, rows in activations.values.items()}
    return Activations(values, activations.ids, activations.rows)


@torch.no_grad()
def main() -> None:
    """Print the tables."""
    table = Table("networks", "layers", "n", "batch", "forwards s", title=f"compare over bare forwards ({machine()})")
    for column in ("minibatch, flatten", "debiased, mean", "error"):
        table.add_column(column, justify="right")
    far: dict[float, float] = {}
    for name, (create, size, everything, n, batch) in CASES.items():
        a, b = (_adapter(create, size, seed) for seed in (0, 1))
        samples = _samples(size, n)
        layers: dict[str, Any] = {}
        if everything:
            layers = {"layers_a": _all_modules(a), "layers_b": _all_modules(b)}
        bare = _bare(a, b, samples, batch)
        ratios, forwards = [], 0.0
        for metric, rows in (
            (build_metric("minibatch_cka", batch_size=batch), "flatten"),
            (build_metric("linear_cka", debiased=True), "mean"),
        ):
            options: dict[str, Any] = {"metrics": [metric], "rows": rows, "batch_size": batch, **layers}

            def ours(options: dict[str, Any] = options, a: Adapter = a, b: Adapter = b, s: Samples = samples) -> Any:
                return compare(a, b, s, progress=False, **options)

            _, forwards, ratio = paired(ours, bare, REPEATS)
            ratios.append(f"{ratio:.3f}")
        error = "–"
        if size and not everything:
            part = samples.take(2 * batch)
            x, y = (record(adapter, None, part, "flatten", batch_size=batch, progress=False) for adapter in (a, b))
            error = f"{_error(x, y, batch):.1e}"
            far = far or {d: _error(_moved(x, d), _moved(y, d), batch) for d in (0.0, 30.0, 300.0)}
        count = f"{len(layers.get('layers_a', a.layers))} × {len(layers.get('layers_b', b.layers))}"
        table.add_row(name, count, str(n), str(batch), f"{forwards:.2f}", *ratios, error)
    console = Console(width=140)
    console.print(table)
    console.print(
        "error with means moved by standard deviations: " + ", ".join(f"{d:g}: {e:.1e}" for d, e in far.items())
    )
