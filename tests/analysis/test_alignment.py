"""Alignment of two tokenizers by characters: the segments, and comparisons with segments as rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

import hf_stitch
from hf_stitch import Adapter, compare
from hf_stitch.analysis.activations import Activations
from hf_stitch.analysis.comparison.sides import Span, align
from hf_stitch.metrics import linear_cka

from tiny_networks import plain_tokenizer  # isort: skip

TEXTS = [
    "Hello world, a naïve  café\n of tokens!",
    "日本語のテスト, 東京 and Hello",
    "🙂 emoji 👨‍👩‍👧 in a 🇫🇷 row",
    "cafe\u0301 with a combining accent",
    " leading space, trailing space ",
    "worldwide tokens; to ken",
    *(
        " ".join(random.Random(seed).choices(["hello", "world", "token", "accent", "naïve", "to", "日本", "🙂"], k=7))
        for seed in range(9)
    ),
]


# -- the segments ------------------------------------------------------------------------------------------------------
@st.composite
def tilings(draw: Callable[..., Any], text: str) -> list[Span]:
    """Consecutive tokens that cover a text; some characters have two tokens, and some tokens are left out."""
    cuts = sorted({0, len(text), *draw(st.sets(st.sampled_from(range(len(text) + 1))))})
    tokens = [span for span in pairwise(cuts) for _ in range(draw(st.integers(1, 2)) if span[1] == span[0] + 1 else 1)]
    return [(0, 0), *(span for span in tokens if draw(st.integers(0, 9))), (0, 0)]


words = st.text("ab cé日🙂\u0301\t", max_size=14)
both = words.flatmap(lambda text: st.tuples(st.just(text), tilings(text), tilings(text)))


def characters(text: str, span: Span) -> set[int]:
    """Return the characters of a span without the white space at its ends."""
    there = [i for i in range(*span) if not text[i].isspace()]
    return set(range(there[0], there[-1] + 1)) if there else set()


@given(both)
def test_segments_are_the_finest_that_both_sides_refine(case: tuple[str, list[Span], list[Span]]) -> None:
    text, a, b = case
    found = align(text, a, b)
    assert [len(side) for side in found] == [len(a), len(b)]
    spans = [pair for side, numbers in zip((a, b), found, strict=True) for pair in zip(side, numbers, strict=True)]
    tokens = [(characters(text, span), n) for span, n in spans]
    groups: list[set[int]] = []  # characters that are connected by tokens
    for tied, _ in tokens:
        touching = [group for group in groups if group & tied]
        groups = [group for group in groups if not group & tied] + ([tied.union(*touching)] if tied else [])
    segments = {n: set().union(*(own for own, m in tokens if m == n)) for n in {*found[0], *found[1]} - {-1}}
    assert sorted(map(sorted, segments.values())) == [sorted(segments[n]) for n in range(len(segments))]
    assert all(segment in groups for segment in segments.values())
    seen = [set().union(*(characters(text, span) for span in side)) for side in (a, b)]
    for tied, n in tokens:
        if not tied:
            assert n == -1
            continue
        (group,) = [group for group in groups if tied <= group]
        whole = all(s and group & s and min(s) <= min(group) and max(group) <= max(s) for s in seen)
        assert (n != -1) == whole and (n == -1 or segments[n] == group)


@pytest.mark.parametrize(
    ("text", "a", "b", "expected"),
    [
        ("", [], [], ([], [])),
        ("ab", [(0, 2)], [], ([-1], [])),
        ("a b", [(0, 1), (1, 3)], [(0, 1), (2, 3)], ([0, 1], [0, 1])),  # a leading space
        ("a b", [(0, 3)], [(0, 1), (1, 2), (2, 3)], ([0], [0, -1, 0])),
        ("🙂a", [(0, 1), (0, 1), (1, 2)], [(0, 1), (1, 2)], ([0, 0, 1], [0, 1])),  # bytes
        ("abcd", [(0, 2), (2, 4)], [(0, 2), (2, 3)], ([0, -1], [0, -1])),  # b is truncated within a token of a
        ("abcd", [(0, 2), (2, 4)], [(1, 2), (2, 4)], ([-1, 0], [-1, 0])),  # truncated from the left
        ("a\u0301b", [(0, 1), (1, 2), (2, 3)], [(0, 1), (2, 3)], ([0, -1, 1], [0, 1])),  # b drops accents
        ("a\u0301b", [(0, 2), (2, 3)], [(0, 1), (2, 3)], ([0, 1], [0, 1])),
    ],
)
def test_edge_cases(text: str, a: list[Span], b: list[Span], expected: Any) -> None:
    assert align(text, a, b) == expected


# -- comparisons -------------------------------------------------------------------------------------------------------
def fast(made: Tokenizer, **names: str) -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", **names)


def wordpiece() -> Any:
    """WordPiece tokenizer, lower case and without accents, with special tokens."""
    letters = "abcdefghijklmnopqrstuvwxyz,;!"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{c}" for c in letters), "hello", "##ken", "日", "東"]
    made = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    return fast(made, unk_token="[UNK]")


def bytelevel(size: int = 300, padding: str = "right") -> Any:
    """Byte-level BPE tokenizer, with the leading space in the token."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["[PAD]"], initial_alphabet=alphabet)
    made.train_from_iterator(TEXTS, trainer)
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    return fast(made, padding_side=padding)


