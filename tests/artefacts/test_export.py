"""Export and compilation of stitched models."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tiny_networks import LAYERS, LANGUAGE, stitched  # isort: skip

PAIRS = [("vit", "cnn"), ("gpt2", "llama"), ("swin", "deit"), ("t5", "bert")]


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def model_and_batch(request: Any, net: Any, inputs: Any, images: Any, texts: Any) -> tuple[Any, Any]:
    """A stitched model, which no test changes, and a batch for it."""
    source, target = request.param
    a, b, data = net(source), net(target, 1), texts if source in LANGUAGE else images
    model = stitched(a, b, data, (LAYERS[source], LAYERS[target]))
    batch = inputs(a)
    return model, batch if source in LANGUAGE else {"pixel_values": batch[a.interface.content[0]]}


def logits(model: Any, batch: Any) -> torch.Tensor:
    # A traced network gives attention a mask of ones. Its layout excludes the fast kernel of torch 2.7.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH) if torch.__version__ < "2.8" else nullcontext():
        return model(**batch).logits


@pytest.mark.parametrize("strict", [False, True])
def test_it_exports(strict: bool, model_and_batch: Any) -> None:
    model, batch = model_and_batch
    program = torch.export.export(model, (), batch, strict=strict)
    assert torch.equal(logits(program.module(), batch), logits(model, batch))


def test_it_exports_for_any_number_of_samples(of_images: Any, images: Any) -> None:
    model = of_images
    pixels = torch.stack([sample["image"] for sample in images[:7]])
    shapes = {"pixel_values": {0: torch.export.Dim("batch", min=2, max=64)}}
    program = torch.export.export(model, (), {"pixel_values": pixels[:3]}, dynamic_shapes=shapes, strict=False)
    torch.testing.assert_close(logits(program.module(), {"pixel_values": pixels}), model(pixel_values=pixels).logits)


def test_it_compiles_in_one_graph(model_and_batch: Any) -> None:
    model, batch = model_and_batch
    assert torch.equal(logits(torch.compile(model, backend="eager", fullgraph=True), batch), logits(model, batch))


def test_a_failed_forward_keeps_no_activations(model_and_batch: Any) -> None:
    model, batch = model_and_batch
    expected = logits(model, batch)
    with pytest.raises((RuntimeError, IndexError, ValueError, AssertionError)):
        model(**{name: value[..., :1, :1, :1] if value.dim() == 4 else value + 10_000 for name, value in batch.items()})
    assert model.source._slot.values is None
    assert torch.equal(logits(model, batch), expected)
