"""Generation with stitched language models, with and without a cache."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_stitch
from hf_stitch import StitchedModelForCausalLM
from hf_stitch.artefacts.cache import NAME, NAMES, cache_argument
from hf_stitch.artefacts.joining import join
from hf_stitch.stitches import IdentityStitch, LinearStitch, StitchingLayer

from records import rewrite  # isort: skip
import tiny_networks  # isort: skip
from tiny_networks import LAYERS, TEXT, adapted, build  # isort: skip

PAIRS = [("gpt2", "llama"), ("llama", "gpt2")]
stitched = partial(tiny_networks.stitched, task="text-generation")
IDS = torch.tensor([[7, 12, 30, 9]])
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GREEDY = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "eos_token_id": None}


def generated(model: Any, tokens: int = 8, **options: Any) -> Any:
    prompt = {} if "input_ids" in options else {"input_ids": IDS}
    return model.generate(**prompt, max_new_tokens=tokens, **{**GREEDY, **options})


def prompts(adapter: Any, texts: list[str], side: str = "left") -> dict[str, torch.Tensor]:
    found = adapter.processor(texts, padding=True, padding_side=side, return_tensors="pt")
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def same(a: hf_stitch.Adapter, texts: Any, layer: str = "") -> Any:
    return stitched(a, a, texts, (layer or a.layers[1],) * 2, matcher="identity")


@pytest.fixture(scope="module")
def between(net: Any, texts: Any) -> Any:
    def make(source: str, target: Any) -> Any:
        b, family = (net(target, 1), target) if isinstance(target, str) else (target, "llama")
        return stitched(net(source), b, texts, (LAYERS[source], LAYERS[family]))

    return make


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def made(request: Any, between: Any) -> StitchedModelForCausalLM:
    return between(*request.param)


@pytest.fixture
def model(made: StitchedModelForCausalLM) -> StitchedModelForCausalLM:
    return copy.deepcopy(made)


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_identity_stitch_generates_the_same_as_the_network(family: str, layer: int, net: Any, texts: Any) -> None:
    """Bitwise equal; after the last block the target has no attention layers and no cache."""
    a = net(family)
    model = same(a, texts, a.layers[layer])
    for batch in ({}, prompts(a, ["w1 w2 w3 w4 w5 w6", "w7 w8"])):
        expected, got = generated(a.model, **batch), generated(model, **batch)
        assert torch.equal(got.sequences, expected.sequences)
        assert all(torch.equal(x, y) for x, y in zip(got.logits, expected.logits, strict=True))


WAYS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "top_p": 0.9},
    "static cache": {"cache_implementation": "static"},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "assistant": {"assistant_model": "llama"},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_identity_stitch_generates_in_every_way_as_the_network(way: str, net: Any, texts: Any) -> None:
    a = net("llama")
    network, model = copy.deepcopy(a.model), same(a, texts)
    batch = prompts(a, ["w1 w2 w3 w4 w5 w6", "w7 w8"][: 1 if way in ("prompt lookup", "assistant") else 2])
    options = {key: build("llama", 1) if key == "assistant_model" else value for key, value in WAYS[way].items()}
    found = []
    for each in (network, model):
        torch.manual_seed(0)
        found.append(generated(each, **batch, **options).sequences)
    assert torch.equal(*found)


def test_the_cache_changes_nothing(model: StitchedModelForCausalLM) -> None:
    with_cache, without = generated(model), generated(model, use_cache=False)
    assert model.uncached is None and len(with_cache[NAME]) == model.config.num_hidden_layers == 3
    assert [layer.get_seq_length() for layer in with_cache[NAME].layers] == [11, 11, 11]  # of both halves
    assert torch.equal(with_cache.sequences, without.sequences)
    for x, y in zip(with_cache.logits, without.logits, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    torch.manual_seed(0)
    drawn = generated(model, do_sample=True).sequences
    torch.manual_seed(0)
    assert torch.equal(generated(model, do_sample=True, use_cache=False).sequences, drawn)


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

    def made(*shape: Any) -> Any:
        cache = transformers.StaticCache(config=model.config, max_cache_len=8)
        cache.early_initialization(1, *shape, dtype=torch.float32, device=torch.device("cpu"))
        return cache

    refused = made(heads, 4)
    with pytest.raises(ValueError, match=r"layer 0 of the cache .* 4 features, but .* 3 of 8: .*num_heads=\[3, "):
        model(input_ids=IDS, **{NAME: refused})
    assert not any(layer.get_seq_length() for layer in refused.layers)  # nothing ran
    with torch.no_grad():
        found = model(input_ids=IDS, **{NAME: made([3, heads], [8, 4])}).logits
        torch.testing.assert_close(found, model(input_ids=IDS).logits, rtol=1e-5, atol=1e-6)


def decoders(**sizes: Any) -> dict[str, Any]:
    return {**TEXT, "num_key_value_heads": 2, **ENDS, **sizes}


PECULIAR: dict[str, tuple[str, Callable[[], Any]]] = {
    "a sliding window": (
        "llama", lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**decoders(sliding_window=4))),
    ),
    "the number of a layer": (
        "gpt2", lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(
            n_embd=24, n_layer=3, n_head=4, vocab_size=80, **ENDS, scale_attn_by_inverse_layer_idx=True,
            reorder_and_upcast_attn=True,
        )),
    ),
    "positions from padding": (
        "bert", lambda: transformers.RobertaForCausalLM(transformers.RobertaConfig(
            **TEXT, pad_token_id=0, max_position_embeddings=64, is_decoder=True,
        )),
    ),
    "no name for use_cache": (
        "llama", lambda: transformers.GraniteMoeForCausalLM(transformers.GraniteMoeConfig(
            **decoders(num_local_experts=2, num_experts_per_tok=1)
        )),
    ),
}  # fmt: skip
"""What a network uses that others do not -> the family of its tokenizer, and the network."""


def peculiar(which: str) -> hf_stitch.Adapter:
    torch.manual_seed(0)
    family, make = PECULIAR[which]
    return adapted(family, make().eval())


@pytest.mark.parametrize("which", PECULIAR)
def test_a_peculiar_network_stitched_to_itself_generates_what_it_does(which: str, texts: Any) -> None:
    """Bitwise, also beyond a window, where a network keeps only part of the past."""
    a = peculiar(which)
    model = same(a, texts)
    expected, got = generated(a.model), generated(model)
    assert got[NAME] is not None and model.uncached is None
    assert torch.equal(got.sequences, expected.sequences)
    assert all(torch.equal(x, y) for x, y in zip(got.logits, expected.logits, strict=True))
    for use in (True, False):
        with torch.no_grad():
            assert torch.equal(model(input_ids=IDS, use_cache=use).logits, a.model(input_ids=IDS, use_cache=use).logits)
    assert (getattr(model.config, "layer_types", None) == ["sliding_attention"] * 3) == (which == "a sliding window")


def test_of_two_different_windows_the_whole_past_is_kept(texts: Any) -> None:
    config = transformers.MistralConfig(**decoders(sliding_window=6))
    b = adapted("llama", transformers.MistralForCausalLM(config).eval())
    model = stitched(peculiar("a sliding window"), b, texts, (LAYERS["llama"],) * 2)
    assert model.config.layer_types == ["full_attention"] * 3
    assert torch.equal(generated(model).sequences, generated(model, use_cache=False).sequences)


def continues_as_each_text_alone(model: Any, **options: Any) -> None:
    both = ["w1 w2 w3 w4 w5 w6", "w7 w8 w9"]
    found = generated(model, **prompts(model, both), **options)
    for index, text in enumerate(both):
        alone = generated(model, **prompts(model, [text]), **options)
        assert torch.equal(found.sequences[index, -8:], alone.sequences[0, -8:])
        for x, y in zip(found.logits, alone.logits, strict=True):
            torch.testing.assert_close(x[index], y[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["t5", "roberta"])
def test_a_source_that_attends_to_the_whole_text_generates_without_a_cache(family: str, net: Any, texts: Any) -> None:
    """Both have the tokenizer of the decoder."""
    config = transformers.RobertaConfig(**TEXT, pad_token_id=0, max_position_embeddings=64)
    torch.manual_seed(0)
    encoder = net("t5") if family == "t5" else adapted("bert", transformers.RobertaModel(config).eval())
    model = stitched(encoder, net("llama", 1), texts, (encoder.layers[1], LAYERS["llama"]))
    why = "does not accept a cache|a network attends to later tokens"
    with pytest.warns(UserWarning, match=rf"each token requires a run over the whole text, because .*({why})"):
        out = generated(model)
    assert out.get(NAME) is None
    with torch.no_grad():
        again = model(input_ids=out.sequences[:, :-1]).logits[:, -1]
    torch.testing.assert_close(out.logits[-1], again)
    for run in (model, model.generate):
        with pytest.raises(ValueError, match=r"this model runs without a cache, because .*: pass use_cache=False"):
            run(input_ids=torch.tensor([[5, 6]]), use_cache=True)
    continues_as_each_text_alone(model, use_cache=False)  # RoBERTa numbers positions from its padding itself


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_left_padded_batch_continues_as_each_text_alone(model: StitchedModelForCausalLM, use_cache: bool) -> None:
    continues_as_each_text_alone(model, use_cache=use_cache)


def test_no_setting_and_no_file_contains_that_there_was_no_cache(between: Any, tmp_path: Path) -> None:
    """Nor are settings passed beside an option, which transformers deprecates."""
    model = between("bert", "llama")
    settings = transformers.GenerationConfig(max_new_tokens=3, pad_token_id=0)
    with pytest.warns(UserWarning, match="BertForSequenceClassification does not accept a cache") as caught:
        model.generate(IDS, generation_config=settings)
    assert not any("deprecated" in str(each.message) for each in caught)
    assert settings.use_cache is None
    model.save_pretrained(tmp_path)
    assert StitchedModelForCausalLM.from_pretrained(tmp_path).generation_config.use_cache is not False
    whole, decoders, settings.use_cache = between("bert", "llama"), between("gpt2", "llama"), False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in (whole, decoders):  # a choice against the cache needs no check and no warning
            assert model.generate(IDS, settings).shape[1] <= 7
    assert not decoders.cache_is_checked


def test_a_generation_config_is_saved_but_no_fallback_of_version_0_2(between: Any, tmp_path: Path) -> None:
    """It saved ``use_cache: false`` for decoders under transformers 5.24, whose name of the cache it had not."""
    b = adapted("llama", build("llama", 1))
    b.model.generation_config.max_new_tokens, b.model.generation_config.eos_token_id = 3, [2, 11]
    model = between("gpt2", b)
    assert model.generation_config is not b.model.generation_config
    model.generation_config.use_cache = False
    model.save_pretrained(tmp_path)
    again = StitchedModelForCausalLM.from_pretrained(tmp_path)
    assert (again.generation_config.use_cache, again.generation_config.eos_token_id) == (False, [2, 11])
    assert torch.equal(again.generate(IDS, do_sample=False), model.generate(IDS, do_sample=False))
    assert again.generate(IDS, do_sample=False).shape[1] <= 7
    rewrite(tmp_path / "config.json", lambda record: record.update(num_hidden_layers=None, layer_types=None))
    again = StitchedModelForCausalLM.from_pretrained(tmp_path)
    assert again.generation_config.use_cache is None
    assert generated(again)[NAME].get_seq_length() == 11


def test_the_cache_is_accepted_by_each_name_but_not_by_two(model: StitchedModelForCausalLM) -> None:
    assert NAME in inspect.signature(model.forward).parameters
    expected = generated(model).sequences
    for name in NAMES:
        older = NAMES.index(name) > NAMES.index(NAME)
        for run in (model, partial(model.generate, max_new_tokens=8, **GREEDY)):
            with pytest.warns(FutureWarning, match=f"`{name}` is deprecated") if older else nullcontext([]) as caught:
                found = run(input_ids=IDS, **{name: transformers.DynamicCache()})
            assert {each.filename for each in caught} <= {__file__}
            assert found[NAME].get_seq_length() == (4 if run is model else 11)
    assert torch.equal(found.sequences, expected)
    two = {name: transformers.DynamicCache() for name in NAMES[:2]}
    for run in (model, model.generate):
        with pytest.raises(ValueError, match="cache and past_key_values are names of the same argument"):
            run(input_ids=IDS, **two)


def test_a_cache_of_another_model_is_refused(model: StitchedModelForCausalLM, net: Any) -> None:
    other = transformers.DynamicCache(config=transformers.LlamaConfig(**{**TEXT, "num_hidden_layers": 5}))
    with pytest.raises(ValueError, match="the cache has 5 layers, but this model has 3: pass the cache of an earlier"):
        model(input_ids=IDS, **{NAME: other})
    with pytest.raises(ValueError, match="must be a Cache of transformers with layers, got a tuple"):
        model(input_ids=IDS, **{NAME: ((IDS, IDS),)})
    for_two = model(input_ids=IDS.expand(2, -1), use_cache=True)[NAME]
    with pytest.raises(ValueError) as caught:
        model(input_ids=IDS, **{NAME: for_two})
    assert caught.value.__notes__ == [f"Or the cache passed as {NAME} belongs to another model."]


def test_a_network_with_the_older_name_of_the_cache_gets_it_by_this_name(texts: Any) -> None:
    """Code from the Hub keeps the name for which it was written."""

    class Remote(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, past_key_values: Any = None, **inputs: Any) -> Any:
            assert NAME == "past_key_values" or NAME not in inputs
            return super().forward(input_ids, **inputs, **{NAME: past_key_values})

    torch.manual_seed(0)
    model = same(adapted("llama", Remote(build("llama", 0).config).eval()), texts)
    assert (model.uncached, cache_argument(model.source.model)) == (None, "past_key_values")
    found, plain = generated(model), generated(model, use_cache=False)
    assert found[NAME].get_seq_length() == 11
    assert torch.equal(found.sequences, plain.sequences)


STATES = {
    "mamba": lambda: transformers.MambaForCausalLM(transformers.MambaConfig(**TEXT)),
    "jamba": lambda: transformers.JambaForCausalLM(transformers.JambaConfig(
        **{**TEXT, "num_hidden_layers": 4}, num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1,
        num_experts=2, mamba_d_state=4,
    )),
}  # fmt: skip
"""Networks whose layers keep a state instead of tokens: all layers, or some."""


@pytest.mark.parametrize(
    ("source", "target"),
    [("mamba", "mamba"), ("mamba", "llama"), ("llama", "jamba")],
)
def test_state_space_models_have_a_cache(source: str, target: str, net: Any, texts: Any) -> None:
    torch.manual_seed(0)
    a, b = (adapted("llama", STATES[name]().eval()) if name in STATES else net(name) for name in (source, target))
    cuts = [LAYERS.get(name) or adapter.layers[1] for name, adapter in ((source, a), (target, b))]
    itself = source == target
    model = same(a, texts, cuts[0]) if itself else stitched(a, b, texts, (cuts[0], cuts[1]))
    if NAME != "cache" and (source, target) == ("mamba", "mamba"):
        assert "before 5.24" in str(model.uncached)
        return
    assert model.uncached is None
    for batch in ({}, prompts(model, ["w1 w2 w3 w4 w5 w6", "w7 w8"])):
        found, plain = generated(model, **batch), generated(model, **batch, use_cache=False)
        assert torch.equal(found.sequences, plain.sequences)
        for x, y in zip(found.logits, plain.logits, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
        if itself:
            assert torch.equal(found.sequences, generated(a.model, **batch).sequences)
    assert model.uncached is None and found[NAME] is not None


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
    assert torch.equal(generated(same(a, texts)).sequences, generated(a.model).sequences)
    model = stitched(a, b, texts, ("model.layers.1", LAYERS["llama"]))
    found = generated(model)
    assert model.uncached is None and (model.config.layer_types, model.config.sliding_window) == (
        ["sliding_attention", "full_attention", "full_attention"], 4,
    )  # fmt: skip
    assert torch.equal(found.sequences, generated(model, use_cache=False).sequences)
    model.save_pretrained(tmp_path)
    assert torch.equal(generated(StitchedModelForCausalLM.from_pretrained(tmp_path)).sequences, found.sequences)


def other_numbers(texts: Any) -> Any:
    """A model whose layers are numbered otherwise, so that a cache changes what it computes."""
    torch.manual_seed(0)
    config = transformers.GPTNeoConfig(
        hidden_size=24, num_layers=4, num_heads=4, vocab_size=80, attention_types=[[["global", "local"], 2]], **ENDS
    )
    return same(adapted("gpt2", transformers.GPTNeoForCausalLM(config).eval()), texts)


def test_a_cache_is_tried_and_refused_if_it_changes_what_the_model_computes(texts: Any) -> None:
    model = other_numbers(texts)
    with pytest.warns(UserWarning, match="because with a cache, the logits differ by"):
        found = generated(model)
    assert found.get(NAME) is None
    assert torch.equal(found.sequences, generated(model.parents[0].model).sequences)


def test_a_cache_that_is_wrong_is_given_to_none_of_several_threads(texts: Any) -> None:
    model = other_numbers(texts)

    def ask(_: int) -> None:
        with pytest.raises(ValueError, match="this model runs without a cache"):
            model(input_ids=IDS, use_cache=True)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))


def test_the_check_changes_no_mode_and_no_random_numbers(model: StitchedModelForCausalLM) -> None:
    model.train()
    model.source.eval()
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    model._check_cache()
    assert model.cache_is_checked and modes == [module.training for module in model.modules()]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_check_that_was_interrupted_is_repeated(between: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = between("gpt2", "llama")
    forward = model.forward
    for error in (torch.OutOfMemoryError, KeyboardInterrupt):

        def failing(*_: Any, error: Any = error, **__: Any) -> Any:
            raise error("at once")

        monkeypatch.setattr(model, "forward", failing)
        with pytest.raises(error):
            generated(model)
        assert not model.cache_is_checked
    monkeypatch.setattr(model, "forward", forward)
    assert model(input_ids=IDS, use_cache=True)[NAME] is not None and model.cache_is_checked


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
    model = same(a, texts)
    assert generated(model)[NAME] is not None and model.uncached is None
    forgetful = same(a, texts)
    attention = forgetful.target.model.model.layers[2].self_attn

    def forget(_: Any, __: Any, inputs: Any, ___: Any) -> None:
        if inputs.get(NAME) is not None:
            inputs[NAME].layers[2].keys.normal_()

    attention.register_forward_hook(forget, with_kwargs=True)
    with pytest.warns(UserWarning, match="because with a cache, the logits differ by"):
        generated(forgetful)


def test_a_target_that_appends_tokens_when_it_generates_is_refused(net: Any) -> None:
    """XLM predicts in the place of a token that it appends to the text."""
    torch.manual_seed(0)
    config = transformers.XLMConfig(
        emb_dim=32, n_layers=2, n_heads=4, causal=True, mask_token_id=5, vocab_size=80, **ENDS
    )
    a = adapted("gpt2", transformers.XLMWithLMHeadModel(config).eval())
    layer, b = a.layers[0], net("gpt2", 1)

    def joined(source: Any, cut: str, target: Any, to: str) -> Any:
        specs = source.spec(cut), target.spec(to)
        body = IdentityStitch(specs[0].width, specs[1].width)
        return join(source, cut, StitchingLayer(*specs, "none", body), target, to, task="text-generation")

    model = joined(a, layer, a, layer)
    for each in (model, joined(b, LAYERS["gpt2"], hf_stitch.load(model), f"target.{a.layers[-1]}")):
        with pytest.raises(ValueError, match="XLMWithLMHeadModel, appends 1 token to the text"):
            generated(each)
    assert generated(joined(a, layer, b, LAYERS["gpt2"]), tokens=2, use_cache=False).sequences.shape == (1, 6)


def test_a_source_that_reads_two_texts_is_refused_by_name(net: Any, texts: Any) -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "vocab_size": 80}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    a = adapted("t5", transformers.T5ForConditionalGeneration(config).eval())
    model = stitched(a, net("llama"), texts, (LAYERS["t5"], LAYERS["llama"]))
    with pytest.raises(ValueError, match="also requires decoder_input_ids, which generation does not pass"):
        generated(model)
