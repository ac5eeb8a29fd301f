"""Token classification: words and their tokens, F1 of entities, and every way through the package."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sklearn import metrics
from tiny_networks import TEXT
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import hf_stitch
import hf_stitch.auto
from hf_stitch.data import Samples
from hf_stitch.tasks.base import IGNORED
from hf_stitch.tasks.heads import task_named
from hf_stitch.tasks.token_classes import entities
from hf_stitch.training import TaskLoss

LAYER = "bert.encoder.layer.1"
NAMES = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
CUT = {"source_layer": LAYER, "target_layer": LAYER, "progress": False}
WORDS = ["ann", "bo", "rome", "oslo", "and", "in", "annbo", "romeoslo", "inrome", "x,", "oslo."]
TEXTS = ["  ".join(WORDS[(i * 7 + j * (1 + i % 4)) % len(WORDS)] for j in range(2 + i % 5)) for i in range(120)]


def tokenizer() -> Any:
    """A tokenizer of parts of words, with special tokens at both ends."""
    parts = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *WORDS[:6], *(f"##{word}" for word in WORDS[:6]), ",", ".", "x"]
    made = Tokenizer(models.WordPiece({part: place for place, part in enumerate(parts)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = [("[CLS]", 1), ("[SEP]", 2)]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


@cache
def network(seed: int = 0, names: tuple[str, ...] = NAMES) -> hf_stitch.Adapter:
    torch.manual_seed(seed)
    config = transformers.BertConfig(**TEXT, id2label=dict(enumerate(names)), num_labels=len(names))
    model = transformers.BertForTokenClassification(config).eval()
    with torch.no_grad():
        model.classifier.weight *= 100
    return hf_stitch.load(model, processor=tokenizer())


@torch.no_grad()
def of_words(net: Any, text: str) -> list[int]:
    """The classes that a network predicts for the first tokens of words, found by hand: each text alone."""
    read = net.processor(text, return_offsets_mapping=True, return_tensors="pt")
    spans = read.pop("offset_mapping")[0].tolist()
    found = net.model(**{name: value for name, value in read.items() if name != "token_type_ids"}).logits[0].argmax(-1)
    starts = [place for place, (start, stop) in enumerate(spans) if stop and (start == 0 or text[start - 1] == " ")]
    return [int(found[place]) for place in starts]


def labels_of(net: Any, noise: int = 7) -> list[list[int]]:
    """Classes that the network often predicts, with some words that do not count."""
    return [
        [IGNORED if (i + j) % 11 == 0 else (kind + ((i * 3 + j) % noise == 0)) % 5 for j, kind in enumerate(row)]
        for i, row in enumerate([of_words(net, text) for text in TEXTS])
    ]


# -- entities ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("O B-PER I-PER O B-LOC", [("PER", 1, 2), ("LOC", 4, 4)]),
        ("B-PER B-PER I-PER", [("PER", 0, 0), ("PER", 1, 2)]),
        ("I-PER I-PER O I-LOC", [("PER", 0, 1), ("LOC", 3, 3)]),  # without a beginning
        ("B-PER I-LOC I-LOC", [("PER", 0, 0), ("LOC", 1, 2)]),  # another kind begins
        ("S-PER B-LOC E-LOC I-LOC", [("PER", 0, 0), ("LOC", 1, 2), ("LOC", 3, 3)]),
        ("O O", []),
        ("", []),
    ],
)
def test_entities_are_those_counted_by_hand(tags: str, expected: list[tuple[str, int, int]]) -> None:
    assert list(entities(tags.split())) == expected


def test_figures_are_those_counted_by_hand() -> None:
    task = task_named("token-classification").about(net := network())
    (batch,) = Samples.of(["ann bo in rome", "oslo x, ann"], label=[[1, 2, 0, 3], [3, IGNORED, 1]]).batches(2)
    inputs = net.preprocess(batch.samples)
    predicted = torch.zeros(*inputs["input_ids"].shape, 5)
    for row, places in enumerate(([(1, 1), (2, 2), (3, 3), (4, 3)], [(1, 4), (2, 1), (3, 2), (4, 1)])):
        for place, kind in places:  # ann bo in rome; oslo x , ann
            predicted[row, place, kind] = 5.0
    found = task.measure({"target": predicted, "stitched": predicted}, (batch, inputs), (batch, inputs))["stitched"]
    assert found["words"].tolist() == [4, 2] and found["right"].tolist() == [3, 1]
    # true: PER(0, 1), LOC(3); predicted: PER(0, 1), LOC(2), LOC(3). true: LOC, PER; predicted: LOC, PER
    assert found["entities"].tolist() == [[2, 3, 2], [2, 2, 2]]
    own = {name: values[:, None] for name, values in found.items()}
    figures = {name: values.item() for name, values in task.figures_of(own, own, np.ones((1, 2))).items()}
    assert figures["entity_f1"] == 8 / 9 and figures["accuracy"] == 4 / 6 and figures["relative_entity_f1"] == 1
    loss = [-np.log(np.exp(5 * right) / (np.exp(5) + 4)) for right in (1, 1, 0, 1, 0, 1)]
    assert figures["cross_entropy"] == pytest.approx(np.mean(loss), rel=1e-5)


def test_the_first_token_of_a_word_has_its_class() -> None:
    found = task_named("token-classification").asked(network(), ["annbo  x, rome", "in"], [[1, 2, 3], [4]])
    assert found.tolist() == [[-100, 1, -100, 2, -100, 3, -100], [-100, 4, -100, -100, -100, -100, -100]]
    unlabelled = task_named("token-classification").asked(network(), ["annbo  x, rome", "in"], None)
    assert torch.equal(unlabelled >= 0, found >= 0)


# -- every verb --------------------------------------------------------------------------------------------------------
def test_a_network_stitched_to_itself_is_the_network_in_every_verb() -> None:
    net = network()
    labels = labels_of(net)
    model = hf_stitch.stitch(net, net, Samples.of(TEXTS, label=labels), matcher="identity", **CUT)
    assert (type(model).__name__, model.task) == ("StitchedModelForTokenClassification", "token-classification")
    data = Samples.of(TEXTS, label=labels)
    found = hf_stitch.evaluate(model, data, batch_size=7, resamples=50, examples=2, progress=False)
    true = [kind for row in labels for kind in row if kind != IGNORED]
    words = [word for text in TEXTS for word in of_words(net, text)]
    own = [a for a, b in zip(words, [b for row in labels for b in row], strict=True) if b != IGNORED]
    for who in ("stitched", "identity", "source", "target"):
        row = {name: score.value for name, score in found.scores[who].items()}
        assert row["accuracy"] == pytest.approx(metrics.accuracy_score(true, own))
        assert row["agreement"] == row["relative_accuracy"] == row["relative_entity_f1"] == 1
        assert 0 < row["entity_f1"] < 1
    chance = found.scores["chance"]
    most = max({*true}, key=lambda kind: (true.count(kind), -kind))
    assert chance["accuracy"].value == pytest.approx(true.count(most) / len(true))
    shares = np.bincount(true) / len(true)
    assert chance["cross_entropy"].value == pytest.approx(-np.sum(shares * np.log(shares)))
    assert chance["agreement"].value == pytest.approx(own.count(most) / len(own))
    assert not found.no_better and len(found.examples) == 2
    again = hf_stitch.evaluate(model, data, batch_size=64, resamples=50, progress=False)
    for name, score in found.scores["stitched"].items():  # padding does not count
        assert again[name].value == pytest.approx(score.value, abs=1e-6)

    fresh = Samples.of([f" {text}" for text in TEXTS], label=labels)
    grid = hf_stitch.stitch_grid(
        net, net, data, test_data=fresh, layers_a=[LAYER], layers_b=[LAYER], matchers=["identity"], resamples=9,
        progress=False,
    )  # fmt: skip
    assert grid.figures[:2] == ("relative_entity_f1", "relative_accuracy") and grid.values().item() == 1
    assert grid.values("identity", "accuracy").item() == found["accuracy"].value
    with pytest.raises(ValueError, match="an anchor is a single vector"):
        hf_stitch.swap(net, net, TEXTS[:20], encoder_layer=LAYER, target_layer=LAYER)


def test_classes_that_are_no_parts_of_entities_have_no_f1_and_unlabelled_texts_agree() -> None:
    net = network(names=("a", "b", "c", "d", "e"))
    model = hf_stitch.stitch(net, net, Samples.of(TEXTS, label=labels_of(net)), matcher="identity", **CUT)
    assert model.evaluation is not None
    assert list(model.evaluation.scores["stitched"]) == [
        "relative_accuracy", "accuracy", "cross_entropy", "agreement", "kl_divergence",
    ]  # fmt: skip
    plain = hf_stitch.stitch(net, net, TEXTS, matcher="identity", **CUT).evaluation
    assert plain is not None and {*plain.scores["stitched"]} == {"agreement", "kl_divergence"}
    assert (plain["agreement"].value, plain["kl_divergence"].value) == (1, 0)


# -- refusals ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("label", "options", "message"),
    [
        (lambda n: 0, {}, "sample 0 has 2 words .* and the label 0, but .* requires a list"),
        (lambda n: [0], {}, r"sample 0 has 2 words .* and the label \(0,\)"),
        (lambda n: [9] * n, {}, "sample 0 has label 9, but the target predicts classes 0 to 4"),
        (lambda n: [IGNORED] * n, {}, "must contain words with labels .first sample"),
        (lambda n: [0] * n, {"pooling": "mean"}, "pooling='mean' keeps one token per text, but token-classification"),
        (lambda n: [0] * n, {"pairs": True}, "token-classification requires texts, got a sample of type tuple"),
    ],
)
@pytest.mark.parametrize("matcher", ["lstsq", TaskLoss(max_steps=1, labels="hard")])
def test_data_without_word_classes_is_refused(matcher: Any, label: Any, options: dict[str, Any], message: str) -> None:
    rest = {name: value for name, value in options.items() if name != "pairs"}
    texts = [(text, text) for text in TEXTS] if options.get("pairs") else TEXTS
    data, layers = Samples.of(texts, label=[label(len(text.split())) for text in TEXTS]), [LAYER]
    with pytest.raises(ValueError, match=message):
        hf_stitch.stitch(network(), network(), data, matcher=matcher, **rest, **CUT)
    grid = {"matchers": [matcher], "layers_a": layers, "layers_b": layers, "progress": False}
    with pytest.raises(ValueError, match=message):
        hf_stitch.stitch_grid(network(), network(), data, **grid, **rest)


def test_other_texts_for_the_target_have_other_tokens() -> None:
    net = network()
    model = hf_stitch.stitch(net, net, TEXTS, matcher="identity", **CUT)
    with pytest.raises(ValueError, match="source and target receive different input_ids for the same text"):
        hf_stitch.evaluate(model, TEXTS, paired_data=[f"oslo {text}" for text in TEXTS], progress=False)
