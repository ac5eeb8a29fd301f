"""Stitching of two text networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_stitch
from hf_stitch import StitchedModelForCausalLM

from tiny_networks import BODY, LAYERS, TEXT, adapted, build, plain_tokenizer, stitched  # isort: skip


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize(
    ("source", "target", "pooling"),
    [("roberta", "bert", "cls"), ("bert", "roberta", "last"), ("gpt2", "llama", "none"), ("t5", "bert", "none")],
)
def test_output_equals_encode_stitch_decode(
    source: str, target: str, pooling: str, padding: str, net: Any, inputs: Any, texts: Any
) -> None:
    a, b, layers = net(source), net(target, 1), (LAYERS[source], LAYERS[target])
    model = stitched(a, b, texts, layers, pooling=pooling)
    batch = inputs(a, padding)
    with torch.no_grad():
        expected = b.decode(model.stitch(a.encode(batch, layers[0])[layers[0]]), layers[1]).logits
        assert torch.equal(model(**batch).logits, expected)


def test_a_language_model(net: Any, inputs: Any, texts: Any) -> None:
    a = net("gpt2")
    model = stitched(a, net("llama", 1), texts, (LAYERS["gpt2"], LAYERS["llama"]))
    assert isinstance(model, StitchedModelForCausalLM)
    batch = inputs(a)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    output = model(**batch, labels=labels)
    by_hand = []
    for logits, row in zip(output.logits.log_softmax(-1), labels, strict=True):
        by_hand += [-logits[i, row[i + 1]] for i in range(len(row) - 1) if row[i + 1] != -100]
    torch.testing.assert_close(output.loss, torch.stack(by_hand).mean())
    assert model.evaluation["perplexity"].value > 1


def test_a_language_model_whose_name_does_not_tell(texts: Any, tmp_path: Path) -> None:
    """Gemma 3 with images generates texts too: the task that loads it is its task."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config={**TEXT, **heads, "pad_token_id": 0, "eos_token_id": 1},
        vision_config={**BODY, "image_size": 8, "patch_size": 4},
        mm_tokens_per_image=4, image_token_index=5, boi_token_index=6, eoi_token_index=7,
    )  # fmt: skip
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    a = hf_stitch.load(str(tmp_path), task="text-generation", processor=plain_tokenizer())
    assert (type(a.model).__name__, a.task) == ("Gemma3ForConditionalGeneration", "text-generation")
    model = stitched(a, a, texts, (a.layers[0],) * 2, matcher="identity")
    inputs = model.preprocess(["w1 w2 w3"])
    options: Any = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    wanted = a.model.generate(**inputs, **options)
    for use_cache in (True, False):
        assert torch.equal(model.generate(**inputs, **options, use_cache=use_cache), wanted)


def test_texts_that_do_not_correspond_are_refused(net: Any, texts: Any) -> None:
    """Two tokenizers: tests/newcomers/test_dead_ends.py."""
    layers, padded_left = (LAYERS["gpt2"], LAYERS["llama"]), adapted("llama", build("llama", 1))
    padded_left.processor.padding_side = "left"
    with pytest.raises(ValueError, match="split or pad texts differently"):
        stitched(net("gpt2"), padded_left, texts, layers)
    with pytest.raises(ValueError, match=r"keeps one token per text, but text-generation .*; use pooling='none'"):
        stitched(net("gpt2"), net("llama", 1), texts, layers, pooling="mean")
