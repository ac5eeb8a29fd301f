"""Stitched decoders with different tokenizers: what the source reads, causality, generation and files."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st
from tokenizers import processors

import hf_stitch
import hf_stitch.auto
from hf_stitch.adapters.prefixes import INPUTS, PrefixAdapter, PrefixReader
from hf_stitch.artefacts.cache import NAME
from hf_stitch.reports.stitched import finding

from tiny_networks import network, stitched  # isort: skip
from two_tokenizers import LAYER, SENTENCES, coarse, decoder, fine  # isort: skip

BOTH = [("llama", "gpt2"), ("gpt2", "llama")]
TEXT = st.lists(
    st.sampled_from(["walk", "ed", "ing", " ", "  ", "\n", "\t", "é", "🐎", "’s", "un", "believably", ".", "x"]),
    min_size=1,
    max_size=12,
).map("".join)


@pytest.fixture(scope="module")
def models() -> dict[tuple[str, str], Any]:
    return {
        (a, b): stitched(decoder(a), decoder(b), SENTENCES, (LAYER[a], LAYER[b]), align="prefix", own=a == "gpt2")
        for a, b in BOTH
    }  # fmt: skip


def reader(source: Any, target: Any) -> PrefixReader:
    return PrefixReader(source.backend_tokenizer, target.backend_tokenizer, start=1)


def paths(reading: Any, row: int) -> list[list[int]]:
    """The tokens that each node attends to, in the order of their depth."""
    return [
        [int(reading.input_ids[row, each]) for each in sorted(mask.nonzero()[:, 0], key=lambda n: int(n))]
        for mask in reading.attention_mask[row, 0]
    ]


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(TEXT, min_size=1, max_size=3), direction=st.booleans())
def test_each_token_reads_the_text_up_to_its_end(texts: list[str], direction: bool) -> None:
    source, target = (fine(), coarse()) if direction else (coarse(), fine())
    inputs = target([text + "a" for text in texts], padding=True, return_tensors="pt")
    reading = reader(source, target).read(inputs["input_ids"], inputs["attention_mask"])
    for row, ids in enumerate(inputs["input_ids"].tolist()):
        read, found, mask = "", paths(reading, row), inputs["attention_mask"][row].tolist()
        for place in range(len(ids)):
            if not mask[place]:
                continue
            prefix = target.decode(ids[: place + 1], skip_special_tokens=True, clean_up_tokenization_spaces=False)
            prefix = prefix.rstrip("\N{REPLACEMENT CHARACTER}")
            read = read if prefix.rstrip() == read.rstrip() else prefix
            wanted = source(read)["input_ids"] or [1]
            node = int(reading.alignment[row, place])
            assert found[node] == wanted
            assert int(reading.position_ids[row, node]) == len(wanted) - 1


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(TEXT, min_size=1, max_size=3), direction=st.booleans(), data=st.data())
def test_a_cache_keeps_the_tokens_of_the_text_so_far(texts: list[str], direction: bool, data: Any) -> None:
    """Step by step, what is kept and what is new together are the tokens of each prefix."""
    source, target = (fine(), coarse()) if direction else (coarse(), fine())
    side = data.draw(st.sampled_from(["left", "right"]))
    inputs = target([text + "a" for text in texts], padding=True, padding_side=side, return_tensors="pt")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    reads = reader(source, target)
    held: list[list[int]] = [[] for _ in texts]
    step = 0
    while step < ids.shape[1]:
        new = data.draw(st.integers(1, ids.shape[1] - step))
        step += new
        reading = reads.read(ids[:, :step], mask[:, :step], new if step > new else None)
        whole = reads.read(ids[:, :step], mask[:, :step])
        for row in range(len(texts)):
            tokens = [*held[row], *reading.input_ids[row].tolist()]
            for place in range(new):
                if mask[row, step - new + place]:
                    attended = reading.attention_mask[row, 0, int(reading.alignment[row, place])].nonzero()[:, 0]
                    wanted = paths(whole, row)[int(whole.alignment[row, step - new + place])]
                    assert [tokens[int(each)] for each in attended] == wanted
            held[row] = [tokens[int(each)] for each in reading.kept[row]]


@pytest.mark.parametrize(("a", "b"), BOTH)
def test_one_forward_equals_a_forward_over_each_prefix(a: str, b: str) -> None:
    source = decoder(a)
    adapter = PrefixAdapter(source, decoder(b))
    inputs = adapter.preprocess(SENTENCES[::17])
    found = adapter.encode(inputs, LAYER[a])[LAYER[a]].values
    for row, ids in enumerate(inputs["input_ids"].tolist()):
        real = [token for token, keep in zip(ids, inputs["attention_mask"][row].tolist(), strict=True) if keep]
        for place, text in enumerate(adapter.reader.prefixes(real)):
            (tokens,) = adapter.reader.tokens([text])
            alone = source.encode({"input_ids": torch.tensor([tokens])}, LAYER[a])[LAYER[a]].values[0, -1]
            torch.testing.assert_close(found[row, place], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pair", BOTH)
def test_no_logit_depends_on_later_tokens(pair: tuple[str, str], models: Any) -> None:
    model, random = copy.deepcopy(models[pair]).double(), np.random.default_rng(0)
    with torch.no_grad():
        for text in SENTENCES[::23]:
            inputs = model.preprocess([text])
            whole = model(**inputs).logits
            for end in random.integers(1, inputs["input_ids"].shape[1], 4):
                cut = model(**{name: value[:, :end] for name, value in inputs.items()}).logits
                torch.testing.assert_close(cut, whole[:, :end], rtol=0, atol=1e-12)


@pytest.mark.parametrize("pair", BOTH)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generation_with_and_without_a_cache(pair: tuple[str, str], options: dict[str, Any], models: Any) -> None:
    model = models[pair]
    tokenizer = copy.deepcopy(model.processor)
    tokenizer.padding_side = "left"
    inputs = tokenizer(["The walker is walk", "Zoë 🐎 ran quickly"], padding=True, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, **options}
    cached, plain = (model.generate(**inputs, **settings, use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain)
    if not options:  # each token is the best after all tokens before it
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 12, dtype=torch.long)], 1)
        with torch.no_grad():
            logits = model(input_ids=cached, attention_mask=mask).logits
        logits[..., model.generation_config.eos_token_id or []] = -torch.inf  # min_new_tokens
        assert torch.equal(logits[:, -13:-1].argmax(-1), cached[:, -12:])


def test_files(models: Any, tmp_path: Path) -> None:
    """Earlier versions refuse them: they would give tokens of the target to the source."""
    models[BOTH[0]].save_pretrained(tmp_path / "model")
    models[BOTH[0]].stitcher.save_pretrained(tmp_path / "stitcher")
    for file in ("model/config.json", "stitcher/stitcher.json"):
        assert json.loads((tmp_path / file).read_text())["format_version"] == 3
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.get_vocab() == coarse().get_vocab()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    (found,) = pipe("The walker", max_new_tokens=4, do_sample=False)
    assert found["generated_text"].startswith("The walker")
    (tmp_path / "model" / "source_tokenizer.json").unlink()
    with pytest.raises((FileNotFoundError, ValueError), match="source_tokenizer"):
        hf_stitch.StitchedModel.from_pretrained(tmp_path / "model")


def test_a_call_with_tensors_alone_exports(models: Any) -> None:
    model = copy.deepcopy(models[BOTH[0]])
    inputs = model.preprocess(SENTENCES[:2])
    tensors = {**inputs, **model.source.read(**inputs).to_inputs()}
    del tensors["source_kept"]
    model.source.reader = None
    with torch.no_grad():
        wanted = model(**tensors).logits
        program = torch.export.export(model, (), {**tensors, "use_cache": False}, strict=False)
        torch.testing.assert_close(program.module()(**tensors, use_cache=False).logits, wanted)
    with pytest.raises(ValueError, match=INPUTS[0]):
        model(**inputs)


def test_other_workflows_take_the_adapter() -> None:
    from hf_stitch.training import TaskLoss

    a, b = decoder("llama", torch.float32), decoder("gpt2", torch.float32)
    reads, layers = PrefixAdapter(a, b, own=True), {"source_layer": LAYER["llama"], "target_layer": LAYER["gpt2"]}
    texts = [f"{one} {two}" for one, two in zip(SENTENCES, SENTENCES[::-1], strict=True)]
    train, test = texts[:60], texts[60:90]
    assert hf_stitch.compare(reads, b, test, rows="positions", progress=False)["linear_cka"].shape == (3, 3)
    grid = hf_stitch.stitch_grid(
        a, b, train, layers_a=[LAYER["llama"]], layers_b=[LAYER["gpt2"]], matchers=["ridge"], test_data=test,
        align="prefix", own=True, progress=False,
    )  # fmt: skip
    assert grid.recipe["align"] == "prefix" and grid.recipe["own"] is True
    cell = grid.stitched(LAYER["llama"], LAYER["gpt2"])
    options: dict[str, Any] = {"test_data": test, "matcher": "ridge", "align": "prefix", "progress": False, **layers}
    models = [hf_stitch.stitch(a, b, train, own=own, **options) for own in (True, False)]
    wanted = models[0].evaluation["perplexity"].value
    assert torch.equal(cell.stitch.body.weight, models[0].stitch.body.weight)
    with torch.no_grad():
        assert torch.equal(cell(**cell.preprocess(test[:3])).logits, models[0](**cell.preprocess(test[:3])).logits)
    assert grid.values("ridge", "perplexity")[0, 0] == pytest.approx(wanted, rel=1e-4)
    trained = TaskLoss(epochs=1).fit(models, train, progress=False)  # activations of both differ in width
    assert [each.body.in_features for each in trained] == [28, 16]
    audit = hf_stitch.audit(
        models[0], test, train_data=train, far_data=[text[::-1] for text in test], detectors=["knn"], progress=False
    )
    assert audit.evaluation["perplexity"].value == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("pair", BOTH)
def test_scores(pair: tuple[str, str], models: Any) -> None:
    """Bits per character are those of the text after the first token, for each network on its own tokens."""
    model, (a, b) = models[pair], pair
    texts = [f"{text} Then: {text}" for text in SENTENCES[1::9]]
    found = hf_stitch.evaluate(model, texts, progress=False)
    for name, adapter in (("source", decoder(a)), ("target", decoder(b))):
        bits, characters = 0.0, 0
        for text in texts:
            inputs = adapter.preprocess([text], offsets=True)
            spans = inputs.pop("offset_mapping")[0, 1:]
            logits = adapter.forward(inputs).logits[0, :-1].detach().log_softmax(-1)
            bits -= float(logits.gather(1, inputs["input_ids"][0, 1:, None]).sum()) / np.log(2)
            characters += len(text[int(spans[:, 0].min()) : int(spans[:, 1].max())])
        assert found.scores[name]["bits_per_character"].value == pytest.approx(bits / characters, rel=1e-6)
    assert np.isnan(found.scores["source"]["perplexity"].value)
    assert ("own" in model.evaluation.scores) == (a == "gpt2")
    assert "nan" not in finding(found, "perplexity") and "for source" in finding(found, "bits_per_byte")


SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip


def family(name: str, **options: Any) -> hf_stitch.Adapter:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vocab_size=len(fine()), **SIZES, **options)
    return hf_stitch.load(getattr(transformers, f"{name}ForCausalLM")(config).eval(), processor=fine())


@pytest.mark.parametrize("name", ["GPTNeoX", "Gemma"])
def test_other_families(name: str) -> None:
    options: dict[str, Any] = {} if name == "GPTNeoX" else {"num_key_value_heads": 1, "head_dim": 8}
    a, b = family(name, **options), decoder("gpt2", torch.float32)
    for source, target in ((a, b), (b, a)):
        model = stitched(source, target, SENTENCES[:40], (source.layers[0], target.layers[0]), align="prefix", own=True)
        inputs = model.preprocess(["The walker is walk"])
        options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
        cached, plain = (model.generate(**inputs, **options, use_cache=use) for use in (True, False))
        assert torch.equal(cached, plain)


WINDOW_OF_A_LAYER = {"sliding_window": 64, "per_layer_config": {0: {"sliding_window": None}}}
"""A window that a whole config of transformers 5.23 and later has no value for."""
ONE_HEAD = {"num_key_value_heads": 1}
BRANCHLESS: list[Any] = [
    ("Mistral", {"sliding_window": 64, **ONE_HEAD}, "requires special masks (sliding_window)"),
    ("Mistral", {**ONE_HEAD, **WINDOW_OF_A_LAYER}, "requires special masks (sliding_window)"),
    ("Falcon", {"alibi": True}, "accepts a mask of queries by keys; FalconForCausalLM raised"),
    ("Mamba", {}, "requires special masks ("),
    ("Bloom", {"n_head": 2}, "accepts position_ids, got BloomForCausalLM"),
    ("Gemma2", {**ONE_HEAD, "head_dim": 8}, "requires special masks (sliding_attention)"),
]


@pytest.mark.parametrize(("name", "options", "message"), BRANCHLESS)
def test_decoders_that_cannot_run_branches_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        PrefixAdapter(family(name, **options), decoder("gpt2", torch.float32))


def test_tokens_that_a_tokenizer_appends_are_dropped() -> None:
    closed = copy.deepcopy(fine())
    closed.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <end>", special_tokens=[("<end>", 1)]
    )
    ids = coarse()(SENTENCES[:3], padding=True, return_tensors="pt")["input_ids"]
    one, other = (reader(each, coarse()).read(ids) for each in (fine(), closed))
    assert all(torch.equal(value, other.to_inputs()[name]) for name, value in one.to_inputs().items())


# -- refusals ----------------------------------------------------------------------------------------------------------


def stitch(data: Any = SENTENCES, **options: Any) -> Any:
    ends = {"source_layer": LAYER["llama"], "target_layer": LAYER["gpt2"]}
    return hf_stitch.stitch(decoder("llama"), decoder("gpt2"), data, **ends, progress=False, **options)


def a_long_text() -> Any:
    ids = [*map(str, range(len(SENTENCES))), "the long one"]
    return stitch(hf_stitch.Samples.of([*SENTENCES, "to the blacksmith’s " * 30], id=ids), align="prefix")


def an_encoder() -> Any:
    config = transformers.BertConfig(
        vocab_size=len(fine()), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        initializer_range=0.3,
    )  # fmt: skip
    return PrefixAdapter(hf_stitch.load(transformers.BertModel(config).eval(), processor=fine()), decoder("gpt2"))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no alignment": (stitch, "use align='prefix'"),
    "an unknown one": (partial(stitch, align="words"), "align must be one of 'tokens', 'prefix', got 'words'"),
    "own without it": (partial(stitch, own=True), "own=True requires align='prefix'"),
    "a long text": (a_long_text, r"'the long one' must have at most 256 tokens .*, got 30\d"),
    "paired texts": (partial(stitch, paired_data=SENTENCES, align="prefix"), "remove paired_data"),
    "an encoder": (an_encoder, "not a decoder"),
    "images": (lambda: PrefixAdapter(network("vit"), decoder("gpt2")), r"texts, got image \(source\)"),
    "a short limit": (
        lambda: PrefixReader(fine().backend_tokenizer, coarse().backend_tokenizer, 1, 5).read(
            decoder("gpt2").preprocess(SENTENCES[:1])["input_ids"]
        ),
        "at most 5 tokens in the tokenizer of the source",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused(case: str) -> None:
    job, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        job()


def test_what_a_model_with_two_tokenizers_refuses(models: Any) -> None:
    model = models[BOTH[0]]
    inputs = model.preprocess(SENTENCES[:1])
    for option in (
        {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 4}, {"assistant_model": model},
        {"assistant_early_exit": 1}, {"use_mtp": True},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="is not supported for networks with different tokenizers"):
            model.generate(**inputs, max_new_tokens=3, **option)
    with pytest.raises(ValueError, match="cannot be cut again"):
        _ = hf_stitch.load(model).layers
    with pytest.raises(ValueError, match="must not be a stitched model"):
        PrefixAdapter(hf_stitch.load(model), decoder("gpt2"))
    with torch.no_grad():
        cache = model(**inputs, use_cache=True)[NAME]
        with pytest.raises(ValueError, match="a cache does not contain the text"):
            model(input_ids=inputs["input_ids"][:, :1], **{NAME: cache})
