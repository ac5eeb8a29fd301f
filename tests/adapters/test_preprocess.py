"""Samples that no network can take: an error before the forward, which names the sample."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from families import images, make
from PIL import Image

import hf_stitch
from hf_stitch import Samples
from hf_stitch.adapters.libraries.timm_images import TimmImageProcessor

from tiny_networks import SIZE, build, network, plain_tokenizer  # isort: skip

PICTURE = Image.new("RGB", (SIZE, SIZE))
PIXELS = torch.zeros(3, SIZE, SIZE)


def poisoned(value: float) -> torch.Tensor:
    pixels = PIXELS.clone()
    pixels[1, 3, 3] = value
    return pixels


def with_own_code() -> hf_stitch.Adapter:
    return hf_stitch.load(make("user-code"), example_inputs=images(2))


def with_nan() -> hf_stitch.Adapter:
    processor = TimmImageProcessor((3, SIZE, SIZE), crop_pct=1.0, mean=(float("nan"),) * 3)
    return hf_stitch.load(build("cnn", 0), processor=processor)


def without_padding() -> hf_stitch.Adapter:
    tokenizer = plain_tokenizer()
    tokenizer.pad_token = None
    return hf_stitch.load(build("gpt2", 0), processor=tokenizer)


BERT, GPT2, VIT, CNN = (partial(network, family) for family in ("bert", "gpt2", "vit", "cnn"))
COMPLEX = torch.zeros(3, SIZE, SIZE, dtype=torch.complex64)
SAMPLES: dict[str, tuple[Callable[[], hf_stitch.Adapter], list[Any], str]] = {
    "a text": (BERT, ["w1 w2", "", "w3"], r"^text 1 must contain at least one token: remove it, or pass a tokenizer"),
    "two texts, padded left": (GPT2, ["", ""], r"^text 0 must contain at least one token"),
    "a pair of texts": (BERT, [("w1", "w2"), ("", "")], r"^text 1 must contain at least one token"),
    "a missing image": (VIT, [PIXELS, None], r"^sample 1 is missing \(None\): remove it"),
    "half a pair": (BERT, ["w1", ("w1", None)], r"^sample 1 is missing \(None\): remove it"),
    "nan": (VIT, [PIXELS, PIXELS, poisoned(float("nan"))], r"^image 2 contains NaN or infinite values"),
    "infinity": (CNN, [PIXELS, PIXELS, poisoned(float("inf"))], r"^image 2 contains NaN or infinite values"),
    "a processor": (with_nan, [PICTURE], r"image 0 contains NaN or infinite values: .* check its processor"),
    "complex numbers": (
        VIT, [PIXELS, COMPLEX], r"sample 1 must have the dtype float32, got torch.complex64",
    ),
    "no processor": (with_own_code, [PICTURE], "pass processor="),
    "two shapes": (with_own_code, [torch.zeros(3, 32, 32), torch.zeros(3, 16, 16)], "one shape"),
    "no padding token": (without_padding, ["w1", "w2 w3"], "require a tokenizer with a padding token"),
    "no samples": (VIT, [], "samples must contain at least one sample"),
}  # fmt: skip
"""What is wrong -> network, samples, and the message."""


@pytest.mark.parametrize("case", SAMPLES)
def test_samples_that_no_network_can_take_are_named(case: str) -> None:
    adapter, samples, message = SAMPLES[case]
    with pytest.raises(ValueError, match=message):
        adapter().preprocess(samples)


def test_arrays_of_an_unknown_range_are_refused() -> None:
    size = {"height": SIZE, "width": SIZE}
    raw_images = hf_stitch.load(build("vit", 0), processor=transformers.ViTImageProcessor(size=size))
    ramp = np.arange(SIZE * SIZE * 3, dtype=np.uint16).reshape(SIZE, SIZE, 3)
    with pytest.raises(ValueError, match=r"values of image 1 \(integers up to 3071\) is unknown: convert it to bytes"):
        raw_images.preprocess([np.asarray(PICTURE), ramp])
    small = (ramp % 256).astype(np.int64)
    assert torch.equal(*(raw_images.preprocess([x])["pixel_values"] for x in (small, small.astype(np.uint8))))


@pytest.mark.parametrize(
    ("family", "data", "message"),
    [
        ("vit", [PIXELS, poisoned(float("nan")), PIXELS, PIXELS], "image 'b' contains NaN"),
        ("gpt2", ["w1 w2", "", "w3", "w4"], "text 'b' must contain at least one token"),
        ("gpt2", Dataset.from_dict({"t": ["w1 w2", None, "w3", "w4"]}), "sample 'b' lacks text; drop it with select"),
    ],
)
def test_samples_of_a_data_set_are_named_by_their_ids(family: str, data: Any, message: str) -> None:
    samples, adapter = Samples.of(data, id=list("abcd")), network(family)
    with pytest.raises(ValueError, match=message):
        hf_stitch.compare(adapter, network(family, 1), samples, rows="mean", progress=False)
    with pytest.raises(ValueError, match=message):
        [adapter.preprocess(batch.samples) for batch in samples.batches(2)]
    assert [adapter.preprocess(batch.samples) for batch in samples.select([0, 2, 3]).batches(2)]


EMPTY: dict[str, tuple[Callable[[], Any], Any]] = {
    "images": (VIT, torch.zeros(0, 3, SIZE, SIZE)),
    "a mapping": (CNN, {"x": torch.zeros(0, 3, SIZE, SIZE)}),
    "texts": (GPT2, torch.zeros(0, 4, dtype=torch.long)),
    "tokens": (BERT, {"input_ids": torch.zeros(2, 0, dtype=torch.long)}),
}


@pytest.mark.parametrize("what", EMPTY)
def test_empty_inputs_are_refused(what: str) -> None:
    make, inputs = EMPTY[what]
    adapter = make()
    runs: tuple[Callable[[Any], Any], ...] = adapter.forward, lambda x: adapter.encode(x, adapter.candidates[0])
    for run in runs:
        with pytest.raises(ValueError, match=r"must contain samples.*, got the shape \(.*0.*\): remove empty"):
            run(inputs)
