"""Generation with stitched language models, with and without a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_stitch
from hf_stitch import StitchedModelForCausalLM
from hf_stitch.artefacts.cache import decoder_layers, shown

from tiny_networks import LAYERS, TEXT, adapted, build, network  # isort: skip

PAIRS = [("gpt2", "gpt2"), ("llama", "llama"), ("gpt2", "llama"), ("llama", "gpt2")]
GREEDY = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "eos_token_id": None}


def stitched(a: Any, b: Any, data: Any, layers: tuple[str, str], **options: Any) -> Any:
    options = {"matcher": "ridge", "task": "text-generation", **options}
    return hf_stitch.stitch(a, b, data, source_layer=layers[0], target_layer=layers[1], progress=False, **options)


def generated(model: Any, tokens: int = 8, **options: Any) -> Any:
    prompt = {} if "input_ids" in options else {"input_ids": torch.tensor([[7, 12, 30, 9]])}
    return model.generate(**prompt, max_new_tokens=tokens, **{**GREEDY, **options})


def prompts(adapter: Any, texts: list[str], side: str = "left") -> dict[str, torch.Tensor]:
    found = adapter.processor(texts, padding=True, padding_side=side, return_tensors="pt")
    return {name: found[name] for name in ("input_ids", "attention_mask")}


@pytest.fixture(params=PAIRS, ids="-".join)
def model(request: Any, net: Any, texts: Any) -> StitchedModelForCausalLM:
    source, target = request.param
    return stitched(net(source), net(target, 1), texts, (LAYERS[source], LAYERS[target]))


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_identity_stitch_generates_the_same_as_the_network(family: str, layer: int, net: Any, texts: Any) -> None:
    """Bitwise equal; after the last block the target has no attention layers and no cache."""
    a = net(family)
    cut = a.layers[layer]
    model = stitched(a, a, texts, (cut, cut), matcher="identity")
    for batch in ({}, prompts(a, ["w1 w2 w3 w4 w5 w6", "w7 w8"])):
        expected, got = generated(a.model, **batch), generated(model, **batch)
        assert torch.equal(got.sequences, expected.sequences)
        assert all(torch.equal(x, y) for x, y in zip(got.logits, expected.logits, strict=True))


def test_the_cache_changes_nothing(model: StitchedModelForCausalLM) -> None:
    with_cache, without = generated(model), generated(model, use_cache=False)
    assert torch.equal(with_cache.sequences, without.sequences)
    for x, y in zip(with_cache.logits, without.logits, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    torch.manual_seed(0)
    drawn = generated(model, do_sample=True).sequences
    torch.manual_seed(0)
    assert torch.equal(generated(model, do_sample=True, use_cache=False).sequences, drawn)


def test_a_batch_padded_on_the_left_equals_single_texts(model: StitchedModelForCausalLM, net: Any) -> None:
    texts = ["w1 w2 w3 w4 w5 w6", "w7 w8 w9"]
    batch = generated(model, **prompts(model, texts))
    for index, text in enumerate(texts):
        alone = generated(model, **prompts(model, [text]))
        assert torch.equal(batch.sequences[index, -8:], alone.sequences[0, -8:])
        for x, y in zip(batch.logits, alone.logits, strict=True):
            torch.testing.assert_close(x[index], y[0], rtol=1e-5, atol=1e-6)


def test_beams_static_caches_and_chunks(model: StitchedModelForCausalLM) -> None:
    expected = generated(model).sequences
    assert torch.equal(generated(model, cache_implementation="static").sequences, expected)
    assert torch.equal(generated(model, past_key_values=transformers.DynamicCache()).sequences, expected)
    beams = generated(model, num_beams=3, tokens=5).sequences
    assert torch.equal(generated(model, num_beams=3, tokens=5, use_cache=False).sequences, beams)


def test_the_cache_contains_the_layers_of_both_halves(model: StitchedModelForCausalLM) -> None:
    """The first layer of the back half is not the first layer of the target network."""
    ids = torch.tensor([[7, 12, 30, 9]])
    with torch.no_grad():
        first = model(input_ids=ids, use_cache=True)
        assert len(first.past_key_values) == model.config.num_hidden_layers == 3
        assert [layer.get_seq_length() for layer in first.past_key_values.layers] == [4, 4, 4]
        second = model(input_ids=torch.tensor([[5]]), past_key_values=first.past_key_values)
        assert second.past_key_values.get_seq_length() == 5
        whole = model(input_ids=torch.cat([ids, torch.tensor([[5]])], 1))
    assert whole.past_key_values is None
    torch.testing.assert_close(second.logits[:, -1], whole.logits[:, -1], rtol=1e-5, atol=1e-6)


def test_each_half_receives_the_cache_in_its_own_numbering() -> None:
    """The target must not receive the length of the source's layers, which already include the new tokens."""
    cache = transformers.DynamicCache()
    source, target = shown(cache, 0, (0, 1)), shown(cache, 2, (3, 4))
    assert source is not None and target is not None
    new = torch.zeros(1, 1, 6, 2)
    for layer in (0, 1):
        source.update(new, new, layer)
    assert (cache.get_seq_length(), source.get_seq_length(), target.get_seq_length()) == (6, 6, 0)
    assert target.get_mask_sizes(6, 0) == (6, 0)
    for layer in (3, 4):
        target.update(new, new, layer)
    assert [layer.get_seq_length() for layer in cache.layers] == [6, 6, 6, 6]
    assert shown(cache, 4, ()) is None


