"""Without data, ``same`` tries inputs past every length that the networks name, or tells up to where it holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import transformers as hf
from hf_stitch_versions import Sameness, inputs, same
from hf_stitch_versions.sources import Network
from torch import nn

import hf_stitch

SIZE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 100,
    "pad_token_id": 0,
}  # fmt: skip
DECODER: dict[str, Any] = {**SIZE, "num_key_value_heads": 2, "max_position_embeddings": 2048}
T5: dict[str, Any] = {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 64, "d_kv": 8, "vocab_size": 100}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def changed(config: Any, **settings: Any) -> Any:
    """Return a copy of a config with other settings."""
    other = copy.deepcopy(config)
    for name, value in settings.items():
        setattr(other, name, value)
    return other


FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sliding_window": (
        hf.MistralForCausalLM, hf.MistralConfig(**DECODER, sliding_window=32), {"sliding_window": None},
    ),
    "max_window_layers": (
        hf.Qwen2ForCausalLM,
        hf.Qwen2Config(**DECODER, use_sliding_window=True, sliding_window=32, max_window_layers=1),
        {"layer_types": ["full_attention"] * 2},
    ),
    "local_attention": (
        hf.ModernBertModel,
        hf.ModernBertConfig(**SIZE, max_position_embeddings=256, local_attention=64),
        {"local_attention": 512},
    ),
    "attention_chunk_size": (
        hf.Llama4ForCausalLM,
        hf.Llama4TextConfig(
            **DECODER, intermediate_size_mlp=64, head_dim=8, attention_chunk_size=32, num_local_experts=2
        ),
        {"attention_chunk_size": 64},
    ),
    "original_max_position_embeddings": (
        hf.Phi3ForCausalLM,
        hf.Phi3Config(
            **{**DECODER, "max_position_embeddings": 256}, original_max_position_embeddings=64, rope_parameters=LONGROPE
        ),
        {"rope_parameters": {**LONGROPE, "long_factor": [1.0] * 4}},
    ),
    "sliding_window beyond the positions of training": (
        hf.MistralForCausalLM,
        hf.MistralConfig(**{**DECODER, "max_position_embeddings": 16}, sliding_window=32),
        {"sliding_window": None},
    ),
    "dynamic positions": (
        hf.LlamaForCausalLM,
        hf.LlamaConfig(
            **{**DECODER, "max_position_embeddings": 32},
            rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        ),
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "relative_attention_max_distance": (
        hf.T5EncoderModel, hf.T5Config(**T5), {"relative_attention_max_distance": 136},
    ),
    "local_radius": (hf.LongT5EncoderModel, hf.LongT5Config(**T5, local_radius=20), {"local_radius": 60}),
    "block_size": (
        hf.BigBirdModel,
        hf.BigBirdConfig(**SIZE, block_size=4, num_random_blocks=2, attention_type="block_sparse"),
        {"attention_type": "original_full"},
    ),
    "chunk_length": (
        hf.ReformerModel,
        hf.ReformerConfig(
            attention_head_size=8, hidden_size=32, num_attention_heads=4, feed_forward_size=64, vocab_size=100,
            attn_layers=["local"], local_attn_chunk_length=16, axial_pos_embds=False, max_position_embeddings=256,
            pad_token_id=0, is_decoder=False,
        ),
        {"local_num_chunks_before": 0},
    ),
    "buckets": (
        hf.DebertaV2Model,
        hf.DebertaV2Config(
            **SIZE, relative_attention=True, position_buckets=16, pos_att_type=["p2c"], max_position_embeddings=128
        ),
        {"max_relative_positions": 64},
    ),
}  # fmt: skip


def pair(family: str) -> tuple[nn.Module, nn.Module]:
    """Return two networks of the same weights that differ for long texts only."""
    kind, config, settings = FAMILIES[family]
    torch.manual_seed(0)
    one, two = kind(config).eval(), kind(changed(config, **settings)).eval()
    two.load_state_dict(one.state_dict())
    return one, two


def answer(one: Any, two: Any, data: Any = None) -> Sameness:
    return same(one, two, data, progress=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_changes_only_long_texts_is_found(family: str) -> None:
    one, two = pair(family)
    assert not answer(one, two).is_same
    itself = answer(one, copy.deepcopy(one))
    assert itself.is_same and not itself.bound


def test_the_length_may_be_that_of_the_second_network() -> None:
    one, two = pair("sliding_window")
    assert not answer(two, one).is_same


def test_short_texts_alone_do_not_tell() -> None:
    one, two = pair("sliding_window")
    short = torch.randint(3, 100, (8, 12), generator=torch.Generator().manual_seed(0))
    assert answer(one, two, short).is_same


def test_a_length_out_of_reach_is_in_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = pair("sliding_window")
    monkeypatch.setattr(inputs, "MOST_VALUES", 10_000)
    found = answer(one, two)
    assert found.is_same
    reached = "texts of up to 12 tokens, which do not exceed sliding_window 32"
    assert found.bound == f"{reached}: pass longer texts as data"
    assert f"This holds for {found.bound}." in found.verdict
    assert Sameness.from_dict(found.to_dict()) == found


@pytest.mark.parametrize("pad", [0, None])
def test_texts_are_padded_on_both_sides_also_without_a_padding_token(pad: int | None) -> None:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER | {"pad_token_id": pad})).eval()
    masks = [feed.mask for feed in inputs.random_feeds(hf_stitch.load(model))]
    assert all(mask is not None for mask in masks)
    assert {side for mask in masks for side in (0, -1) if not bool(mask[:, side].all())} == {0, -1}  # type: ignore[index]


def test_the_bound_counts_the_values_of_all_modules() -> None:
    one, _ = pair("sliding_window")
    adapter = hf_stitch.load(one)
    feed = next(iter(inputs.random_feeds(adapter)))
    values = 0

    def count(event: Any) -> None:
        nonlocal values
        values += sum(value.numel() for value in event.outputs.values())

    network = Network(adapter)
    network.watch(feed, count)
    assert inputs._runs(network, feed, values)
    assert not inputs._runs(network, feed, values - 1)


def test_the_greatest_length_within_reach_is_tried() -> None:
    one, _ = pair("sliding_window")
    one.config.max_position_embeddings = one.config.attention_chunk_size = 10**6
    found = answer(one, copy.deepcopy(one))
    assert found.n == 19
    assert found.bound == (
        "texts of up to 44 tokens, which do not exceed attention_chunk_size 1000000: pass longer texts as data"
    )


def test_positions_end_where_a_table_ends() -> None:
    model = hf.BertModel(hf.BertConfig(**SIZE, max_position_embeddings=20))
    model.config.sliding_window = 512
    longer, bound = inputs.longer_feeds(hf_stitch.load(model), None, [Network(hf_stitch.load(model))], 0)
    assert longer[0].arguments["input_ids"].shape == (2, 20)
    assert not bound


def test_inputs_of_one_size_bound_the_answer() -> None:
    sizes: dict[str, Any] = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8)}
    config = hf.WavLMConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, num_feat_extract_layers=2,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, num_buckets=16, max_bucket_distance=800, **sizes,
    )  # fmt: skip
    model = hf.WavLMModel(config).eval()
    found = answer(model, copy.deepcopy(model))
    assert found.is_same
    assert found.bound.startswith("inputs of the size of the example, which may be shorter than")
    assert "max_bucket_distance 800" in found.bound


def test_tables_of_positions_that_read_a_size_have_no_vocabulary() -> None:
    model = hf.LEDModel(hf.LEDConfig(
        vocab_size=100, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, attention_window=8, pad_token_id=0,
    )).eval()  # fmt: skip
    assert answer(model, copy.deepcopy(model)).is_same


class Windowed(nn.Module):
    """User code whose modules name a length."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window_size = window
        self.words, self.first, self.last = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(self.words(input_ids)))
        return self.last(x[:, -self.window_size :].mean(1))


