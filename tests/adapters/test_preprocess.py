"""Samples that no network can take: an error before the forward, which names the sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image

import hf_stitch
from hf_stitch import Samples
from hf_stitch.adapters.libraries.timm_images import TimmImageProcessor

from tiny_networks import SIZE, build, network  # isort: skip

PICTURE = Image.new("RGB", (SIZE, SIZE))
PIXELS = torch.zeros(3, SIZE, SIZE)


@pytest.fixture
def raw_images() -> Any:
    """A network of transformers with a processor."""
    import transformers

    size = {"height": SIZE, "width": SIZE}
    return hf_stitch.load(build("vit", 0), processor=transformers.ViTImageProcessor(size=size))


def poisoned(value: float) -> torch.Tensor:
    pixels = PIXELS.clone()
    pixels[1, 3, 3] = value
    return pixels


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("texts", [["w1 w2", "", "w3"], ["w1", "", ""], [("w1", "w2"), ("", "")]])
def test_a_text_without_tokens_is_named(family: str, texts: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"^text 1 has no tokens: leave it out, or pass a tokenizer"):
        network(family).preprocess(texts)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_texts_without_tokens_alone(family: str) -> None:
    with pytest.raises(ValueError, match=r"^text 0 has no tokens"):
        network(family).preprocess(["", ""])


@pytest.mark.parametrize("family", ["vit", "cnn", "bert"])
@pytest.mark.parametrize("sample", [None, ("w1", None)])
def test_a_missing_sample_is_named(family: str, sample: Any) -> None:
    first = "w1" if family == "bert" else PIXELS
    with pytest.raises(ValueError, match=r"^sample 1 is missing \(None\): leave it out"):
        network(family).preprocess([first, sample])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("family", ["vit", "cnn"])
def test_pixels_that_are_not_finite_are_named(family: str, value: float) -> None:
    with pytest.raises(ValueError, match=r"^image 2 has values that are NaN or infinite"):
        network(family).preprocess([PIXELS, PIXELS, poisoned(value)])


def test_a_processor_that_makes_nan_is_noticed() -> None:
    processor = TimmImageProcessor((3, SIZE, SIZE), crop_pct=1.0, mean=(float("nan"),) * 3)
    with pytest.raises(ValueError, match=r"image 0 has values that are NaN or infinite: .* check its processor"):
        hf_stitch.load(build("cnn", 0), processor=processor).preprocess([PICTURE])


def test_arrays_of_an_unknown_range_are_refused(raw_images: Any) -> None:
    ramp = np.arange(SIZE * SIZE * 3, dtype=np.uint16).reshape(SIZE, SIZE, 3)
    with pytest.raises(ValueError, match=r"image 1 has integers up to 3071, whose range is unknown: scale it to bytes"):
        raw_images.preprocess([np.asarray(PICTURE), ramp])
    small = (ramp % 256).astype(np.int64)
    assert torch.equal(*(raw_images.preprocess([x])["pixel_values"] for x in (small, small.astype(np.uint8))))


@pytest.mark.parametrize(
    ("family", "data", "message"),
    [
        ("vit", [PIXELS, poisoned(float("nan")), PIXELS, PIXELS], "image 'b' has values that are NaN"),
        ("gpt2", ["w1 w2", "", "w3", "w4"], "text 'b' has no tokens"),
        ("gpt2", Dataset.from_dict({"t": ["w1 w2", None, "w3", "w4"]}), "sample 'b' has no text; drop it with select"),
    ],
)
def test_samples_of_a_data_set_are_named_by_their_ids(family: str, data: Any, message: str) -> None:
    samples, adapter = Samples.of(data, id=list("abcd")), network(family)
    with pytest.raises(ValueError, match=message):
        hf_stitch.compare(adapter, network(family, 1), samples, rows="mean", progress=False)
    with pytest.raises(ValueError, match=message):
        [adapter.preprocess(batch.samples) for batch in samples.batches(2)]
    assert [adapter.preprocess(batch.samples) for batch in samples.select([0, 2, 3]).batches(2)]


EMPTY: list[tuple[str, Callable[[], Any]]] = [
    ("vit", lambda: torch.zeros(0, 3, SIZE, SIZE)),
    ("cnn", lambda: {"x": torch.zeros(0, 3, SIZE, SIZE)}),
    ("gpt2", lambda: torch.zeros(0, 4, dtype=torch.long)),
    ("bert", lambda: {"input_ids": torch.zeros(2, 0, dtype=torch.long)}),
]


@pytest.mark.parametrize(("family", "inputs"), EMPTY)
@pytest.mark.parametrize("run", ["forward", "encode"])
def test_empty_inputs_are_refused(family: str, inputs: Callable[[], Any], run: str) -> None:
    adapter = network(family)
    with pytest.raises(ValueError, match=r"must contain samples.*, got the shape \(.*0.*\): leave out empty"):
        adapter.forward(inputs()) if run == "forward" else adapter.encode(inputs(), adapter.candidates[0])


def test_no_samples() -> None:
    with pytest.raises(ValueError, match="there are no samples to preprocess"):
        network("vit").preprocess([])
