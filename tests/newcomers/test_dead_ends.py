"""Inputs that newcomers pass and that used to end in an error, or in advice that led nowhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tiny_networks import LAYERS, WORDS, network, plain_tokenizer
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)  # fmt: skip

import hf_stitch
from benchmarks import tiny
from hf_stitch import Samples

# -- data as people hold them ------------------------------------------------------------------------------------------

ROWS = torch.arange(24.0).reshape(6, 4)
LABELS = [0, 1, 2, 0, 1, 2]


class Items(Dataset[Any]):
    """A data set of user code."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.reads = items, 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Any:
        self.reads += 1
        return self.items[place]


class Boxed(Items):
    """Each read of an item makes another object beside the sample."""

    def __getitem__(self, place: int) -> Any:
        return {**super().__getitem__(place), "box": object()}


PAIRS = list(zip(ROWS, LABELS, strict=True))
HELD: dict[str, Callable[[], Any]] = {
    "a list of pairs": lambda: PAIRS,
    "a list of pairs with labels as tensors": lambda: [(x, torch.tensor(y)) for x, y in PAIRS],
    "a list of lists with labels of numpy": lambda: [[x.numpy(), np.int64(y)] for x, y in PAIRS],
    "a TensorDataset": lambda: TensorDataset(ROWS, torch.tensor(LABELS)),
    "a subset": lambda: Subset(TensorDataset(ROWS, torch.tensor(LABELS)), range(6)),
    "user code": lambda: Items(PAIRS),
    "user code of dictionaries": lambda: Items([{"x": x, "label": y} for x, y in PAIRS]),
    "dictionaries of tensors": lambda: Items([{"x": x, "label": torch.tensor(y)} for x, y in PAIRS]),
    "a list of dictionaries of arrays": lambda: [{"x": x.numpy(), "label": np.array(y)} for x, y in PAIRS],
    "user code with other objects": lambda: Boxed([{"x": x, "label": y} for x, y in PAIRS]),
    "two data sets": lambda: ConcatDataset([Items(PAIRS[:2]), Items(PAIRS[2:])]),
    "a loader": lambda: DataLoader(Items(PAIRS), batch_size=4, drop_last=True),
    "a loader of single samples": lambda: DataLoader(TensorDataset(ROWS, torch.tensor(LABELS)), batch_size=None),
}


@pytest.mark.parametrize("how", HELD)
def test_samples_with_labels_are_taken_as_they_are_held(how: str) -> None:
    samples = Samples.of(HELD[how]())
    assert (samples.modality, samples.labels, samples.ids) == ("tensor", LABELS, tuple(range(6)))
    read = [sample for batch in samples.batches(4) for sample in batch.samples]
    assert torch.equal(torch.stack([torch.as_tensor(sample) for sample in read]), ROWS)
    assert samples.content_hashes == Samples.of(ROWS).content_hashes


def test_samples_without_labels_and_pairs_of_texts_stay_what_they_are() -> None:
    for data in (TensorDataset(ROWS), Subset(TensorDataset(ROWS), range(6)), DataLoader(Items(list(ROWS)))):
        assert (Samples.of(data).labels, Samples.of(data).modality) == (None, "tensor")
    pairs = [("a premise", "a claim"), ("another", "one more")]
    labelled = Samples.of([(pair, label) for label, pair in enumerate(pairs)])
    assert next(labelled.batches(2)).samples == next(Samples.of(pairs).batches(2)).samples == pairs
    assert labelled.labels == [0, 1]


def test_an_image_folder_keeps_its_names_of_classes() -> None:
    folder = Items([(Image.new("RGB", (2, 2), shade), shade % 2) for shade in range(4)])
    folder.classes = ["dark", "light"]
    samples = Samples.of(folder)
    assert (samples.modality, samples.label_names, samples.labels) == ("image", ("dark", "light"), [0, 1, 0, 1])
    assert samples.select([3]).labels == [1]


class Augmented(Items):
    def __getitem__(self, place: int) -> Any:
        x, y = super().__getitem__(place)
        return x + torch.rand(()), y


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(PAIRS)


