"""Identity stitching is exact at every cut of every supported architecture (invariant 1)."""

from __future__ import annotations

import pytest
import torch
from families import IMAGE, LAYERS, SPECS, TEXT, images, make, texts
from hf_stitch_testing import check_adapter

import hf_stitch
from hf_stitch.adapters.discovery.verify import same


@pytest.mark.parametrize("name", TEXT)
def test_cuts_are_exact_for_texts_of_any_length_padded_on_either_side(name: str) -> None:
    adapter = hf_stitch.load(make(name))
    check_adapter(adapter, texts(1, 4), texts(4, 9), texts(4, 9, "right"), texts(5, 11, "left", seed=1))
    assert adapter.layers == LAYERS.get(name, adapter.layers)
    assert str(adapter.spec(adapter.layers[0])) == SPECS.get(name, str(adapter.spec(adapter.layers[0])))
    assert len(adapter.layers) == 3


@pytest.mark.parametrize("name", IMAGE)
def test_cuts_are_exact_for_images(name: str) -> None:
    adapter = hf_stitch.load(make(name), example_inputs=images(2))
    content = adapter.interface.content[0]
    check_adapter(adapter, {content: images(1)}, {content: images(5, seed=1)})
    assert adapter.layers == LAYERS.get(name, adapter.layers)
    assert str(adapter.spec(adapter.layers[0])) == SPECS.get(name, str(adapter.spec(adapter.layers[0])))
    assert len(adapter.layers) >= 3


@pytest.mark.parametrize("name", ["hf-resnet", "timm-convnext", "timm-rexnet"])
def test_cuts_are_exact_for_images_of_another_size(name: str) -> None:
    adapter = hf_stitch.load(make(name), example_inputs=images(2))
    x = images(3, size=64)
    for layer in adapter.layers[::3]:
        with torch.no_grad():
            representation = adapter.encode(x, layer)[layer]
            assert representation.grid == tuple(2 * side for side in adapter.spec(layer).grid)
            assert same(adapter.decode(representation, layer), adapter.forward(x))


@pytest.mark.parametrize("name", ["timm-swin", "timm-resnet"])
def test_cuts_are_exact_in_half_precision(name: str) -> None:
    adapter = hf_stitch.load(make(name).half(), example_inputs=images(2).half())
    middle, inputs = adapter.layers[len(adapter.layers) // 2], images(3).half()
    with torch.no_grad():
        representation = adapter.encode(inputs, middle)[middle]
        assert representation.values.dtype == torch.float16
        assert same(adapter.decode(representation, middle), adapter.forward(inputs))


@pytest.mark.parametrize("name", ["bert", "timm-resnet"])
def test_gradients_flow_to_the_representation_and_not_before(name: str) -> None:
    adapter = hf_stitch.load(make(name), example_inputs=None if name in TEXT else images(2))
    inputs = texts(2, 5) if name in TEXT else images(2)
    layer = adapter.layers[1]
    with torch.no_grad():
        representation = adapter.encode(inputs, layer)[layer]
    values = representation.values.requires_grad_()
    output = adapter.decode(representation.replace(values=values), layer)
    (output if isinstance(output, torch.Tensor) else output.logits).sum().backward()
    assert values.grad.abs().sum() > 0
    before = adapter.model.get_submodule(adapter.layers[0])
    assert all(p.grad is None for p in before.parameters())
