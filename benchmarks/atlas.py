"""Comparison of all pairs of layers: time over the forward passes of both networks, and error, for several tools.

Random weights, real sizes, float32. Times are processor seconds, which on one thread equal wall-clock seconds on an
idle machine. Limits are lower bounds of the machine: a tool cannot be faster. Errors are the maximum over all pairs,
against the same estimator in float64 on the activations that the tool uses. Activations are flattened. hf-stitch leaves
out tokens without a position (CLS), and averages over tokens of texts, because their lengths vary.

Install the other tools with ``pip install "hf-stitch[bench]"``. Missing tools are reported and left out.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import timm
import torch
import transformers as hf
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hf_stitch
from benchmarks.timing import in_turn, machine
from hf_stitch import Adapter, NotACutError, Samples
from hf_stitch.analysis.comparison.asking import ROWS_OF, Rows
from hf_stitch.analysis.comparison.layers import LayerReader
from hf_stitch.analysis.comparison.sides import Network, Reader
from hf_stitch.metrics._routes import Workload
from hf_stitch.registry import registries
from hf_stitch.representation import Pooling
from hf_stitch.workflows._compare import compare

Array = NDArray[np.float64]
Tool = Callable[[Adapter, Adapter, Sequence[str], Tensor, int], Any]
REPEATS, TOKENS = 2, 128
DEVIATIONS = (0, 30, 300)
OURS, DEBIASED = "hf-stitch", "debiased, mean"


# -- networks and inputs -----------------------------------------------------------------------------------------------
def _resnet() -> nn.Module:
    return timm.create_model("resnet18", num_classes=10, zero_init_last=False)  # CKA is undefined for zeros


def _bert() -> nn.Module:
    return hf.BertModel(hf.BertConfig())


@dataclass(frozen=True)
class Case:
    """Two networks of one architecture and the size of their inputs: images of ``size`` pixels, or texts if it is 0."""

    create: Callable[[], nn.Module]
    size: int
    n: int
    batch: int
    every_module: bool = False

    @property
    def rows(self) -> Pooling:
        """Pooling for minibatch CKA."""
        return "flatten" if self.size else "mean"

    def inputs(self, n: int) -> Tensor:
        """Draw ``n`` random samples: images ``(n, 3, size, size)`` float32, or token ids ``(n, TOKENS)`` int64."""
        generator = torch.Generator().manual_seed(0)
        if self.size:
            return torch.randn(n, 3, self.size, self.size, generator=generator)
        return torch.randint(1000, 20000, (n, TOKENS), generator=generator)

    def adapter(self, seed: int) -> Adapter:
        """Build a network with random weights."""
        torch.manual_seed(seed)
        return hf_stitch.load(self.create().eval(), example_inputs=self.inputs(2) if self.size else None)


CASES = {
    "ResNet-18, blocks, 64 px": Case(_resnet, 64, 2048, 32),
    "ResNet-18, all modules, 32 px": Case(_resnet, 32, 1024, 256, every_module=True),
    "ViT-Ti/16, blocks, 224 px": Case(lambda: timm.create_model("vit_tiny_patch16_224"), 224, 128, 32),
    "BERT-base, blocks, 128 tokens": Case(_bert, 0, 256, 16),
}


class _Shift(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


def _far(seed: int, deviations: float) -> nn.Module:
    """Build three layers with outputs of standard deviation about 1 and mean ``deviations``."""
    torch.manual_seed(seed)
    widths = (64, 512, 512, 512)
    layers = []
    for d, width in pairwise(widths):
        layers += [nn.Linear(d, width), nn.BatchNorm1d(width), _Shift(deviations)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for _ in range(50):
            model(torch.randn(256, widths[0]))
    return model.eval()


def _modules(adapter: Adapter, inputs: Tensor) -> list[str]:
    """List the modules that run once and return a representation, in execution order."""
    named = []
    for name, _ in adapter.model.named_modules():
        with contextlib.suppress(NotACutError):
            adapter.spec(name)
            named.append(name)
    order: list[str] = []
    adapter.run_with_callback(inputs, named, lambda name, _: order.append(name))
    return order


# -- the tools ---------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _ours(pooling: Pooling, debiased: bool = False) -> Tool:
    def run(a: Adapter, b: Adapter, layers: Sequence[str], inputs: Tensor, batch: int) -> Array:
        options = {"debiased": True} if debiased else {"batch_size": batch}
        metric = registries.metrics.build("linear_cka" if debiased else "minibatch_cka", **options)
        named: dict[str, Any] = {"layers_a": layers, "layers_b": layers, "metrics": [metric], "rows": ROWS_OF[pooling]}
        (values,) = compare(a, b, Samples.of(inputs), batch_size=batch, progress=False, **named).values.values()
        return values

    return run


def _torch_cka(a: Adapter, b: Adapter, layers: Sequence[str], inputs: Tensor, batch: int) -> Array:
    from torch_cka import CKA

    with _quiet():
        cka = CKA(a.model, b.model, "a", "b", list(layers), list(layers))
        try:
            cka.compare(DataLoader(TensorDataset(inputs), batch))
        except AssertionError:  # torch-cka asserts that no value is NaN
            return np.full((len(layers), len(layers)), np.nan)
        finally:  # torch-cka does not remove its hooks
            for adapter in (a, b):
                for module in adapter.model.modules():
                    module._forward_hooks.clear()
    return cka.hsic_matrix.double().numpy()


def _pytorch_cka(a: Adapter, b: Adapter, layers: Sequence[str], inputs: Tensor, batch: int) -> Array:
    from cka import compute_cka

    loader = DataLoader(TensorDataset(inputs), batch)
    (similarities,) = compute_cka(a.model, b.model, loader, layers=list(layers), device="cpu", progress=False)
    return similarities.double().numpy()


def _others() -> dict[str, Tool]:
    tools: dict[str, Tool] = {}
    for name, module, tool in (("torch-cka", "torch_cka", _torch_cka), ("pytorch-cka", "cka", _pytorch_cka)):
        try:
            importlib.import_module(module)
            tools[name] = tool
        except ImportError:
            print(f'{name} is not installed and is left out: pip install "hf-stitch[bench]"', file=sys.stderr)
    return tools


def _bare(a: Adapter, b: Adapter, layers: Sequence[str], inputs: Tensor, batch: int) -> None:
    for part in Samples.of(inputs).batches(batch):
        for adapter in (a, b):
            adapter.forward(adapter.preprocess(part.samples))


# -- limits ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Rates:
    """Work of the machine per processor second: products of large matrices, and reads from beyond the caches."""

    single: float  # floating-point operations in float32
    double: float  # the same in float64
    memory: float  # bytes

    @classmethod
    def measured(cls) -> Rates:
        """Return the best rates of a few runs."""

        def fastest(function: Callable[[], object]) -> float:
            return min(in_turn({"": function}, 5, time.process_time)[""])

        square = torch.randn(1024, 1024)
        single, double = (partial(torch.mm, side, side) for side in (square, square.double()))
        many = torch.randn(2**26)
        return cls(2 * 1024**3 / fastest(single), 2 * 1024**3 / fastest(double), 4 * len(many) / fastest(many.sum))


def _work(a: Adapter, b: Adapter, layers: Sequence[str], inputs: Tensor, rows: Rows) -> Workload:
    reader = Reader(Samples.of(inputs))
    with _quiet():
        read = LayerReader([Network(a, reader), Network(b, reader)], layers, layers, rows)
    return read.workload(read.groups[0])


def _limits(
    case: Case, a: Adapter, b: Adapter, layers: Sequence[str], inputs: Tensor, rates: Rates
) -> tuple[float, float]:
    """Return the least seconds of debiased CKA of means, and of minibatch CKA: all products once, all values read once.

    Only half of a symmetric matrix counts. Debiased CKA uses co-moments or Gram matrices, whichever is cheaper.
    """
    mean, rows = (_work(a, b, layers, inputs, ROWS_OF[pooling]) for pooling in ("mean", case.rows))
    n, pairs = case.n, len(rows.x) * len(rows.y)
    reading = n * sum(rows.distinct) * (1 if case.size else TOKENS) * rows.itemsize / rates.memory
    moments = n * (2 * sum(mean.x) * sum(mean.y) + sum(width**2 for width in mean.distinct))
    grams = n**2 * (sum(mean.distinct) + pairs)
    minibatches = n * case.batch * (sum(rows.distinct) / rates.single + pairs / rates.double)
    return max(min(moments, grams) / rates.double, reading), max(minibatches, reading)


# -- reference ---------------------------------------------------------------------------------------------------------
def _reference(
    a: Adapter, b: Adapter, layers: Sequence[str], inputs: Tensor, batch: int, pooling: Pooling | None
) -> Array:
    """Compute minibatch CKA in float64 (Nguyen et al. 2021, equation 3) from explicit Gram matrices.

    Rows come from a pooling, or are the flattened activations if ``pooling`` is ``None``.
    """
    sums: Any = 0
    for part in inputs.split(batch):
        grams: list[Tensor] = []
        for adapter in (a, b):
            grams_by_layer: dict[str, Tensor] = {}

            def keep(name: str, representation: Any, grams_by_layer: dict[str, Tensor] = grams_by_layer) -> None:
                taken = representation.rows(pooling) if pooling else representation.values.flatten(1)
                exact = taken.double() - taken.double().mean(0)
                grams_by_layer[name] = (exact @ exact.T).fill_diagonal_(0)

            adapter.run_with_callback(adapter.preprocess(list(part)), layers, keep)
            grams += [grams_by_layer[name] for name in layers]
        k, n = torch.stack(grams), len(part)
        ends = k.sum(2)
        totals = ends.sum(1)
        squares = k.flatten(1) @ k.flatten(1).T
        sums = sums + squares + torch.outer(totals, totals) / ((n - 1) * (n - 2)) - 2 / (n - 2) * ends @ ends.T
    norms = sums.diagonal().sqrt()
    similarities: Array = (sums / torch.outer(norms, norms))[: len(layers), len(layers) :].numpy()
    return similarities


def _errors(
    tools: Mapping[str, Tool], pooling: Pooling, a: Adapter, b: Adapter, layers: Sequence[str], data: Tensor, batch: int
) -> dict[str, float]:
    exact = {policy: _reference(a, b, layers, data, batch, policy) for policy in (pooling, None)}
    return {
        name: float(np.abs(tool(a, b, layers, data, batch) - exact[pooling if name == OURS else None]).max())
        for name, tool in tools.items()
    }


# -- tables ------------------------------------------------------------------------------------------------------------
@torch.no_grad()
def main() -> None:
    """Print the tables."""
    others = _others()
    console = Console(width=160)
    table = Table(title=f"seconds of compare over seconds of the forward passes ({machine()})")
    heads = [f"{name}{suffix}" for name in (OURS, *others) for suffix in ("", " error")]
    for column in ("networks", "layers", "n", "batch", "forward s", DEBIASED, "limit", *heads, "limit"):
        table.add_column(column)
    for title, case in CASES.items():
        a, b = (case.adapter(seed) for seed in (0, 1))
        inputs = case.inputs(case.n)
        layers = _modules(a, inputs[:2]) if case.every_module else list(a.layers)
        tools = {OURS: _ours(case.rows), **others}
        few = inputs[: 2 * case.batch]
        errors = _errors(tools, case.rows, a, b, layers, few, case.batch)  # also the warm-up
        quick = {name: tool for name, tool in tools.items() if not (case.every_module and name == "torch-cka")}
        ways = {"bare": _bare, DEBIASED: _ours("mean", debiased=True), **quick}
        seconds = _seconds(ways, a, b, layers, inputs, case.batch, REPEATS)
        ratios = {name: _ratio(seconds[name], seconds["bare"]) for name in (DEBIASED, *quick)}
        for name in tools.keys() - quick.keys():  # too slow for all samples: two batches show the ratio
            once = _seconds({"bare": _bare, name: tools[name]}, a, b, layers, few, case.batch, 1)
            ratios[name] = _ratio(once[name], once["bare"])
        bare, rates = statistics.median(seconds["bare"]), Rates.measured()
        least = [f"{1 + limit / bare:.3f}" for limit in _limits(case, a, b, layers, inputs, rates)]
        cells = [ratios[DEBIASED], least[0]]
        for name in tools:
            cells += [ratios[name], f"{errors[name]:.0e}"]
        cells.append(least[1])
        table.add_row(title, f"{len(layers)} × {len(layers)}", str(case.n), str(case.batch), f"{bare:.2f}", *cells)
        console.print(table)
        console.print(
            f"GFLOP/s: {rates.single / 1e9:.0f} (float32), {rates.double / 1e9:.0f}; {rates.memory / 1e9:.0f} GB/s"
        )
    tools = {OURS: _ours("flatten"), **others}
    moved = Table(*["mean / std", *tools], title="largest error by distance of the mean from 0, in standard deviations")
    for deviations in DEVIATIONS:
        inputs = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
        a, b = (hf_stitch.load(_far(seed, deviations), example_inputs=inputs[:2]) for seed in (0, 1))
        errors_by_tool = _errors(tools, "flatten", a, b, ["2", "5", "8"], inputs, 64)
        moved.add_row(str(deviations), *(f"{error:.0e}" for error in errors_by_tool.values()))
    console.print(moved)


def _seconds(
    ways: Mapping[str, Tool], a: Adapter, b: Adapter, layers: Sequence[str], inputs: Tensor, batch: int, repeats: int
) -> dict[str, list[float]]:
    runs = {name: partial(way, a, b, layers, inputs, batch) for name, way in ways.items()}
    return in_turn(runs, repeats, time.process_time)


def _ratio(seconds: Sequence[float], bare: Sequence[float]) -> str:
    """Format the median over rounds of the ratio of seconds."""
    return f"{statistics.median(measured / baseline for measured, baseline in zip(seconds, bare, strict=True)):.3f}"
