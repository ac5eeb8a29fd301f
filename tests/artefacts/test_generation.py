"""Generation with stitched language models, with and without a cache."""

from __future__ import annotations

import copy
import inspect
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicLayer

import hf_stitch
from hf_stitch import StitchedModelForCausalLM
from hf_stitch.artefacts.cache import NAME, NAMES, cache_argument, shown
from hf_stitch.artefacts.joining import join
from hf_stitch.stitches import IdentityStitch, LinearStitch, StitchingLayer

from records import rewrite  # isort: skip
import tiny_networks  # isort: skip
from tiny_networks import LAYERS, TEXT, adapted, build, network  # isort: skip

PAIRS = [
    pytest.param(("gpt2", "gpt2"), marks=pytest.mark.slow),
    pytest.param(("llama", "llama"), marks=pytest.mark.slow),
    ("gpt2", "llama"),
    ("llama", "gpt2"),
]
"""A network on both sides takes the same ways as in the mixed pairs."""
stitched = partial(tiny_networks.stitched, task="text-generation")
GREEDY = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "eos_token_id": None}


def generated(model: Any, tokens: int = 8, **options: Any) -> Any:
    prompt = {} if "input_ids" in options else {"input_ids": torch.tensor([[7, 12, 30, 9]])}
    return model.generate(**prompt, max_new_tokens=tokens, **{**GREEDY, **options})


def prompts(adapter: Any, texts: list[str], side: str = "left") -> dict[str, torch.Tensor]:
    found = adapter.processor(texts, padding=True, padding_side=side, return_tensors="pt")
    return {name: found[name] for name in ("input_ids", "attention_mask")}


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def made(request: Any, net: Any, texts: Any) -> StitchedModelForCausalLM:
    """A stitched model, which no test changes."""
    source, target = request.param
    return stitched(net(source), net(target, 1), texts, (LAYERS[source], LAYERS[target]))


@pytest.fixture
def model(made: StitchedModelForCausalLM) -> StitchedModelForCausalLM:
    return copy.deepcopy(made)


@pytest.mark.parametrize("layer", [pytest.param(0, marks=pytest.mark.slow), 1, 2])
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


WAYS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "top_p": 0.9},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "static cache": {"cache_implementation": "static"},
    "processors": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_identity_stitch_generates_in_every_way_as_the_network(way: str, net: Any, texts: Any) -> None:
    a = net("llama")
    network, model = copy.deepcopy(a.model), stitched(a, a, texts, (a.layers[1],) * 2, matcher="identity")
    one_text = "prompt_lookup_num_tokens" in WAYS[way]
    batch = prompts(a, ["w1 w2 w3 w4 w5 w6", "w7 w8"][: 1 if one_text else 2])
    found = []
    for each in (network, model):
        torch.manual_seed(0)
        found.append(generated(each, **batch, **WAYS[way]).sequences)
    assert torch.equal(*found)


def test_the_cache_changes_nothing(model: StitchedModelForCausalLM) -> None:
    with_cache, without = generated(model), generated(model, use_cache=False)
    assert with_cache[NAME].get_seq_length() == 11 and model.uncached is None
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


def test_beams_static_caches_and_assistants(model: StitchedModelForCausalLM, net: Any) -> None:
    assistant = copy.deepcopy(net("llama").model)  # generation sets options in it
    expected = generated(model).sequences
    assert torch.equal(generated(model, cache_implementation="static").sequences, expected)
    assert torch.equal(generated(model, **{NAME: transformers.DynamicCache()}).sequences, expected)
    assert torch.equal(generated(model, prompt_lookup_num_tokens=2, eos_token_id=-1).sequences, expected)
    assert torch.equal(generated(model, assistant_model=assistant).sequences, expected)
    beams = generated(model, num_beams=3, tokens=5).sequences
    assert torch.equal(generated(model, num_beams=3, tokens=5, use_cache=False).sequences, beams)


