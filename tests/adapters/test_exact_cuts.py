"""Identity stitching is exact at every cut of every supported architecture (invariant 1)."""

from __future__ import annotations

import pytest
import torch
from families import IMAGE, LAYERS, TEXT, images, make, texts
from hf_stitch_testing import check_adapter

import hf_stitch
from hf_stitch.adapters.discovery.verify import same


@pytest.mark.parametrize("name", TEXT)
def test_cuts_are_exact_for_texts_of_any_length_padded_on_either_side(name: str) -> None:
    adapter = hf_stitch.load(make(name))
    check_adapter(adapter, texts(1, 4), texts(4, 9), texts(4, 9, "right"), texts(5, 11, "left", seed=1))
    assert adapter.layers == LAYERS.get(name, adapter.layers)
    assert len(adapter.layers) == 3


@pytest.mark.parametrize("name", IMAGE)
def test_cuts_are_exact_for_images(name: str) -> None:
    adapter = hf_stitch.load(make(name), example_inputs=images(2))
    content = adapter.interface.content[0]
    check_adapter(adapter, {content: images(1)}, {content: images(5, seed=1)})
    assert adapter.layers == LAYERS.get(name, adapter.layers)
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["bert", "llama", "t5-encoder", "hf-vit", "timm-swin", "timm-resnet"])
def test_cuts_are_exact_in_half_precision(name: str, dtype: torch.dtype) -> None:
    model = make(name).to(dtype)
    inputs = texts(3, 7, "left") if name in TEXT else images(3).to(dtype)
    adapter = hf_stitch.load(model, example_inputs=None if name in TEXT else images(2).to(dtype))
    middle = adapter.layers[len(adapter.layers) // 2]
    with torch.no_grad():
        representation = adapter.encode(inputs, middle)[middle]
        assert representation.values.dtype == dtype
        assert same(adapter.decode(representation, middle), adapter.forward(inputs))


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("bert", "bnd 32"),
        ("hf-vit", "bnd 32 4x4 +1"),
        ("timm-deit-distilled", "bnd 48 4x4 +2"),
        ("timm-swin", "bhwc 24 8x8"),
        ("timm-convnext", "bchw 8 8x8"),
        ("hf-resnet", "bchw 8 8x8"),
        ("user-code", "bchw 8 30x30"),
    ],
)
def test_specs(name: str, spec: str) -> None:
    adapter = hf_stitch.load(make(name), example_inputs=None if name in TEXT else images(2))
    assert str(adapter.spec(adapter.layers[0])) == spec


def test_the_layout_of_square_grids_with_as_many_channels_follows_from_the_layers() -> None:
    first = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.Flatten()
    )
    assert hf_stitch.load(first, example_inputs=images(2, size=8)).spec("0").layout == "bchw"


@pytest.mark.parametrize("name", ["bert", "timm-vit", "timm-resnet"])
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
