"""Hidden states, attentions and embeddings of stitched models, as those of any model of transformers."""

from __future__ import annotations

import copy
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_stitch import StitchedModel

from tiny_networks import LAYERS, stitched  # isort: skip

ASKED = {"output_hidden_states": True, "output_attentions": True}
FAMILIES = ("bert", "gpt2", "llama", "vit")


def model_of(net: Any, data: Any, source: str, target: str, matcher: str = "lstsq") -> StitchedModel:
    """Stitch one network, or two with other weights, with eager attention, which gives its weights."""
    a, b = net(source), net(target, 0 if matcher == "identity" else 1)
    model: StitchedModel = stitched(a, b, data, (LAYERS[source], LAYERS[target]), matcher=matcher)
    model.set_attn_implementation("eager")
    return model


def inputs_of(model: StitchedModel, data: Any) -> dict[str, Any]:
    return model.preprocess([sample.get("image", sample.get("text")) for sample in data[:5]])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_network_stitched_to_itself_gives_both_hidden_states(family: str, net: Any, images: Any, texts: Any) -> None:
    data = images if family == "vit" else texts
    model = model_of(net, data, family, family, "identity")
    inputs = inputs_of(model, data)
    network: Any = copy.deepcopy(net(family).model)
    network.set_attn_implementation("eager")
    with torch.no_grad():
        expected, found = network(**inputs, **ASKED), model(**inputs, **ASKED)
    cut = int(model.source.cut.layer.rpartition(".")[2]) + 1
    assert torch.equal(found.hidden_states[cut], found.hidden_states[cut + 1])
    real = inputs.get("attention_mask", torch.ones(5, found.hidden_states[0].shape[1])).bool()
    mine = (*found.hidden_states[:cut], *found.hidden_states[cut + 1 :])
    for value, wanted in zip(mine, expected.hidden_states, strict=True):
        torch.testing.assert_close(value[real], wanted[real])
    for value, wanted in zip(found.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(value, wanted)


@pytest.mark.parametrize(("source", "target"), [("bert", "bert"), ("gpt2", "llama"), ("vit", "vit")])
def test_both_halves_show_what_ran(source: str, target: str, net: Any, images: Any, texts: Any) -> None:
    data = images if source == "vit" else texts
    model = model_of(net, data, source, target)
    inputs = inputs_of(model, data)
    found = model(**inputs, **ASKED)
    count = model.config.num_hidden_layers + (1 if model.can_generate() else 0)
    assert len(found.hidden_states) == count + 1 and len(found.attentions) == count - 1
    cut = int(model.source.cut.layer.rpartition(".")[2]) + 1
    assert torch.equal(found.hidden_states[cut + 1], model.target.cut.restore(model.transfer(**inputs).values))
    first = found.hidden_states[0]
    first.retain_grad()
    found.attentions[0].retain_grad()
    found.logits.sum().backward()
    assert first.grad is not None and found.attentions[0].grad is not None
    assert torch.equal(model(**inputs).logits, found.logits)
    some = model(**inputs, output_hidden_states=[1, -1]).hidden_states
    assert [i for i, value in enumerate(some) if value is not None] == [1, count]
    assert torch.equal(some[1], found.hidden_states[1]) and torch.equal(some[-1], found.hidden_states[-1])
    with pytest.raises(ValueError, match=rf"names \[99\], but there are {count + 1} hidden states"):
        model(**inputs, output_hidden_states=[99])
    model.config.output_hidden_states = True
    assert len(model(**inputs).hidden_states) == count + 1
    assert len(model(**inputs, output_hidden_states=False).to_tuple()) == 1
    *_, hidden = model(**inputs, return_dict=False)
    assert len(hidden) == count + 1


def test_the_base_of_a_language_model_gives_what_its_last_layer_reads(net: Any, texts: Any) -> None:
    model = model_of(net, texts, "gpt2", "llama")
    inputs = inputs_of(model, texts)
    head, logits = model.get_output_embeddings(), model(**inputs).logits
    model.config.return_dict = False  # as for an exporter
    assert torch.equal(head(model.base_model(**inputs).last_hidden_state), logits)
    head.weight.data[0] = torch.nan
    assert model.base_model(**inputs).last_hidden_state.isfinite().all()
    forward = type(model.target.model).forward

    def scaled(self: Any, *args: Any, **options: Any) -> Any:
        found = forward(self, *args, **options)
        found["logits"] = 2 * found["logits"]
        return found

    model.target.model.forward = types.MethodType(scaled, model.target.model)
    with pytest.raises(ValueError, match="scales or caps the outputs"):
        model.base_model(**inputs)


def test_a_half_without_hidden_states_is_named(of_images: StitchedModel, images: Any) -> None:
    with pytest.raises(ValueError, match=r"cut at .* does not return hidden_states .*encode"):
        of_images(**inputs_of(of_images, images), output_hidden_states=True)


@pytest.mark.parametrize(("source", "target"), [("bert", "bert"), ("gpt2", "llama")])
def test_embeddings_take_the_place_of_tokens_and_are_resized_and_saved(
    source: str, target: str, net: Any, texts: Any, tmp_path: Path
) -> None:
    model = model_of(net, texts, source, target)
    inputs = inputs_of(model, texts)
    ids, words = inputs["input_ids"], model.config.vocab_size
    with torch.no_grad():
        before = model(**inputs).logits
        embedded = {**inputs, "input_ids": None, "inputs_embeds": model.get_input_embeddings()(ids)}
        assert torch.equal(model(**embedded).logits, before)
        resized = model.resize_token_embeddings(words + 7, mean_resizing=False)
        found = model(**inputs).logits
    assert resized is model.get_input_embeddings() and resized.num_embeddings == model.config.vocab_size == words + 7
    assert torch.equal(found[..., : before.shape[-1]], before)
    assert found.shape[-1] == before.shape[-1] + (7 if target == "llama" else 0)
    model.save_pretrained(tmp_path)
    again, told = StitchedModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told.values()) and again.config.vocab_size == words + 7
    with torch.no_grad():
        torch.testing.assert_close(again(**inputs).logits, found)  # another attention