def test_sliding_windows(texts: Any) -> None:
    """Beyond the window, the output is bitwise equal to that of the network, which keeps only part of the past."""
    torch.manual_seed(0)
    config = {**TEXT, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    nets = [transformers.MistralForCausalLM(transformers.MistralConfig(**config, sliding_window=w)) for w in (4, 6)]
    a, b = (adapted("llama", net.eval()) for net in nets)
    same = stitched(a, a, texts, (LAYERS["llama"],) * 2, matcher="identity")
    expected, got = generated(a.model), generated(same)
    assert same.config.layer_types == ["sliding_attention"] * 3
    assert all(torch.equal(x, y) for x, y in zip(got.logits, expected.logits, strict=True))
    other = stitched(a, b, texts, (LAYERS["llama"],) * 2)
    assert other.config.layer_types == ["full_attention"] * 3  # two different windows: the whole past is kept
    assert torch.equal(generated(other).sequences, generated(other, use_cache=False).sequences)


def test_a_network_that_computes_with_the_number_of_a_layer(texts: Any) -> None:
    config = transformers.GPT2Config(
        n_embd=24, n_layer=3, n_head=4, vocab_size=80, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True,
    )  # fmt: skip
    torch.manual_seed(0)
    a = adapted("gpt2", transformers.GPT2LMHeadModel(config).eval())
    model = stitched(a, a, texts, ("transformer.h.0",) * 2, matcher="identity")
    expected, got = generated(a.model), generated(model)
    assert all(torch.equal(x, y) for x, y in zip(got.logits, expected.logits, strict=True))


@pytest.mark.parametrize("source", ["t5", "bert"])
def test_a_source_that_attends_to_the_whole_text_generates_without_a_cache(source: str, net: Any, texts: Any) -> None:
    model = stitched(net(source), net("llama", 1), texts, (LAYERS[source], LAYERS["llama"]))
    assert decoder_layers(model.source.model) is None
    out = generated(model)
    assert out.past_key_values is None
    with torch.no_grad():
        again = model(input_ids=out.sequences[:, :-1]).logits[:, -1]
    torch.testing.assert_close(out.logits[-1], again)
    with pytest.raises(ValueError, match="attends to the whole text or has no cache: pass use_cache=False"):
        model(input_ids=torch.tensor([[5, 6]]), use_cache=True)


def test_the_generation_config_is_saved(net: Any, texts: Any, tmp_path: Path) -> None:
    a = network("gpt2")
    b = adapted("llama", build("llama", 1))
    b.model.generation_config.max_new_tokens, b.model.generation_config.eos_token_id = 3, [2, 11]
    model = stitched(a, b, texts, (LAYERS["gpt2"], LAYERS["llama"]))
    assert model.generation_config is not b.model.generation_config
    model.save_pretrained(tmp_path)
    again = StitchedModelForCausalLM.from_pretrained(tmp_path)
    assert again.generation_config.eos_token_id == [2, 11]
    ids = torch.tensor([[7, 12, 30, 9]])
    assert torch.equal(again.generate(ids, do_sample=False), model.generate(ids, do_sample=False))
    assert again.generate(ids, do_sample=False).shape[1] <= 7
    assert (again.config.num_hidden_layers, again.config.vocab_size) == (3, 80)


def test_logits_of_the_last_tokens_and_tuples(model: StitchedModelForCausalLM) -> None:
    ids = torch.tensor([[7, 12, 30, 9]])
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        torch.testing.assert_close(model(input_ids=ids, logits_to_keep=2).logits, whole[:, -2:])
        (first,) = model(input_ids=ids, return_dict=False)
    assert torch.equal(first, whole)


def test_requests_for_hidden_states_are_rejected(model: StitchedModelForCausalLM) -> None:
    for name in ("output_hidden_states", "output_attentions"):
        with pytest.raises(ValueError, match=f"takes no {name}=True; representations at any layer .*encode"):
            generated(model, **{name: True})
