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
