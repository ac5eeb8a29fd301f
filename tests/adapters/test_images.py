"""Images of every mode: what a network gets of them."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import timm
import timm.data
import torch
import transformers
from PIL import Image

import hf_stitch
from hf_stitch.adapters import preprocess
from hf_stitch.adapters.libraries.timm_images import TimmImageProcessor
from hf_stitch.adapters.preprocess import converted

from tiny_networks import SIZE, build  # isort: skip

RAMP = np.linspace(0, 65535, SIZE * SIZE).astype(np.uint16).reshape(SIZE, SIZE)
COLOURS = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)


def processors() -> list[Any]:
    size = {"height": SIZE, "width": SIZE}
    return [TimmImageProcessor((3, SIZE, SIZE), crop_pct=1.0), transformers.ViTImageProcessor(size=size)]


def pixels(processor: Any, image: Image.Image) -> torch.Tensor:
    """What the adapter passes to its network, for the processors of both libraries."""
    return hf_stitch.load(build("vit", 0), processor=processor).preprocess([image])["pixel_values"]


def transparent(mode: str) -> Image.Image:
    """A grey square whose left half is transparent, over a hidden black."""
    image = Image.new("LA", (SIZE, SIZE), (0, 0))
    image.paste((100, 255), (SIZE // 2, 0, SIZE, SIZE))
    if mode in ("P", "PA"):  # Pillow 11 drops the transparency when it converts to PA
        flat = Image.new("P", image.size, 0)
        flat.putpalette([0, 0, 0, 100, 100, 100])
        flat.paste(1, (SIZE // 2, 0, SIZE, SIZE))
        if mode == "PA":
            flat = flat.convert("PA")
            flat.putalpha(image.getchannel("A"))
        else:
            flat.info["transparency"] = 0
        return flat
    if mode in ("La", "LA"):
        return image.convert(mode)
    return image.convert("RGBA").convert(mode)


@pytest.fixture(autouse=True)
def not_warned() -> None:
    preprocess._warn_of_transparency.cache_clear()


@pytest.mark.parametrize("mode", ["I;16", "I;16B"])
@pytest.mark.parametrize("channels", [1, 3])
def test_16_bit_values_are_scaled_by_their_range(mode: str, channels: int) -> None:
    image = Image.fromarray(RAMP)
    if mode == "I;16B":
        image = Image.frombytes(mode, image.size, RAMP.astype(">u2").tobytes())
    [found] = converted([image], channels)
    values = np.asarray(found, dtype=float).reshape(SIZE, SIZE, -1)
    assert found.mode == ("L" if channels == 1 else "RGB")
    assert np.abs(values - (RAMP / 257)[..., None]).max() <= 0.5
    assert (values.min(), values.max()) == (0, 255)


@pytest.mark.parametrize("processor", processors(), ids=["timm", "transformers"])
def test_networks_get_16_bit_images_unsaturated(processor: Any) -> None:
    found = pixels(processor, Image.fromarray(RAMP))
    assert torch.equal(found, pixels(processor, Image.fromarray(np.rint(RAMP / 257).astype(np.uint8))))
    assert len(found[0, 0].unique()) == 256


INTEGERS, NUMBERS = (Image.fromarray(RAMP.astype(kind)) for kind in (np.int32, np.float32))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (np.zeros((2, 2, 3), np.complex64), r"image 1 must have real numbers"),
        (np.zeros((2, 2, 3), object), r"image 1 must have real numbers"),
        (np.zeros((2, 2, 3), "U1"), r"image 1 must have real numbers"),
        (INTEGERS, r"range of values of image 1 \(mode 'I'\) is unknown: convert it to bytes"),
        (NUMBERS, r"range of values of image 1 \(mode 'F'\) is unknown: convert it to bytes"),
    ],
    ids=["complex", "objects", "texts", "integers", "numbers"],
)
def test_values_of_an_unknown_range_are_refused(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        converted([np.zeros((2, 2, 3), np.uint8), wrong], 3)


@pytest.mark.parametrize("processor", processors(), ids=["timm", "transformers"])
def test_processors_of_both_libraries_refuse_them(processor: Any) -> None:
    with pytest.raises(ValueError, match=r"range of values of image 0 \(mode 'I'\)"):
        pixels(processor, INTEGERS)


@pytest.mark.parametrize(("architecture", "mode"), [("resnet10t", "L"), ("test_vit", "RGB"), ("test_vit", "RGBA")])
def test_a_timm_network_of_one_channel_gets_grey_images(architecture: str, mode: str) -> None:
    """Its mean and deviation are those over the channels of the pretrained weights."""
    model = timm.create_model(architecture, in_chans=1, num_classes=3).eval()
    adapter, image = hf_stitch.load(model), Image.fromarray(COLOURS).convert(mode)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    mean, std = (np.mean(model.pretrained_cfg[key]) for key in ("mean", "std"))
    transform.transforms[-1] = lambda grey: (grey - mean) / std
    [found] = adapter.preprocess([image])["x"]
    assert torch.allclose(found, transform(image.convert("L")), atol=1e-6)
    assert len(adapter.layers) > 1


def test_a_timm_network_of_transformers_gets_images_of_its_size_and_channels() -> None:
    config = transformers.TimmWrapperConfig(architecture="test_vit", model_args={"in_chans": 1, "img_size": 64})
    of_three = transformers.TimmWrapperImageProcessor({"input_size": (3, 160, 160), "mean": (0.4, 0.5, 0.6)})
    adapter = hf_stitch.load(transformers.TimmWrapperModel(config).eval(), processor=of_three)
    inputs = adapter.preprocess([Image.fromarray(COLOURS)])
    assert inputs["pixel_values"].shape == (1, 1, 64, 64) and len(adapter.layers) > 1


def test_images_do_not_fill_four_channels() -> None:
    adapter = hf_stitch.load(timm.create_model("resnet10t", in_chans=4).eval())
    assert adapter.example["x"].shape[1] == 4 and len(adapter.layers) == 4
    with pytest.raises(ValueError, match=r"requires 4 channels, but images have 1 .* pass processor="):
        adapter.preprocess([Image.fromarray(COLOURS)])


@pytest.mark.parametrize("wraps", [False, True], ids=["network", "features"])
def test_the_size_of_a_timm_network_is_that_of_its_construction(wraps: bool) -> None:
    """ResMLP keeps no size in its patch embedding."""
    adapter = hf_stitch.load(timm.create_model("resmlp_12_224", img_size=32, in_chans=1, features_only=wraps).eval())
    assert adapter.example["x"].shape == (2, 1, 32, 32)
    adapter.forward(adapter.preprocess([Image.fromarray(COLOURS)]))


@pytest.mark.parametrize("mode", ["1", "L", "P", "PA", "LA", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV"])
def test_other_modes_are_converted_as_pillow_does(mode: str) -> None:
    """Opaque images: transparency changes nothing, and nothing is reported."""
    image = Image.fromarray(COLOURS).convert("L" if mode == "LA" else "RGBA" if mode == "RGBa" else "RGB").convert(mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        [found] = converted([image], 3)
    assert found.mode == "RGB"
    assert np.array_equal(found, image.convert("RGB"))


@pytest.mark.parametrize("mode", ["LA", "La", "RGBA", "RGBa", "PA", "P"])
def test_transparent_images_are_put_on_white_with_one_warning(mode: str) -> None:
    image = transparent(mode)
    with pytest.warns(UserWarning, match="transparent images are put on white") as caught:
        found = [converted([image, image], 3), converted([image], 3)]
    assert len(caught) == 1
    values = np.asarray(found[0][1])
    assert (values[:, : SIZE // 2] == 255).all()
    assert (values[:, SIZE // 2 :] == 100).all()