@pytest.mark.parametrize("heads", [2, 8])
def test_a_static_cache_of_halves_with_unlike_heads(heads: int) -> None:
    """3 heads of 8 features before ``heads`` of 4: each layer takes its own; what was made for others is refused."""
    torch.manual_seed(0)
    text = {"vocab_size": 80, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(n_positions=32, n_embd=24, n_layer=3, n_head=3, **text)
    a = hf_stitch.load(transformers.GPT2LMHeadModel(config).eval())
    other = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=heads,
        max_position_embeddings=32, **text,
    )  # fmt: skip
    b = hf_stitch.load(transformers.LlamaForCausalLM(other).eval())
    la, lb = "transformer.h.0", "model.layers.1"
    layer = StitchingLayer(a.spec(la), b.spec(lb), "none", LinearStitch(24, 32))
    model = join(a, la, layer, b, lb, task="text-generation")
    assert isinstance(model, StitchedModelForCausalLM)
    expected = generated(model, use_cache=False).sequences
    for way in ({}, {"prefill_chunk_size": 2}):
        static = generated(model, cache_implementation="static", disable_compile=True, **way)
        assert torch.equal(static.sequences, expected), way
    ids = torch.tensor([[7, 12, 30, 9]])

    def made(*shape: Any) -> Any:
        cache = transformers.StaticCache(config=model.config, max_cache_len=8)
        cache.early_initialization(1, *shape, dtype=torch.float32, device=torch.device("cpu"))
        return cache

    refused = made(heads, 4)
    with pytest.raises(ValueError, match=r"layer 0 of the cache .* 4 features, but .* 3 of 8: .*num_heads=\[3, "):
        model(input_ids=ids, **{NAME: refused})
    assert not any(layer.get_seq_length() for layer in refused.layers)  # nothing ran
    with torch.no_grad():
        found = model(input_ids=ids, **{NAME: made([3, heads], [8, 4])}).logits
        torch.testing.assert_close(found, model(input_ids=ids).logits, rtol=1e-5, atol=1e-6)


def test_the_cache_contains_the_layers_of_both_halves(model: StitchedModelForCausalLM) -> None:
    """The first layer of the back half is not the first layer of the target network."""
    ids = torch.tensor([[7, 12, 30, 9]])
    with torch.no_grad():
        first = model(input_ids=ids, use_cache=True)
        assert len(first[NAME]) == model.config.num_hidden_layers == 3
        assert [layer.get_seq_length() for layer in first[NAME].layers] == [4, 4, 4]
        second = model(input_ids=torch.tensor([[5]]), **{NAME: first[NAME]})
        assert second[NAME].get_seq_length() == 5
        whole = model(input_ids=torch.cat([ids, torch.tensor([[5]])], 1))
    assert whole.get(NAME) is None
    torch.testing.assert_close(second.logits[:, -1], whole.logits[:, -1], rtol=1e-5, atol=1e-6)


def test_each_half_receives_the_cache_in_its_own_numbering() -> None:
    """The target must not receive the length of the source's layers, which already include the new tokens."""
    cache = transformers.DynamicCache()
    cache.layers.extend(DynamicLayer() for _ in range(4))
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


WHOLE = ["t5", pytest.param("bert", marks=pytest.mark.slow), "roberta"]
"""Families of encoders."""


@pytest.fixture(params=WHOLE)
def encoder(request: Any, net: Any) -> hf_stitch.Adapter:
    """Each has the tokenizer of the decoders, RoBERTa too."""
    if request.param != "roberta":
        return net(request.param)
    torch.manual_seed(0)
    config = transformers.RobertaConfig(**TEXT, pad_token_id=0, max_position_embeddings=64)
    return adapted("bert", transformers.RobertaModel(config).eval())


def test_a_source_that_attends_to_the_whole_text_generates_without_a_cache(
    encoder: hf_stitch.Adapter, net: Any, texts: Any
) -> None:
    model = stitched(encoder, net("llama", 1), texts, (encoder.layers[1], LAYERS["llama"]))
    why = "takes no cache|a network attends to later tokens"
    with pytest.warns(UserWarning, match=rf"each token takes a run over the whole text, because .*({why})"):
        out = generated(model)
    assert out.get(NAME) is None
    with torch.no_grad():
        again = model(input_ids=out.sequences[:, :-1]).logits[:, -1]
    torch.testing.assert_close(out.logits[-1], again)
    for run in (model, model.generate):
        with pytest.raises(ValueError, match=r"this model has no cache, because .*: pass use_cache=False"):
            run(input_ids=torch.tensor([[5, 6]]), use_cache=True)


