"""Time of a grid of stitches over its floor: each network once per sample, and the back half of the target per stitch.

Direct matching with its fit, accuracies and structural errors, against the forwards alone, and against
:func:`hf_stitch.stitch` for each pair of layers (timed on the diagonal and extrapolated). Random weights, real sizes,
float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import timm
import torch
from torch import nn

import hf_stitch
from benchmarks.timing import in_turn, show
from hf_stitch import Adapter, Samples

WIDTHS, STRIDED = (3, 16, 16, 32, 32, 32, 64, 64, 64), (2, 5)
REPEATS = 2


def tiny10() -> nn.Module:
    """Eight convolutions with BatchNorm and ReLU, as in Csiszárik et al. 2021."""
    blocks = [
        nn.Sequential(nn.Conv2d(a, b, 1 if i == 7 else 3, 2 if i in STRIDED else 1), nn.BatchNorm2d(b), nn.ReLU())
        for i, (a, b) in enumerate(pairwise(WIDTHS))
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def resnet18() -> nn.Module:
    """ResNet-18 with the stem for CIFAR: 3 × 3, no max pooling."""
    network = timm.create_model("resnet18", num_classes=10)
    network.conv1, network.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return network


# network, images fitted to, images scored, batch
CASES: dict[str, tuple[Callable[[], nn.Module], int, int, int]] = {
    "Tiny-10, 8 × 8": (tiny10, 600, 2000, 100),
    "ResNet-18, 8 × 8": (resnet18, 48, 96, 48),
    "ViT-Ti/4, 12 × 12": (
        lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=10), 200, 96, 48,
    ),
}  # fmt: skip


def _adapter(create: Callable[[], nn.Module], seed: int) -> Adapter:
    torch.manual_seed(seed)
    return hf_stitch.load(create().eval(), example_inputs=torch.randn(2, 3, 32, 32))


@torch.no_grad()
def _floor(a: Adapter, b: Adapter, train: torch.Tensor, test: torch.Tensor, batch: int) -> Callable[[], None]:
    """Return a function that runs both networks once per image, and the back half of the target for each pair."""
    halves = {layer: b.back(layer) for layer in b.layers}

    def run() -> None:
        with torch.no_grad():
            for images in train.split(batch):
                a.model(images)
                b.model(images)
            for images in test.split(batch):
                a.model(images)
                activations = b.encode(images, b.layers)
                for layer, half in halves.items():
                    for _ in a.layers:
                        half(activations[layer])

    return run


def _row(name: str, create: Callable[[], nn.Module], count: int, scored: int, batch: int) -> list[str]:
    a, b = _adapter(create, 0), _adapter(create, 1)
    train, test = torch.randn(count, 3, 32, 32), torch.randn(scored, 3, 32, 32)
    data, held = (Samples.of(images, label=[i % 10 for i in range(len(images))]) for images in (train, test))
    options: dict[str, Any] = {
        "test_data": held, "task": "image-classification", "batch_size": batch, "progress": False,
    }  # fmt: skip
    ways = {
        "floor": _floor(a, b, train, test, batch), "grid": lambda: hf_stitch.stitch_grid(a, b, data, **options),
    }  # fmt: skip
    in_turn(ways, 1)
    seconds = {way: min(taken) for way, taken in in_turn(ways, REPEATS).items()}
    start = time.perf_counter()
    for layer, second in zip(a.layers, b.layers, strict=True):
        hf_stitch.stitch(a, b, data, source_layer=layer, target_layer=second, **options)
    one_by_one = (time.perf_counter() - start) * len(b.layers)
    return [
        name, f"{count} + {scored}", f"{seconds['floor']:.2f}", f"{seconds['grid']:.2f}",
        f"{seconds['grid'] / seconds['floor']:.3f}", f"{one_by_one:.1f}", f"{one_by_one / seconds['grid']:.1f}",
    ]  # fmt: skip


def main() -> None:
    """Run the benchmark and print its table."""
    columns = "networks", "images", "floor s", "grid s", "over floor", "stitch() s", "stitch() over grid"
    show("grids of stitches", columns, (_row(name, *case) for name, case in CASES.items()))