SHAPES = r"labels of shape \(n,\), got \(6, 4\) float32, \(6, 4\) float32: pass Samples\.of\(samples, label"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "shuffled": (lambda: DataLoader(Items(PAIRS), shuffle=True), r"shuffles.*pass its data set, loader\.dataset"),
    "drawn": (
        lambda: DataLoader(Items(PAIRS), sampler=SubsetRandomSampler([1, 0])),
        "order of the loader is that of SubsetRandomSampler, which cannot be checked: pass its data set",
    ),
    "collated": (
        lambda: DataLoader(Items(PAIRS), collate_fn=lambda items: items),
        "collates items by a function of its own.*pass its data set",
    ),
    "loaded from a stream": (lambda: DataLoader(Stream()), "has no items by number.*as a list of its items"),
    "a stream": (Stream, r"Stream has no items by number.*list\(dataset\)"),
    "augmented": (lambda: Augmented(PAIRS), "item 0 of Augmented differs when it is read again.*augmentation"),
    "empty": (lambda: Items([]), "the data is empty"),
    "mixed items": (lambda: Items([PAIRS[0], ROWS[0]]), r"item 1 of the data set has samples \(tensor\), but item 0"),
    "rows as labels": (lambda: TensorDataset(ROWS, ROWS), SHAPES),
    "mixed pairs": (lambda: [PAIRS[0], ROWS[0]], "sample 1 must be a pair of a sample and its label, as sample 0"),
    "triples": (lambda: [("a text", "b", 1)], r"'samples' \(tuple\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_data_without_a_known_order_or_form_are_refused(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(TypeError if case == "a stream" else ValueError, match=message):
        Samples.of(make())


def test_items_are_read_when_they_are_needed() -> None:
    items = Items(PAIRS)
    samples = Samples.of(items)
    once = items.reads
    assert samples.labels == LABELS and items.reads == once
    next(samples.take(2).batches(2))
    assert items.reads == once + 2


# -- networks with the special ids of their own configs ----------------------------------------------------------------

OWN_IDS = [
    *(("text", kind) for kind in ("gpt2", "perceiver")),  # all in the slow test
    *(("causal", kind) for kind in ("codegen", "cpmant", "rwkv")),
]


def with_own_ids(suite: str, kind: str) -> hf_stitch.Adapter:
    """A tiny network of a type of transformers, with the special ids that its config has by default."""
    model, example = next(tiny.attempts(suite, kind, tiny.OWN_IDS))()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return hf_stitch.load(model, example_inputs=example)


def check_single_samples(adapter: hf_stitch.Adapter) -> None:
    """Check that every listed cut is exact for one sample, and that the config is left as it was."""
    before = adapter.model.config.to_dict()
    assert len(adapter.layers) > 1
    one = {name: value[:1] for name, value in adapter.example.items()}
    with torch.no_grad():
        expected = adapter.forward(one)[0]
        for layer, representation in adapter.encode(one, adapter.layers).items():
            assert torch.equal(adapter.decode(representation, layer)[0], expected), layer
    assert adapter.model.config.to_dict() == before


@pytest.mark.parametrize(("suite", "kind"), OWN_IDS)
def test_networks_are_cut_with_the_special_ids_of_their_own_configs(suite: str, kind: str) -> None:
    check_single_samples(with_own_ids(suite, kind))


@pytest.mark.parametrize("kind", tiny.types("text"))
def test_every_classifier_of_texts_is_cut_with_its_own_special_ids(kind: str) -> None:
    try:
        adapter = with_own_ids("text", kind)
    except ImportError as error:
        pytest.skip(f"needs another library: {error}")
    check_single_samples(adapter)


@pytest.fixture
def gpt2() -> transformers.GPT2ForSequenceClassification:
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=100)
    return transformers.GPT2ForSequenceClassification(config).eval()


def test_a_classifier_without_padding_names_what_batches_need(gpt2: Any) -> None:
    with pytest.warns(UserWarning, match="defines no pad_token_id and takes one text at a time.*processor="):
        adapter = hf_stitch.load(gpt2)
    with pytest.raises(ValueError, match="GPT2ForSequenceClassification defines no pad_token_id and takes one text"):
        adapter.forward(adapter.example)
    with pytest.warns(UserWarning, match="set model.config.pad_token_id = 0, the id of the tokenizer, before"):
        hf_stitch.load(gpt2, processor=plain_tokenizer())
    gpt2.config.pad_token_id = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter = hf_stitch.load(gpt2, processor=plain_tokenizer())
    assert adapter.interface.pad_id == 0


