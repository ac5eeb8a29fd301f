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
from tokenizers import Tokenizer, models
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from transformers.utils import logging

import hf_stitch
from benchmarks import tiny
from hf_stitch import Adapter, Samples
from hf_stitch.adapters.pinning import settings_of_config, settings_of_processor
from hf_stitch.data import read_data

# -- data as people hold them ------------------------------------------------------------------------------------------

ROWS = torch.arange(24.0).reshape(6, 4)
LABELS = [0, 1, 2, 0, 1, 2]


class Items(Dataset[Any]):
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
    "a list of lists with labels of numpy": lambda: [[x.numpy(), np.int64(y)] for x, y in PAIRS],
    "a TensorDataset": lambda: TensorDataset(ROWS, torch.tensor(LABELS)),
    "user code": lambda: Items(PAIRS),
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


SHAPES = r"labels of shape \(n,\), .*got \(6, 4\) float32, \(6, 4\) float32; pass Samples\.of\(samples, label"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "shuffled": (lambda: DataLoader(Items(PAIRS), shuffle=True), r"shuffles.*pass loader\.dataset"),
    "drawn": (
        lambda: DataLoader(Items(PAIRS), sampler=torch.utils.data.SubsetRandomSampler([1, 0])),
        "order of SubsetRandomSampler cannot be checked; pass loader.dataset",
    ),
    "collated": (
        lambda: DataLoader(Items(PAIRS), collate_fn=lambda items: items),
        "custom collate_fn.*pass loader.dataset",
    ),
    "loaded from a stream": (lambda: DataLoader(Stream()), "not map-style.*as a list of its items"),
    "a stream": (Stream, r"Stream is not a map-style dataset.*list\(dataset\)"),
    "augmented": (lambda: Augmented(PAIRS), "item 0 of Augmented differs when it is read again.*augmentation"),
    "empty": (lambda: Items([]), "the data is empty"),
    "mixed items": (lambda: Items([PAIRS[0], ROWS[0]]), r"item 1 of the dataset has samples \(tensor\), but item 0"),
    "rows as labels": (lambda: TensorDataset(ROWS, ROWS), SHAPES),
    "mixed pairs": (lambda: [PAIRS[0], ROWS[0]], "sample 1 must be a pair of a sample and its label like sample 0"),
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


OF_IMAGES = {"gemma3", "modernvbert", "qwen3_5", "t5gemma2", "ultravbert"}
"""Classifiers of texts that also read images, for which no example follows from their configs."""


@pytest.mark.parametrize(
    ("suite", "kind"),
    [
        *(("causal", kind) for kind in ("codegen", "cpmant", "rwkv")),
        *(("text", kind) for kind in tiny.types("text") if kind not in OF_IMAGES),
    ],
)
def test_networks_are_cut_with_the_special_ids_of_their_own_configs(suite: str, kind: str) -> None:
    """Each listed cut is exact for one sample, and the config is left as it was."""
    try:
        model, example = next(tiny.attempts(suite, kind, tiny.OWN_IDS))()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapter = hf_stitch.load(model, example_inputs=example)
    except ImportError as error:
        pytest.skip(f"needs another library: {error}")
    before = model.config.to_dict()
    assert len(adapter.layers) > 1
    one = {name: value[:1] for name, value in adapter.example.items()}
    with torch.no_grad():
        expected = adapter.forward(one)[0]
        for layer, representation in adapter.encode(one, adapter.layers).items():
            assert torch.equal(adapter.decode(representation, layer)[0], expected), layer
    assert model.config.to_dict() == before


@pytest.fixture
def gpt2() -> transformers.GPT2ForSequenceClassification:
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=100)
    return transformers.GPT2ForSequenceClassification(config).eval()


def test_a_classifier_without_padding_names_what_batches_need(gpt2: Any) -> None:
    with pytest.warns(UserWarning, match="does not define pad_token_id and accepts one text at a time.*processor="):
        adapter = hf_stitch.load(gpt2)
    with pytest.raises(ValueError, match="ForSequenceClassification does not define pad_token_id and accepts one text"):
        adapter.forward(adapter.example)
    with pytest.warns(UserWarning, match="set model.config.pad_token_id = 0, the id of the tokenizer, before"):
        hf_stitch.load(gpt2, processor=plain_tokenizer())
    words = plain_tokenizer()
    words.pad_token = None
    with pytest.warns(UserWarning, match="pass a tokenizer with pad_token as processor="):
        adapter = hf_stitch.load(gpt2, processor=words)
    with pytest.raises(ValueError, match=r"tokenizer.pad_token = tokenizer.eos_token and pass the tokenizer as proc"):
        adapter.preprocess(list(WORDS[:2]))
    gpt2.config.pad_token_id = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter = hf_stitch.load(gpt2, processor=plain_tokenizer())
    assert adapter.interface.pad_id == 0


def test_a_saved_classifier_takes_the_padding_id_of_its_tokenizer(gpt2: Any, tmp_path: Path) -> None:
    gpt2.save_pretrained(tmp_path)
    plain_tokenizer().save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="does not define pad_token_id: using 0, from the tokenizer"):
        adapter = hf_stitch.load(str(tmp_path))
    texts = [" ".join(WORDS[:3]), WORDS[4]]
    with torch.no_grad():
        together = adapter.forward(adapter.preprocess(texts)).logits
        apart = [gpt2(**plain_tokenizer()(text, return_tensors="pt")).logits for text in texts]
    assert torch.allclose(together, torch.cat(apart), atol=1e-6)


