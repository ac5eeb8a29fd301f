"""Fixtures of the tests of stitched models: networks, samples and inputs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # the process that only hands tests to others reads this file too, and needs no torch
    from torch import Tensor

    from hf_stitch import Adapter


@pytest.fixture(scope="session")
def net() -> Callable[..., Adapter]:
    """``net(family, seed, dtype)``: an adapter of a tiny network, the same one in every call."""
    from tiny_networks import network

    return network


@pytest.fixture(scope="session")
def images() -> list[dict[str, Any]]:
    """Preprocessed images with labels."""
    import torch
    from tiny_networks import CLASSES, SIZE

    pixels = torch.randn(80, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    return [{"image": image, "label": index % CLASSES} for index, image in enumerate(pixels)]


@pytest.fixture(scope="session")
def texts() -> list[dict[str, Any]]:
    from tiny_networks import WORDS

    g = random.Random(0)
    return [{"text": " ".join(g.choices(WORDS, k=g.randint(2, 9))), "label": g.randrange(3)} for _ in range(80)]


@pytest.fixture(scope="session")
def inputs(images: Any, texts: Any) -> Callable[..., dict[str, Tensor]]:
    """``inputs(adapter, padding)``: inputs of five samples, with texts of several lengths padded on one side."""

    def make(adapter: Adapter, padding: str = "right") -> dict[str, Tensor]:
        if adapter.interface.modality != "text":
            return adapter.preprocess([sample["image"] for sample in images[:5]])
        side, adapter.processor.padding_side = adapter.processor.padding_side, padding
        try:
            return adapter.preprocess([sample["text"] for sample in texts[:5]])
        finally:
            adapter.processor.padding_side = side

    return make