def test_a_saved_classifier_takes_the_padding_id_of_its_tokenizer(gpt2: Any, tmp_path: Path) -> None:
    gpt2.save_pretrained(tmp_path)
    plain_tokenizer().save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="no pad_token_id: that of the tokenizer, 0, is used"):
        adapter = hf_stitch.load(str(tmp_path))
    texts = [" ".join(WORDS[:3]), WORDS[4]]
    with torch.no_grad():
        together = adapter.forward(adapter.preprocess(texts)).logits
        apart = [gpt2(**plain_tokenizer()(text, return_tensors="pt")).logits for text in texts]
    assert torch.allclose(together, torch.cat(apart), atol=1e-6)


def test_a_tokenizer_without_padding_token_is_told_apart(gpt2: Any) -> None:
    words = plain_tokenizer()
    words.pad_token = None
    with pytest.warns(UserWarning, match="pass a tokenizer whose pad_token is set as processor="):
        adapter = hf_stitch.load(gpt2, processor=words)
    with pytest.raises(ValueError, match=r"tokenizer.pad_token = tokenizer.eos_token\) and pass the tokenizer as proc"):
        adapter.preprocess(list(WORDS[:2]))


# -- columns as data sets on the Hub have them -------------------------------------------------------------------------


def as_on_the_hub(features: dict[str, Any], rows: dict[str, list[Any]]) -> datasets.Dataset:
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def classes(n: int) -> datasets.ClassLabel:
    return datasets.ClassLabel(num_classes=n)


HUB = {
    "TREC": (
        {"text": datasets.Value("string"), "coarse_label": classes(6), "fine_label": classes(50)},
        {"text": ["How far is it ?", "Who ?"], "coarse_label": [5, 3], "fine_label": [40, 31]},
    ),
    "CIFAR-100": (
        {"img": datasets.Image(), "fine_label": classes(100), "coarse_label": classes(20)},
        {"img": [Image.new("RGB", (32, 32), n) for n in (1, 2)], "fine_label": [99, 4], "coarse_label": [13, 0]},
    ),
}


@pytest.mark.parametrize("name", HUB)
def test_two_columns_of_labels_stop_only_what_needs_labels(name: str) -> None:
    samples = Samples.of(as_on_the_hub(*HUB[name]))
    assert len(next(samples.split(1)[1].batches(2)).samples) == 1 and samples.fingerprint
    with pytest.raises(
        ValueError, match=r"choose one with Samples\.of\(data, label='(coarse|fine)_label'\), or --label"
    ):
        samples.labels  # noqa: B018
    assert Samples.of(as_on_the_hub(*HUB[name]), label="coarse_label").labels == HUB[name][1]["coarse_label"]


def test_one_of_many_columns_of_texts_is_chosen_by_the_call_that_the_message_names() -> None:
    languages = {f"{code}_Latn": [f"a sentence in {code}"] for code in ("afr", "deu", "eng", *map(str, range(125)))}
    ntrex = as_on_the_hub(dict.fromkeys(languages, datasets.Value("string")), languages)
    with pytest.raises(
        ValueError, match=r"and 116 more; choose one with .*text='afr_Latn'.*--text afr_Latn on the comm"
    ):
        Samples.of(ntrex)
    assert next(Samples.of(ntrex, text="deu_Latn").batches(1)).samples == ["a sentence in deu"]


# -- two tokenizers ----------------------------------------------------------------------------------------------------


def test_advice_for_two_tokenizers_runs_as_given() -> None:
    a, b, c = network("bert", 0, "float32"), network("roberta", 1, "float32"), network("gpt2", 1, "float32")
    other = hf_stitch.load(a.model, processor=b.processor)
    texts = Samples.of([" ".join(WORDS[i : i + 4]) for i in range(30)])

    def stitch(source: Any, target: Any, family: str, pooling: Any) -> None:
        place = {"source_layer": LAYERS["bert"], "target_layer": LAYERS[family], "progress": False}
        hf_stitch.stitch(source, target, texts, matcher="ridge", pooling=pooling, **place)

    with pytest.raises(ValueError, match=r"use pooling='mean', 'cls' or 'last'.*compare also.*align='offsets'"):
        stitch(a, b, "roberta", "none")
    for pooling in ("mean", "cls", "last"):
        stitch(a, b, "roberta", pooling)
    with pytest.raises(ValueError, match="align='offsets'"):
        hf_stitch.compare(a, b, texts, rows="positions", progress=False)
    with pytest.raises(ValueError, match=r"To compare the two, use align='offsets'"):  # a pooled text is no answer
        stitch(other, c, "gpt2", "none")
    for source, target in ((a, b), (other, c)):
        hf_stitch.compare(source, target, texts, rows="positions", align="offsets", progress=False)