def test_one_of_many_columns_of_texts_is_chosen_by_the_call_that_the_message_names() -> None:
    languages = {f"{code}_Latn": [f"a sentence in {code}"] for code in ("afr", "deu", "eng", *map(str, range(125)))}
    ntrex = datasets.Dataset.from_dict(languages)
    with pytest.raises(ValueError, match=r"and 116 more; choose one with .*text='afr_Latn'.*--text afr_Latn on the c"):
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

    with pytest.raises(ValueError, match=r"tokenizers differ.*pooling='mean', 'cls' or 'last'.*compare.*align='off"):
        stitch(a, b, "roberta", "none")
    for pooling in ("mean", "cls", "last"):
        stitch(a, b, "roberta", pooling)
    with pytest.raises(ValueError, match="align='offsets'"):
        hf_stitch.compare(a, b, texts, rows="positions", progress=False)
    with pytest.raises(ValueError, match=r"To compare the two, use align='offsets'"):  # a pooled text is no answer
        stitch(other, c, "gpt2", "none")
    for source, target in ((a, b), (other, c)):
        hf_stitch.compare(source, target, texts, rows="positions", align="offsets", progress=False)


# -- vocabularies, files of data, configs, and a stitch above its target -----------------------------------------------


def test_no_word_of_a_vocabulary_is_taken_for_a_setting(tmp_path: Path) -> None:
    vocabulary = {"[UNK]": 0, "[PAD]": 1, **{f"w{i}": i for i in range(2, 1100)}, "type": 1100, "player": 1101}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    settings = settings_of_processor(words)
    assert settings is not None
    assert not [key for key in (*settings.chosen, *settings.defaults) if key.endswith(("vocab.type", "vocab.player"))]
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 8}
    net = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=1102, **sizes)).eval()
    a, layer = hf_stitch.load(net, processor=words), "bert.encoder.layer.0"
    texts = Samples.of([f"w{i}" for i in range(2, 42)], label=[0, 1] * 20)
    made = hf_stitch.stitch(a, a, texts, source_layer=layer, target_layer=layer, matcher="identity", progress=False)
    made.save_pretrained(tmp_path)
    ids = torch.tensor([[1100, 1101]])
    assert torch.equal(hf_stitch.StitchedModel.from_pretrained(tmp_path)(input_ids=ids).logits, net(ids).logits)


def test_labels_are_renumbered_once_for_each_class() -> None:
    samples = Samples.of(["a", "b", "c"], label=[0, 1, 1])
    twice = samples.renumbered([2, 0], ["x", "y", "z"]).renumbered([1, 2, 0], ["z", "x", "y"])
    assert (twice.labels, twice.label_names, twice.fingerprint) == ([0, 1, 1], ("z", "x", "y"), samples.fingerprint)
    for numbers in ([0], [0, 0], [0, 2], [-1, 0]):
        with pytest.raises(ValueError, match="numbers must"):
            samples.renumbered(numbers, ["x", "y"])


def test_a_file_of_data_is_told_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "test.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"test\.parquet is a file; pass its folder"):
        read_data(str(tmp_path / "test.parquet"))


def test_pinning_a_config_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    config = transformers.GPT2Config(vocab_size=50, bos_token_id=0, eos_token_id=0, n_embd=8, n_head=1, n_layer=1)
    caplog.clear()
    logger = logging.get_logger("transformers")
    logger.addHandler(caplog.handler)
    before = logging.get_verbosity()
    try:
        assert settings_of_config(config).chosen["vocab_size"] == 50
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records and logging.get_verbosity() == before


def test_a_stitch_above_its_target_is_scored_beside_its_source(tmp_path: Path) -> None:
    """The first layer of the target confuses two classes, that of the source none: 1.33 of the target's accuracy."""
    torch.manual_seed(0)
    labels = torch.arange(600) % 4
    images = torch.eye(4)[labels].reshape(-1, 1, 2, 2).repeat(1, 3, 1, 1) + 0.05 * torch.randn(600, 3, 2, 2)

    def network(mixing: torch.Tensor) -> Adapter:
        net = nn.Sequential(nn.Flatten(), nn.Linear(12, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
        with torch.no_grad():
            net[1].weight.copy_(mixing @ torch.eye(4).repeat(1, 3) / 3)
            net[3].weight.copy_(torch.eye(4))
        return hf_stitch.load(net, example_inputs=images[:2])

    confused = torch.eye(4)
    confused[:2, :2] = 0.5
    source, target = network(torch.eye(4)), network(confused)
    data = Samples.of(images, label=labels.tolist())
    stitched = hf_stitch.stitch(source, target, data, source_layer="2", target_layer="2", matcher="identity")
    scores = {who: row["accuracy"].value for who, row in stitched.evaluation.scores.items()}
    assert scores["stitched"] == scores["source"] == 1.0 and scores["target"] < 0.85
    stitched.stitcher.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "source alone 1.000" in card and "not shown to be better than: no map, source alone." in card
    assert "| source |" in card and "source" in str(stitched.evaluation)
