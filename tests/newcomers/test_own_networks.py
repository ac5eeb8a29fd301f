"""Networks of user code whose samples are texts: encoders that count words, and tokenizers of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import Tensor, nn
from torchvision.transforms import Compose, Resize, ToTensor

import hf_stitch
from hf_stitch import Samples
from hf_stitch.adapters import ExampleError
from hf_stitch.adapters.examples import SAMPLES
from hf_stitch.registry import UnknownNameError

WORDS = [f"{quality} {thing}" for quality in ("good", "bad", "fine", "poor") for thing in ("film", "book", "play")]
TEXTS = [f"{words} of day {i}" for i, words in enumerate(WORDS * 10)]
LABELS = [int(text.startswith(("good", "fine"))) for text in TEXTS]
LENGTH = 6


@cache
def vectorizer() -> TfidfVectorizer:
    return TfidfVectorizer().fit(TEXTS)


def weighted(text: str) -> Tensor:
    return torch.from_numpy(vectorizer().transform([text]).toarray()[0]).float()


def ids(text: str) -> Tensor:
    """Numbers of the first words, filled up with 0."""
    known = vectorizer().vocabulary_
    numbers = [1 + known.get(word, len(known)) for word in text.split()][:LENGTH]
    return torch.tensor(numbers + [0] * (LENGTH - len(numbers)))


def masked(text: str) -> dict[str, Tensor]:
    return {"input_ids": ids(text), "attention_mask": (ids(text) > 0).long()}


def classifier(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    width = len(vectorizer().vocabulary_)
    return nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)).eval()


class Words(nn.Module):
    """A classifier of token ids, with the mean of its words that are not padding if it is told of them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(len(vectorizer().vocabulary_) + 2, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.head = nn.Linear(8, 2)
        self.eval()

    def mean(self, values: Tensor, mask: Tensor | None) -> Tensor:
        weights = torch.ones_like(values[..., :1]) if mask is None else mask[..., None].to(values)
        return self.head((values * weights).sum(1) / weights.sum(1))


class Bag(Words):
    def forward(self, ids: Tensor) -> Tensor:
        return self.mean(self.body(self.words(ids)), None)


class Masked(Words):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.mean(self.body(self.words(input_ids)), attention_mask)


NETWORKS: dict[str, tuple[Callable[[int], nn.Module], Callable[[str], Any], str]] = {
    "tfidf": (classifier, weighted, "0"),
    "ids": (Bag, ids, "body.0"),
    "mask": (Masked, masked, "body.0"),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_network_of_texts_is_loaded_with_its_processor_alone(kind: str, tmp_path: Path) -> None:
    build, processor, layer = NETWORKS[kind]
    nets = [build(seed) for seed in (0, 1)]
    a, b = (hf_stitch.load(net, processor=processor) for net in nets)
    assert a.task == b.task == "text-classification" and layer in a.layers
    inputs = [made.values() if isinstance(made := processor(text), dict) else [made] for text in TEXTS[:5]]
    assert torch.equal(a.forward(a.preprocess(TEXTS[:5])), nets[0](*map(torch.stack, zip(*inputs, strict=True))))

    data, options = Samples.of(TEXTS, label=LABELS), {"layers_a": [layer], "layers_b": [layer], "progress": False}
    activations = hf_stitch.analysis.extract_activations(a, data, layers=[layer], progress=False)
    again = hf_stitch.compare(a, activations, data, **options)
    assert again.values["linear_cka"][0, 0] == pytest.approx(1) and again.n == len(TEXTS)
    assert hf_stitch.stitch_grid(a, b, data, resamples=5, **options).task == "text-classification"

    train, test = data.split(0.4, seed=0)
    made = hf_stitch.stitch(a, b, train, source_layer=layer, target_layer=layer, test_data=test, progress=False)
    assert {"accuracy", "cross_entropy"} <= made.evaluation.scores["target"].keys()
    assert hf_stitch.evaluate(made, test, progress=False).n == len(test)
    made.stitcher.save_pretrained(tmp_path)
    attached = hf_stitch.Stitcher.from_pretrained(tmp_path).attach(
        *(hf_stitch.load(net, processor=processor) for net in nets)
    )
    batch = made.preprocess(TEXTS[:5])
    assert torch.equal(attached(**batch).logits, made(**batch).logits)


@pytest.mark.parametrize(
    ("processor", "task"),
    [
        (weighted, "text-classification"),
        (
            lambda image: torch.from_numpy(np.asarray(image.convert("L").resize((4, 4)))).flatten() / 255,
            "image-classification",
        ),
        (lambda sample: torch.zeros(16), None),
        (None, None),
    ],
)
def test_the_kind_of_samples_comes_from_the_processor(processor: Any, task: str | None) -> None:
    width = len(vectorizer().vocabulary_) if processor is weighted else 16
    net = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 3))
    assert hf_stitch.load(net, example_inputs=torch.randn(2, width), processor=processor).task == task
    named = hf_stitch.load(net, "text-classification", example_inputs=torch.randn(2, width), processor=processor)
    assert named.task == "text-classification"


