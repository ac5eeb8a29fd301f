"""Stitching of two text networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_stitch
from hf_stitch import StitchedModelForCausalLM, StitchedModelForSequenceClassification

from tiny_networks import BODY, LAYERS, TEXT, adapted, build, plain_tokenizer, stitched  # isort: skip

ROBERTA_BERT = (LAYERS["roberta"], LAYERS["bert"])
GPT2_LLAMA = (LAYERS["gpt2"], LAYERS["llama"])


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize(
    ("source", "target", "pooling"),
    [
        ("roberta", "bert", "mean"),
        ("roberta", "bert", "cls"),
        ("bert", "roberta", "last"),
        ("gpt2", "llama", "none"),
        ("t5", "bert", "none"),
    ],
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


@pytest.mark.parametrize(("source", "target", "pooling"), [("roberta", "bert", "mean"), ("gpt2", "llama", "none")])
def test_content_and_length_of_padding_do_not_matter(
    source: str, target: str, pooling: str, net: Any, inputs: Any, texts: Any
) -> None:
    a = net(source)
    model = stitched(a, net(target, 1), texts, (LAYERS[source], LAYERS[target]), pooling=pooling)
    batch = inputs(a)
    mask = batch["attention_mask"].bool()
    other = {**batch, "input_ids": batch["input_ids"].masked_fill(~mask, 9)}
    longer = {name: torch.nn.functional.pad(value, (0, 3)) for name, value in batch.items()}
    if source == "roberta":  # its positions depend on the padding id
        other, longer["input_ids"][:, -3:] = batch, a.interface.pad_id
    with torch.no_grad():
        expected, got, long = (model(**given).logits for given in (batch, other, longer))
    if pooling == "none":
        expected, got, long = expected[mask], got[mask], long[:, :-3][mask]
    assert torch.equal(got, expected)
    torch.testing.assert_close(long, expected, rtol=1e-5, atol=1e-6)


def test_a_classifier_of_texts(net: Any, inputs: Any, texts: Any) -> None:
    a, b = net("roberta"), net("bert", 1)
    model = stitched(a, b, texts, ROBERTA_BERT, pooling="mean")
    assert isinstance(model, StitchedModelForSequenceClassification)
    assert (model.config.num_labels, model.main_input_name) == (3, "input_ids")
    batch, labels = inputs(a), torch.tensor([0, 1, 2, 0, 1])
    output = model(**batch, labels=labels)
    torch.testing.assert_close(output.loss, torch.nn.functional.cross_entropy(output.logits, labels))
    sizes = [sum(p.numel() for p in part.parameters()) for part in (model, a.model, b.model)]
    assert sizes[0] < sizes[1] + sizes[2]


def test_a_language_model(net: Any, inputs: Any, texts: Any) -> None:
    a = net("gpt2")
    model = stitched(a, net("llama", 1), texts, GPT2_LLAMA)
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


def test_the_processor_is_that_of_the_source(net: Any, texts: Any) -> None:
    a, samples = net("roberta"), [sample["text"] for sample in texts[:4]]
    model = stitched(a, net("bert", 1), texts, ROBERTA_BERT, pooling="mean")
    for name, value in a.preprocess(samples).items():
        assert torch.equal(model.preprocess(samples)[name], value)


def test_tokens_of_two_tokenizers_do_not_correspond(net: Any, texts: Any) -> None:
    with pytest.raises(ValueError, match=r"two tokenizers differ.* use pooling='mean', 'cls' or 'last'"):
        stitched(net("roberta"), net("bert", 1), texts, ROBERTA_BERT)


def test_tokenizers_that_pad_on_different_sides_are_rejected(net: Any, texts: Any) -> None:
    left = adapted("llama", build("llama", 1))
    left.processor.padding_side = "left"
    with pytest.raises(ValueError, match="split or pad texts differently"):
        stitched(net("gpt2"), left, texts, GPT2_LLAMA)


def test_a_pooled_stitch_into_a_language_model_is_rejected(net: Any, texts: Any) -> None:
    with pytest.raises(ValueError, match=r"leaves one token per text, and text-generation .*: use pooling='none'"):
        stitched(net("gpt2"), net("llama", 1), texts, GPT2_LLAMA, pooling="mean")


def test_paired_texts_correspond_by_their_ids(net: Any, texts: Any) -> None:
    a, b = net("roberta"), net("bert", 1)
    other = [sample["text"].upper() for sample in texts]
    model = stitched(a, b, texts, ROBERTA_BERT, pooling="mean", paired_data=other)
    assert model.stitch.body.fitted["n"] == 64
    with pytest.raises(ValueError, match=r"differ first at place 79: id 79 and no more samples"):
        stitched(a, b, texts, ROBERTA_BERT, pooling="mean", paired_data=other[:-1])