@pytest.mark.filterwarnings("ignore:each token takes a run")
@pytest.mark.parametrize("target", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def test_a_left_padded_batch_continues_as_each_text_alone_after_an_encoder(
    encoder: hf_stitch.Adapter, target: str, net: Any, texts: Any
) -> None:
    """RoBERTa numbers positions from its padding itself, for the others they come from the mask."""
    model = stitched(encoder, net(target, 1), texts, (encoder.layers[1], LAYERS[target]))
    continues_as_each_text_alone(model)


def test_a_left_padded_batch_continues_as_each_text_alone_without_a_cache(model: StitchedModelForCausalLM) -> None:
    continues_as_each_text_alone(model)


def continues_as_each_text_alone(model: Any) -> None:
    both = ["w1 w2 w3 w4 w5 w6", "w7 w8 w9"]
    found = generated(model, **prompts(model, both), use_cache=False)
    for index, text in enumerate(both):
        alone = generated(model, **prompts(model, [text]), use_cache=False)
        assert torch.equal(found.sequences[index, -8:], alone.sequences[0, -8:])
        for x, y in zip(found.logits, alone.logits, strict=True):
            torch.testing.assert_close(x[index], y[0], rtol=1e-4, atol=1e-5)


def test_no_saved_file_contains_that_there_was_no_cache(net: Any, texts: Any, tmp_path: Path) -> None:
    model = stitched(net("bert"), net("llama", 1), texts, (LAYERS["bert"], LAYERS["llama"]))
    with pytest.warns(UserWarning, match="BertForSequenceClassification takes no cache"):
        generated(model)
    model.save_pretrained(tmp_path)
    assert StitchedModelForCausalLM.from_pretrained(tmp_path).generation_config.use_cache is not False


def test_a_fallback_that_version_0_2_saved_is_dropped_but_no_choice(net: Any, texts: Any, tmp_path: Path) -> None:
    """It saved ``use_cache: false`` for decoders under transformers 5.24, whose name of the cache it had not."""
    model = stitched(net("gpt2"), net("llama", 1), texts, (LAYERS["gpt2"], LAYERS["llama"]))
    model.generation_config.use_cache = False
    model.save_pretrained(tmp_path)
    assert StitchedModelForCausalLM.from_pretrained(tmp_path).generation_config.use_cache is False
    rewrite(tmp_path / "config.json", lambda record: record.update(num_hidden_layers=None, layer_types=None))
    again = StitchedModelForCausalLM.from_pretrained(tmp_path)
    assert again.generation_config.use_cache is None
    assert generated(again)[NAME].get_seq_length() == 11


def test_a_choice_against_the_cache_needs_no_check_and_no_warning(net: Any, texts: Any) -> None:
    whole = stitched(net("bert"), net("llama", 1), texts, (LAYERS["bert"], LAYERS["llama"]))
    decoders = stitched(net("gpt2"), net("llama", 1), texts, (LAYERS["gpt2"], LAYERS["llama"]))
    settings = transformers.GenerationConfig(max_new_tokens=3, use_cache=False, pad_token_id=0)
    ids = torch.tensor([[7, 12, 30, 9]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in (whole, decoders):
            assert model.generate(ids, settings).shape[1] <= 7
    assert not decoders.cache_is_checked


def test_settings_of_the_user_are_kept_where_there_is_no_cache(net: Any, texts: Any) -> None:
    """Nor are they passed beside an option, which transformers deprecates."""
    model = stitched(net("bert"), net("llama", 1), texts, (LAYERS["bert"], LAYERS["llama"]))
    settings = transformers.GenerationConfig(max_new_tokens=3, pad_token_id=0)
    with pytest.warns(UserWarning, match="each token takes a run over the whole text") as caught:
        model.generate(torch.tensor([[7, 12, 30, 9]]), generation_config=settings)
    assert not any("deprecated" in str(each.message) for each in caught)
    assert settings.use_cache is None


def test_the_cache_is_accepted_by_each_name_but_not_by_two(model: StitchedModelForCausalLM) -> None:
    ids = torch.tensor([[7, 12, 30, 9]])
    assert NAME in inspect.signature(model.forward).parameters
    expected = generated(model).sequences
    for name in NAMES:
        older = NAMES.index(name) > NAMES.index(NAME)
        for run in (model, partial(model.generate, max_new_tokens=8, **GREEDY)):
            with pytest.warns(FutureWarning, match=f"`{name}` is deprecated") if older else nullcontext([]) as caught:
                found = run(input_ids=ids, **{name: transformers.DynamicCache()})
            assert {each.filename for each in caught} <= {__file__}
            assert found[NAME].get_seq_length() == (4 if run is model else 11)
    assert torch.equal(found.sequences, expected)
    two = {name: transformers.DynamicCache() for name in NAMES[:2]}
    for run in (model, model.generate):
        with pytest.raises(ValueError, match="cache and past_key_values are names of the same argument"):
            run(input_ids=ids, **two)


def test_a_cache_of_another_model_is_refused(model: StitchedModelForCausalLM, net: Any) -> None:
    ids = torch.tensor([[7, 12, 30, 9]])
    other = transformers.DynamicCache(config=transformers.LlamaConfig(**{**TEXT, "num_hidden_layers": 5}))
    with pytest.raises(ValueError, match="the cache has 5 layers, but this model has 3: pass the cache of an earlier"):
        model(input_ids=ids, **{NAME: other})
    with pytest.raises(ValueError, match="must be a Cache of transformers with layers, got a tuple"):
        model(input_ids=ids, **{NAME: ((ids, ids),)})
    same = transformers.DynamicCache(config=model.config)
    for layer in range(3):
        same.update(torch.zeros(1, 3, 2, 5), torch.zeros(1, 3, 2, 5), layer)
    with pytest.raises(ValueError, match="layer 0 of the cache was made for 3 heads of 5 features, but that of this"):
        model(input_ids=ids, **{NAME: same})
    for_two = model(input_ids=ids.expand(2, -1), use_cache=True)[NAME]
    with pytest.raises(ValueError) as caught:
        model(input_ids=ids, **{NAME: for_two})
    assert caught.value.__notes__ == [f"Or the cache that was given as {NAME} belongs to another model."]


def test_a_network_with_the_older_name_of_the_cache_gets_it_by_this_name(texts: Any) -> None:
    """Code from the Hub keeps the name for which it was written."""

    class Remote(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, past_key_values: Any = None, **inputs: Any) -> Any:
            assert NAME == "past_key_values" or NAME not in inputs
            return super().forward(input_ids, **inputs, **{NAME: past_key_values})

    torch.manual_seed(0)
    a = adapted("llama", Remote(build("llama", 0).config).eval())
    model = stitched(a, a, texts, (LAYERS["llama"],) * 2, matcher="identity")
    assert (model.uncached, cache_argument(model.source.model)) == (None, "past_key_values")
    found, plain = generated(model), generated(model, use_cache=False)
    assert found[NAME].get_seq_length() == 11
    assert torch.equal(found.sequences, plain.sequences)


STATES = {
    "mamba": lambda: transformers.MambaForCausalLM(transformers.MambaConfig(**TEXT)),
    "jamba": lambda: transformers.JambaForCausalLM(
        transformers.JambaConfig(
            **{**TEXT, "num_hidden_layers": 4},
            num_key_value_heads=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            num_experts=2,
            mamba_d_state=4,
        )
    ),
}
"""Networks whose layers keep a state instead of tokens: all layers, or some."""


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("mamba", "mamba"),
        pytest.param("jamba", "jamba", marks=pytest.mark.slow),
        ("mamba", "llama"),
        pytest.param("llama", "mamba", marks=pytest.mark.slow),
        pytest.param("jamba", "gpt2", marks=pytest.mark.slow),
        ("llama", "jamba"),
    ],
)
def test_state_space_models_have_a_cache(source: str, target: str, net: Any, texts: Any) -> None:
    torch.manual_seed(0)
    a, b = (adapted("llama", STATES[name]().eval()) if name in STATES else net(name) for name in (source, target))
    cuts = [LAYERS.get(name) or adapter.layers[1] for name, adapter in ((source, a), (target, b))]
    same = source == target
    model = stitched(a, a if same else b, texts, (cuts[0], cuts[0] if same else cuts[1]),
                     matcher="identity" if same else "ridge")  # fmt: skip
    if NAME != "cache" and (source, target) == ("mamba", "mamba"):
        assert "before 5.24" in str(model.uncached)
        return
    assert model.uncached is None
    for batch in ({}, prompts(model, ["w1 w2 w3 w4 w5 w6", "w7 w8"])):
        found, plain = generated(model, **batch), generated(model, **batch, use_cache=False)
        assert torch.equal(found.sequences, plain.sequences)
        for x, y in zip(found.logits, plain.logits, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
        if same:
            assert torch.equal(found.sequences, generated(a.model, **batch).sequences)
    assert model.uncached is None and found[NAME] is not None


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


def test_generation_gives_hidden_states_and_attentions_of_each_step(model: StitchedModelForCausalLM) -> None:
    model.set_attn_implementation("eager")
    found = generated(model, output_hidden_states=True, output_attentions=True)
    steps = found.sequences.shape[1] - 4
    assert len(found.hidden_states) == len(found.attentions) == steps
    assert {len(step) for step in found.hidden_states} == {model.config.num_hidden_layers + 2}
    assert {len(step) for step in found.attentions} == {model.config.num_hidden_layers}


@pytest.mark.skipif(not hasattr(transformers.PreTrainedConfig, "per_layer_config"), reason="new in transformers 5.24")
def test_a_config_that_differs_by_layer(net: Any, texts: Any, tmp_path: Path) -> None:
    """Such a config raises an error where what differs is read from it as a whole."""
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(
        **{**TEXT, "num_hidden_layers": 4}, num_key_value_heads=2, head_dim=8, global_head_dim=16, sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 2, hidden_size_per_layer_input=0, num_kv_shared_layers=0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    a, b = adapted("llama", transformers.Gemma4ForCausalLM(config).eval()), net("llama")
    assert config.is_heterogeneous
    same = stitched(a, a, texts, ("model.layers.1",) * 2, matcher="identity")
    assert torch.equal(generated(same).sequences, generated(a.model).sequences)
    model = stitched(a, b, texts, ("model.layers.1", LAYERS["llama"]))
    found = generated(model)
    assert model.uncached is None and (model.config.layer_types, model.config.sliding_window) == (
        ["sliding_attention", "full_attention", "full_attention"], 4,
    )  # fmt: skip
    assert torch.equal(found.sequences, generated(model, use_cache=False).sequences)
    model.save_pretrained(tmp_path)
    assert torch.equal(generated(StitchedModelForCausalLM.from_pretrained(tmp_path)).sequences, found.sequences)


def test_a_network_whose_layers_are_numbered_otherwise_runs_without_a_cache(texts: Any) -> None:
    """The cache is tried, and refused if it changes what the model computes."""
    torch.manual_seed(0)
    config = transformers.GPTNeoConfig(
        hidden_size=24, num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]], vocab_size=80,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    a = adapted("gpt2", transformers.GPTNeoForCausalLM(config).eval())
    model = stitched(a, a, texts, (a.layers[1],) * 2, matcher="identity")
    with pytest.warns(UserWarning, match="because with a cache, the logits differ by"):
        found = generated(model)
    assert found.get(NAME) is None
    assert torch.equal(found.sequences, generated(a.model).sequences)


def test_a_source_that_reads_two_texts_is_refused_by_name(net: Any, texts: Any) -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, vocab_size=80, decoder_start_token_id=0
    )
    a = adapted("t5", transformers.T5ForConditionalGeneration(config).eval())
    model = stitched(a, net("llama"), texts, (LAYERS["t5"], LAYERS["llama"]))
    with pytest.raises(ValueError, match="also reads decoder_input_ids, which generation does not pass"):
        generated(model)


def test_a_check_that_was_interrupted_is_repeated(net: Any, texts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stitched(net("gpt2"), net("llama", 1), texts, (LAYERS["gpt2"], LAYERS["llama"]))
    ids, forward = torch.tensor([[7, 12, 30, 9]]), model.forward
    for error in (torch.OutOfMemoryError, KeyboardInterrupt):

        def failing(*_: Any, error: Any = error, **__: Any) -> Any:
            raise error("at once")

        monkeypatch.setattr(model, "forward", failing)
        with pytest.raises(error):
            generated(model)
        assert not model.cache_is_checked
    monkeypatch.setattr(model, "forward", forward)
    assert model(input_ids=ids, use_cache=True)[NAME] is not None and model.cache_is_checked


def test_the_check_changes_no_mode_and_no_random_numbers(model: StitchedModelForCausalLM) -> None:
    model.train()
    model.source.eval()
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    model._check_cache()
    assert model.cache_is_checked and modes == [module.training for module in model.modules()]
    assert torch.equal(torch.get_rng_state(), state)


def test_threads_wait_for_the_check(texts: Any) -> None:
    """A cache that is wrong is given to none of them."""
    torch.manual_seed(0)
    config = transformers.GPTNeoConfig(hidden_size=24, num_layers=4, num_heads=4, vocab_size=80,
                                       attention_types=[[["global", "local"], 2]])  # fmt: skip
    a = adapted("gpt2", transformers.GPTNeoForCausalLM(config).eval())
    model = stitched(a, a, texts, (a.layers[1],) * 2, matcher="identity")

    def ask(_: int) -> str:
        with pytest.raises(ValueError, match="this model has no cache"):
            model(input_ids=torch.tensor([[7, 12, 30, 9]]), use_cache=True)
        return "refused"

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == ["refused"] * 4


class Excluding(torch.nn.Module):
    """A head that excludes tokens by logits of a given size."""

    def __init__(self, head: torch.nn.Module, value: float) -> None:
        super().__init__()
        self.head, self.value = head, value

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden)
        return torch.where(torch.arange(logits.shape[-1]) % 7 == 3, self.value, logits)


@pytest.mark.parametrize("value", [-torch.inf, torch.finfo(torch.float32).min])
def test_excluded_tokens_do_not_hide_what_a_cache_changes(value: float, texts: Any) -> None:
    net: Any = build("llama", 0)
    net.lm_head = Excluding(net.lm_head, value)
    a = adapted("llama", net)
    model = stitched(a, a, texts, (LAYERS["llama"],) * 2, matcher="identity")
    assert generated(model)[NAME] is not None and model.uncached is None
    forgetful = stitched(a, a, texts, (LAYERS["llama"],) * 2, matcher="identity")
    attention = forgetful.target.model.model.layers[2].self_attn

    def forget(_: Any, __: Any, ___: Any) -> None:
        cache = seen["cache"]
        if cache is not None and cache.layers[2].get_seq_length():
            cache.layers[2].keys.normal_()

    seen: dict[str, Any] = {}
    attention.register_forward_pre_hook(lambda _, __, inputs: seen.update(cache=inputs.get(NAME)), with_kwargs=True)
    attention.register_forward_hook(forget)
    with pytest.warns(UserWarning, match="because with a cache, the logits differ by"):
        generated(forgetful)


@pytest.mark.parametrize("use", [True, False])
def test_a_decoder_that_counts_positions_from_padding_equals_itself(use: bool, texts: Any) -> None:
    torch.manual_seed(0)
    config = transformers.RobertaConfig(**TEXT, pad_token_id=0, max_position_embeddings=64, is_decoder=True)
    a = adapted("bert", transformers.RobertaForCausalLM(config).eval())
    model = stitched(a, a, texts, (a.layers[1],) * 2, matcher="identity")
    ids = torch.tensor([[7, 12, 30, 9]])
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, use_cache=use).logits, a.model(input_ids=ids, use_cache=use).logits)
    assert torch.equal(generated(model).sequences, generated(a.model).sequences)


