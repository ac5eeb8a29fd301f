"""Fixtures of the tests of stitched models: networks, samples and inputs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_stitch import Adapter

from tiny_networks import CLASSES, SIZE, WORDS, network  # isort: skip


@pytest.fixture(scope="session")
def net() -> Callable[..., Adapter]:
    """``net(family, seed, dtype)``: an adapter of a tiny network, the same one in every call."""
    return network


@pytest.fixture(scope="session")
def images() -> list[dict[str, Any]]:
    """Preprocessed images with labels."""
    pixels = torch.randn(80, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    return [{"image": image, "label": index % CLASSES} for index, image in enumerate(pixels)]


@pytest.fixture(scope="session")
def texts() -> list[dict[str, Any]]:
    """Texts of 2 to 9 words with labels."""
    draw = random.Random(0)
    return [
        {"text": " ".join(draw.choices(WORDS, k=draw.randint(2, 9))), "label": draw.randrange(3)} for _ in range(80)
    ]


@pytest.fixture
def inputs(images: Any, texts: Any) -> Callable[..., dict[str, torch.Tensor]]:
    """``inputs(adapter, padding)``: inputs of five samples, with texts of several lengths padded on one side."""

    def make(adapter: Adapter, padding: str = "right") -> dict[str, torch.Tensor]:
        if adapter.interface.modality != "text":
            return adapter.preprocess([sample["image"] for sample in images[:5]])
        side, adapter.processor.padding_side = adapter.processor.padding_side, padding
        try:
            return adapter.preprocess([sample["text"] for sample in texts[:5]])
        finally:
            adapter.processor.padding_side = side

    return make