def test_lengths_of_user_code_are_those_of_its_modules() -> None:
    torch.manual_seed(0)
    one = Windowed(40).eval()
    two = copy.deepcopy(one)
    two.window_size = 4000
    example = torch.randint(50, (2, 6))
    found = answer(*(hf_stitch.load(each, example_inputs=example) for each in (one, two)))
    assert not found.is_same


# -- images ------------------------------------------------------------------------------------------------------------
def vit(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48, "num_heads": 3}
    return timm.create_model("vit_tiny_patch16_224", **sizes, **options).eval()


def test_images_of_another_size_are_tried_where_positions_are_interpolated(monkeypatch: pytest.MonkeyPatch) -> None:
    one = vit(dynamic_img_size=True)
    with torch.no_grad():
        nn.init.normal_(one.head.weight)
    two = copy.deepcopy(one)
    two.pos_embed.data = two.pos_embed.data.clone()
    plain = two._pos_embed

    def transposed(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return plain(x, *args, **kwargs) if x.shape[1] == x.shape[2] else plain(x.flip(1), *args, **kwargs)

    monkeypatch.setattr(two, "_pos_embed", transposed)
    found = answer(one, two)
    assert found.n == 10
    assert not found.is_same


def test_a_network_of_one_size_is_tried_with_this() -> None:
    found = answer(vit(), vit())
    assert found.is_same
    assert (found.n, found.bound) == (9, "")


def test_a_second_network_of_one_size_bounds_the_answer() -> None:
    one, two = vit(dynamic_img_size=True), vit()
    two.load_state_dict(one.state_dict())
    found = answer(one, two)
    assert found.is_same
    assert found.bound == "images of 32×32: the second network does not run on different sizes"


# -- inputs that networks do not take ----------------------------------------------------------------------------------
class Single(nn.Module):
    """A network that takes one sample at a time."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 8), nn.Linear(8, 2), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) != 1:
            raise ValueError("one at a time")
        return self.last(self.function(self.first(x)))


def test_a_network_of_one_sample_at_a_time_is_told_how_to_be_compared() -> None:
    one = hf_stitch.load(Single().eval(), example_inputs=torch.randn(1, 4))
    with pytest.raises(ValueError, match=r"a batch of 8 \(pass data; for single samples, batch_size=1\): Val"):
        answer(one, one)
    assert same(one, one, torch.randn(5, 4), batch_size=1, progress=False).is_same


def test_outputs_that_are_not_finite_bound_the_answer() -> None:
    net = Single(lambda x: x * float("nan")).eval()
    one = hf_stitch.load(net, example_inputs=torch.randn(1, 4))
    found = same(one, copy.deepcopy(net), torch.randn(1, 4), progress=False)
    assert found.is_same
    assert "This holds for modules before the outputs, because" in found.verdict