def test_a_network_whose_forward_does_not_name_use_cache_has_a_cache(texts: Any) -> None:
    torch.manual_seed(0)
    sizes = {"num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    a = adapted("llama", transformers.GraniteMoeForCausalLM(transformers.GraniteMoeConfig(**TEXT, **sizes)).eval())
    model = stitched(a, a, texts, (a.layers[1],) * 2, matcher="identity")
    assert generated(model)[NAME] is not None and model.uncached is None


ENDS = {"vocab_size": 80, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
APPENDING: dict[str, Any] = {
    "xlm": lambda: transformers.XLMWithLMHeadModel(
        transformers.XLMConfig(emb_dim=32, n_layers=2, n_heads=4, causal=True, mask_token_id=5, **ENDS)
    ),
    "xlnet": lambda: transformers.XLNetLMHeadModel(
        transformers.XLNetConfig(d_model=32, n_layer=2, n_head=4, d_inner=48, **ENDS)
    ),
}
"""Networks that append a token to the text when they generate, and predict in its place."""


@pytest.mark.parametrize("family", APPENDING)
def test_a_target_that_appends_tokens_when_it_generates_is_refused(family: str, net: Any, texts: Any) -> None:
    torch.manual_seed(0)
    a = adapted("gpt2", APPENDING[family]().eval())
    layer, b = a.layers[0], net("gpt2", 1)

    def joined(source: Any, cut: str, target: Any, to: str) -> Any:
        specs = source.spec(cut), target.spec(to)
        body = IdentityStitch(specs[0].width, specs[1].width)
        return join(source, cut, StitchingLayer(*specs, "none", body), target, to, task="text-generation")

    model = joined(a, layer, a, layer)
    chain = joined(b, LAYERS["gpt2"], hf_stitch.load(model), f"target.{a.layers[-1]}")
    for each in (model, chain):
        with pytest.raises(ValueError, match=f"{type(a.model).__name__}, appends 1 token to the text"):
            generated(each)
    after = joined(a, layer, b, LAYERS["gpt2"])
    assert generated(after, tokens=2, use_cache=False).sequences.shape == (1, 6)