def network(tokenizer: Any, seed: int, length: int = 200) -> Adapter:
    """An encoder, or for texts padded on the left a decoder with relative positions."""
    options: dict[str, Any] = {
        "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8, "pad_token_id": 0,
        "max_position_embeddings": length, "vocab_size": max(len(tokenizer), 320), "initializer_range": 0.5,
    }  # fmt: skip
    kind = transformers.LlamaModel if tokenizer.padding_side == "left" else transformers.BertModel
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(kind.config_class(**options))
    return hf_stitch.load(model.eval().double(), processor=tokenizer)


def rows_of(a: Adapter, b: Adapter) -> list[dict[str, torch.Tensor]]:
    """Return the activations of each layer averaged over the tokens of each segment, text by text."""
    found: list[dict[str, list[torch.Tensor]]] = [{layer: [] for layer in side.layers} for side in (a, b)]
    for text in TEXTS:
        spans = [
            side.processor(text, return_offsets_mapping=True, truncation=True, max_length=limit)["offset_mapping"]
            for side, limit in zip((a, b), [side.interface.max_tokens for side in (a, b)], strict=True)
        ]
        for side, segments, rows in zip((a, b), align(text, *spans), found, strict=True):
            with torch.no_grad():
                activations = side.encode(side.preprocess([text]), side.layers)
            for layer, tokens in rows.items():
                for n in range(max(segments) + 1):
                    tokens.append(activations[layer].values[0, np.equal(segments, n)].mean(0))
    return [{layer: torch.stack(tokens) for layer, tokens in rows.items()} for rows in found]


@pytest.mark.filterwarnings("ignore:.* texts are longer")
@pytest.mark.parametrize(
    ("tokenizers", "length", "batch_size"),
    [
        ((wordpiece(), bytelevel()), 200, 4),
        ((wordpiece(), bytelevel(padding="left")), 200, 4),
        ((bytelevel(), bytelevel(400)), 200, 4),
        ((wordpiece(), bytelevel()), 17, 4),  # cuts the longer texts
    ],
)
def test_values_match_a_loop_over_segments(tokenizers: tuple[Any, Any], length: int, batch_size: int) -> None:
    a, b = (network(tokenizer, seed, length) for seed, tokenizer in enumerate(tokenizers))
    rounding = 1e-6 if tokenizers[1].padding_side == "left" else 1e-9  # the decoder's rotations are float32
    x, y = rows_of(a, b)
    expected = [[linear_cka(p, q).item() for q in y.values()] for p in x.values()]
    for one, other, values in ((a, b, np.array(expected)), (b, a, np.transpose(expected))):
        atlas = compare(one, other, TEXTS, rows="positions", align="offsets", batch_size=batch_size, progress=False)
        np.testing.assert_allclose(atlas["linear_cka"], values, rtol=rounding)
        assert atlas.recipe["align"] == "offsets"


def test_segments_of_one_tokenizer_are_tokens() -> None:
    a, b = (network(plain_tokenizer(), seed) for seed in (0, 1))  # without special tokens
    plain = compare(a, b, TEXTS, rows="positions", batch_size=4, progress=False)
    by_text = compare(a, b, TEXTS, rows="positions", align="offsets", batch_size=4, progress=False)
    np.testing.assert_array_equal(by_text["linear_cka"], plain["linear_cka"])
    same = compare(a, a, TEXTS, rows="positions", align="offsets", batch_size=4, progress=False)
    np.testing.assert_allclose(np.diag(same["linear_cka"]), 1, rtol=1e-12)


def test_half_precision_is_averaged() -> None:
    a, b = network(wordpiece(), 0), network(bytelevel(), 1)
    exact = compare(a, b, TEXTS, rows="positions", align="offsets", progress=False)
    a.model.bfloat16(), b.model.bfloat16()
    coarse = compare(a, b, TEXTS, rows="positions", align="offsets", progress=False)
    np.testing.assert_allclose(coarse["linear_cka"], exact["linear_cka"], atol=0.02)


def test_offsets_are_not_inputs_of_the_model() -> None:
    a = network(wordpiece(), 0)
    plain, extended = a.preprocess(TEXTS), a.preprocess(TEXTS, offsets=True)
    assert extended.pop("offset_mapping").shape == (*plain["input_ids"].shape, 2)
    assert plain.keys() == extended.keys() and all(torch.equal(plain[name], extended[name]) for name in plain)
    with pytest.raises(ValueError, match=r"character offsets require texts and a fast tokenizer"):
        a.preprocess([torch.zeros(4, dtype=torch.long)], offsets=True)


def test_inputs_that_cannot_be_aligned_are_rejected() -> None:
    a, b = network(wordpiece(), 0), network(bytelevel(), 1)

    def refused(match: str, *args: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match=match):
            compare(*args, progress=False, **{"rows": "positions", "align": "offsets", **options})

    refused("requires rows='positions', got rows='mean'", a, b, TEXTS, rows="mean")
    refused("leave paired_data out", a, b, TEXTS, paired_data=TEXTS)
    saved = Activations({"l": torch.randn(len(TEXTS), 4, 3)}, range(len(TEXTS)))
    refused("saved activations lack offsets", a, saved, TEXTS)
    refused("requires texts, but sample 0 is of type tuple", a, b, [("a", "b"), ("c", "d")])
    refused("sample 1 lacks text that both tokenizers cover", a, b, ["a b", "\u0301", "a"])
    refused("fast tokenizer, got the slow ByT5Tokenizer", a, network(transformers.ByT5Tokenizer(), 1), TEXTS)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    vectors = hf_stitch.load(net, example_inputs=torch.zeros(2, 4))
    refused("requires texts, but sample 0 is of type Tensor", vectors, vectors, torch.zeros(9, 4))
    refused("tokenizers differ", a, b, TEXTS, align="tokens")
