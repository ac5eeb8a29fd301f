"""Two small classifiers of the same task, stitched at the same cut, for the tests of stitching layers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

import hf_stitch
from hf_stitch import Adapter, Samples, StitchedModel

CLASSES, SIZE, WIDTH = 4, 8, 8


@dataclass(frozen=True)
class Place:
    """Two networks, the model that stitches them at layer ``"0"``, and samples."""

    source: Adapter
    target: Adapter
    stitched: StitchedModel
    train: Samples
    test: Samples


def network(seed: int, images: torch.Tensor, labels: torch.Tensor) -> Adapter:
    """A convolution and a head, trained for 150 steps."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * WIDTH, CLASSES),
        )
        optimiser = torch.optim.Adam(net.parameters(), 1e-2)
        for _ in range(150):
            optimiser.zero_grad()
            functional.cross_entropy(net(images), labels).backward()
            optimiser.step()
    return hf_stitch.load(net.eval(), example_inputs=images[:2])


@pytest.fixture(scope="session")
def place() -> Place:
    """Networks stitched by least squares; the class of an image is a pattern added to noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(CLASSES, 3, SIZE, SIZE, generator=generator)
    labels = torch.arange(1200) % CLASSES
    images = 0.35 * patterns[labels] + torch.randn(1200, 3, SIZE, SIZE, generator=generator)
    samples = Samples.of(images, label=labels.tolist())
    train, test = samples.take(800), samples.select(range(800, 1200))
    a, b = (network(seed, images[:800], labels[:800]) for seed in (0, 1))
    stitched = hf_stitch.stitch(a, b, train, source_layer="0", target_layer="0", test_data=test, progress=False)
    return Place(a, b, stitched, train, test)
