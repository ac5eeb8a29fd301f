"""Time of a step of task-loss matching compared with the minimal step, a naive implementation and separate training.

The minimal step is a forward and backward pass through the stitching layer and the back half of the target on cached
activations, with gradients for the stitching layer only, and Adam. The naive implementation runs both whole networks
with hooks in every step, and the target a second time for its soft labels. Separate training fits several stitching
layers one by one instead of all at once. Random weights, real sizes, float32, medians of steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import timm
import torch
from torch import nn
from torch.nn import functional

import hf_stitch
from benchmarks.timing import in_turn, show
from hf_stitch import Adapter, Samples, StitchedModel
from hf_stitch.tasks.base import logits_of
from hf_stitch.training import TaskLoss

STEPS, SKIPPED = 16, 4
# network, image size, batch
CASES: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "ResNet-18, 32 px": (lambda: timm.create_model("resnet18", num_classes=10), 32, 128),
    "ViT-Ti/4, 32 px": (
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=10), 32, 32,
    ),
}  # fmt: skip
GRID = 8


def _adapter(create: Callable[[], nn.Module], size: int, seed: int) -> Adapter:
    torch.manual_seed(seed)
    return hf_stitch.load(create().eval(), example_inputs=torch.randn(2, 3, size, size))


def _stitched(a: Adapter, source_layer: str, b: Adapter, target_layer: str, data: Samples) -> StitchedModel:
    options: dict[str, Any] = {"task": "image-classification", "progress": False, "test_size": 8}
    return hf_stitch.stitch(
        a, b, data, source_layer=source_layer, target_layer=target_layer, matcher="random", **options
    )


def _ours(models: list[StitchedModel], data: Samples, batch: int) -> float:
    """Return the median seconds of a step of :class:`TaskLoss`."""
    times: list[float] = []
    TaskLoss(max_steps=STEPS, batch_size=batch).fit(
        models, data, progress=False, callback=lambda step, layers: times.append(time.perf_counter())
    )
    return statistics.median(b - a for a, b in zip(times[SKIPPED:], times[SKIPPED + 1 :], strict=False))


def _median(step: Callable[[], object]) -> float:
    return statistics.median(in_turn({"": step}, STEPS)[""][SKIPPED:])


def _bare(model: StitchedModel, images: torch.Tensor) -> float:
    with torch.no_grad():
        activations = model.source(**model.source_inputs({"pixel_values": images}))
    labels = torch.randn(len(images), 10).softmax(-1)
    model.freeze_networks()
    optimizer = torch.optim.Adam(model.stitch.parameters())

    def step() -> None:
        functional.cross_entropy(logits_of(model.target(model.stitch(activations))), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return _median(step)


def _naive(a: Adapter, b: Adapter, model: StitchedModel, layers: tuple[str, str], images: torch.Tensor) -> float:
    """Return the median seconds of a step that runs both networks, with hooks that read and replace activations."""
    source, target = (net.model.eval().requires_grad_(False) for net in (a, b))
    stitch = model.stitch.requires_grad_(True)
    optimizer = torch.optim.Adam(stitch.parameters())
    cut, hidden = a.cut(layers[0])[0], {}
    take = source.get_submodule(layers[0])
    put = target.get_submodule(layers[1])

    def step() -> None:
        handle = take.register_forward_hook(lambda m, args, output: hidden.__setitem__("x", output))
        with torch.no_grad():
            source(images)
            soft = target(images).softmax(-1)
        handle.remove()
        stitched = stitch(cut.represent(hidden["x"], {a.interface.content[0]: images}, a.interface)).values
        handle = put.register_forward_hook(lambda m, args, output: stitched)
        functional.cross_entropy(target(images), soft).backward()
        handle.remove()
        optimizer.step()
        optimizer.zero_grad()

    return _median(step)


def rows() -> Iterator[tuple[str, ...]]:
    """Yield a row for each case."""
    for name, (create, size, batch) in CASES.items():
        a, b = (_adapter(create, size, seed) for seed in (0, 1))
        layer = a.layers[len(a.layers) // 2]
        data = Samples.of(torch.randn(4 * batch, 3, size, size))
        images = torch.randn(batch, 3, size, size)
        model = _stitched(a, layer, b, layer, data)
        figures = []
        for _ in range(3):
            ours = _ours([model], data, batch)
            figures.append((ours, ours / _bare(model, images), _naive(a, b, model, (layer, layer), images) / ours))
        step, bare, naive = (statistics.median(column) for column in zip(*figures, strict=True))
        sources = [a.layers[i % len(a.layers)] for i in range(GRID)]
        models = [_stitched(a, source, b, layer, data) for source in sources]
        small = batch // GRID
        together = statistics.median(_ours(models, data, small) for _ in range(3))
        alone = sum(_ours([one], data, small) for one in models)
        yield name, layer, str(batch), f"{step:.4f}", f"{bare:.3f}", f"{naive:.2f}", f"{alone / together:.2f} ({small})"


def main() -> None:
    """Run the benchmark and print its table."""
    columns = "networks", "cut", "batch", "step s", "over minimal", "naive over ours"
    show("task-loss matching", (*columns, f"{GRID} one by one over all at once (batch)"), rows())