def test_an_image_network_is_loaded_with_a_transform_that_fixes_the_size() -> None:
    for channels, mode in ((1, "L"), (3, "RGB")):  # as many channels as the image has
        net = nn.Sequential(nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
        a = hf_stitch.load(net, processor=Compose([Resize((8, 8)), ToTensor()]))
        assert a.task == "image-classification" and a.interface.shapes == {"input": (channels, 8, 8)}
        assert a.preprocess([Image.new(mode, (20, 30))])["input"].shape == (1, channels, 8, 8)
        assert net.training and not net[1].num_batches_tracked

    def smaller(image: Image.Image) -> Tensor:
        image.thumbnail((8, 8))
        return torch.full((3, 8, 8), float(max(image.size)))

    for _ in range(2):
        a = hf_stitch.load(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2)), processor=smaller)
        assert a.interface.shapes == {"input": (3, 8, 8)}
    assert [image.size for image in SAMPLES["RGB image"]] == [(48, 40), (64, 96)]


def linear(processor: Any = None, task: str | None = None, **options: Any) -> Callable[[], Any]:
    return lambda: hf_stitch.load(nn.Linear(4, 2), task, processor=processor, **options)


def preprocessed(build: Any, processor: Any, texts: list[str], **options: Any) -> Callable[[], Any]:
    ones = torch.ones(2, LENGTH, dtype=torch.long)
    return lambda: hf_stitch.load(build(0), example_inputs=ones, processor=processor).preprocess(texts, **options)


EXAMPLE = {"example_inputs": torch.randn(2, 4)}
NEITHER = r"accepts neither texts nor images"
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "of any sample": (
        linear(lambda sample: torch.zeros(4)), ExampleError,
        r"accepts both texts and images.*example_inputs=.*task='text-classification'",
    ),
    "of none": (linear(lambda sample: sample.nothing), ExampleError, NEITHER + ".*example_inputs="),
    "of other lengths": (
        linear(lambda text: torch.tensor([len(word) for word in text.lower().split()])), ExampleError,
        r"of texts \(3,\), \(14,\): pad or truncate them to one length",
    ),
    "of other sizes": (
        linear(lambda image: torch.from_numpy(np.array(image.convert("L")))), ExampleError,
        r"of RGB images \(40, 48\), \(96, 64\); of grey.*to one size, or load Linear with",
    ),
    "no head": (linear(task="text-clasification", **EXAMPLE), UnknownNameError, "text-clasification"),
    "no function": (linear(TfidfVectorizer(), **EXAMPLE), TypeError, r"^processor must be a function .*, got Tfidf"),
    "no mask": (
        preprocessed(Masked, ids, ["a b"]), ValueError,
        r"must be a dict .* the keys input_ids, attention_mask, got input_ids",
    ),
    "ids of other lengths": (
        preprocessed(Bag, lambda text: torch.tensor([1] * len(text.split())), ["a b", "a"]), ValueError,
        r"one shape.*pad",
    ),
    "an error": (preprocessed(Bag, lambda text: ids(text.words), ["a"]), ValueError, r"sample 0 raised AttributeErr"),
    "other names": (
        preprocessed(Bag, lambda text: {"words": ids(text)}, ["a"]), ValueError,
        r"must be a dict .* the keys ids, got words",
    ),
    "no offsets": (preprocessed(Bag, ids, ["good film"], offsets=True), ValueError, r"fast tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_processor_that_does_not_fit_is_refused(case: str) -> None:
    job, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        job()
