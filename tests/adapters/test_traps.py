"""Common silent errors of feature extraction: bypasses, padding, in-place operations, leaks."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from accelerate import dispatch_model
from accelerate.hooks import ModelHook, add_hook_to_module, attach_align_device_hook
from families import BERT, GPT2, Block, FlatNet, images, make, texts
from tiny_networks import checkpointed
from torch import Tensor, nn

import hf_stitch
from hf_stitch.adapters.discovery.verify import same
from hf_stitch.representation import RepresentationSpec


class Skipping(nn.Module):
    """Blocks with a gated skip connection from the stem to the head."""

    def __init__(self, gate: float) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.gate = nn.Parameter(torch.tensor(gate))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x)
        return self.head(self.blocks(stem) + self.gate * stem)


@pytest.mark.parametrize("gate", [1.0, 0.0])
def test_a_bypass_is_refused_by_name_also_through_zero_weights(gate: float) -> None:
    adapter = hf_stitch.load(Skipping(gate), example_inputs=torch.randn(2, 4))
    assert not any(layer.startswith("blocks") for layer in adapter.layers)
    with pytest.raises(hf_stitch.NotACutError, match=r"blocks\.1.*the output of 'stem' bypasses it"):
        adapter.encode(torch.randn(2, 4), "blocks.1")


def test_a_layer_inside_a_residual_branch_is_refused_and_the_bypass_is_named() -> None:
    adapter = hf_stitch.load(make("timm-resnet"), example_inputs=images(2))
    explanation = adapter.verify_cut("layer2.0.conv1")
    assert explanation.status == "refused"
    assert "layer1.0" in str(explanation)
    assert "bypasses" in str(explanation)
    assert adapter.cut_info("layer2.0.conv1") == explanation


def test_an_integer_path_that_autograd_cannot_see_is_found_by_verification() -> None:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block(), Block())

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(x) * (x[:, :1] > 0)

    adapter = hf_stitch.load(Leaky(), example_inputs=torch.randn(4, 8))
    assert adapter.layers == ()
    with pytest.raises(hf_stitch.NotACutError, match="another way than through it") as refusal:
        adapter.encode(torch.randn(4, 8), "blocks.1")
    assert "blocks.0" not in str(refusal.value)  # because it is refused as well


def test_a_layer_that_fires_twice_is_refused() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(x)).sum(1)

    adapter = hf_stitch.load(Shared(), example_inputs=torch.randn(2, 8))
    with pytest.raises(hf_stitch.NotACutError, match="fires 2 times"):
        adapter.encode(torch.randn(2, 8), "block")


def test_the_error_for_an_unknown_layer_suggests_the_nearest_name() -> None:
    adapter = hf_stitch.load(make("timm-resnet"), example_inputs=images(2))
    with pytest.raises(hf_stitch.NotACutError, match=r"did you mean 'layer2\.0'"):
        adapter.encode(images(2), "layer2.00")


def test_in_place_operations_after_the_cut_do_not_change_captured_values() -> None:
    model = make("user-code")
    adapter = hf_stitch.load(model, example_inputs=images(2))
    with torch.no_grad():
        captured = adapter.encode(images(2), ["bn1", "bn2"])
        assert captured["bn1"].values.min() < 0
        assert torch.equal(captured["bn1"].values, model.bn1(model.conv1(images(2))))


def test_the_content_of_padding_does_not_matter() -> None:
    adapter = hf_stitch.load(make("bert"))
    inputs = texts(3, 8, "right")
    other = {**inputs, "input_ids": torch.where(inputs["attention_mask"].bool(), inputs["input_ids"], 7)}
    with torch.no_grad():
        a, b = (adapter.encode(x, adapter.layers[1])[adapter.layers[1]].rows("none") for x in (inputs, other))
    assert torch.equal(a, b)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_head_that_searches_for_the_last_token_finds_it_without_the_ids(side: str) -> None:
    """GPT-2's classifier reads input_ids, which decode never sees.

    The context must contain the ends of texts, even if padding and end of text have the same id.
    """
    torch.manual_seed(0)
    model = hf.GPT2ForSequenceClassification(hf.GPT2Config(**{**GPT2, "pad_token_id": 2})).eval()
    adapter = hf_stitch.load(model)
    inputs = texts(4, 9, side)
    inputs["input_ids"] = torch.where(inputs["attention_mask"].bool(), inputs["input_ids"], 2)
    inputs["input_ids"][0, -1] = 2  # a real end of text, equal to padding
    layer = adapter.layers[0]
    with torch.no_grad():
        representation = adapter.encode(inputs, layer)[layer]
        assert torch.equal(adapter.decode(representation, layer).logits, adapter.forward(inputs).logits)
        assert set(representation.context["input_ids"].unique().tolist()) == {0, 2}


def test_hooks_and_modules_are_restored_when_the_model_raises() -> None:
    class Fragile(FlatNet):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 7:
                raise RuntimeError("seven")
            return super().forward(x)

    model = Fragile().train()
    adapter = hf_stitch.load(model, example_inputs=images(2))
    assert "bn1" in adapter.layers
    with pytest.raises(RuntimeError, match="seven"):
        adapter.encode(images(7), "bn1")
    with torch.no_grad():
        representation = adapter.encode(images(2), "bn1")["bn1"]
    with pytest.raises(RuntimeError, match=r"size|shape"):
        adapter.decode(representation.replace(values=torch.randn(2, 8, 1, 1)), "bn1")
    assert type(model.bn1) is nn.BatchNorm2d
    assert model.training
    assert model.bn1.training
    assert model.bn1.num_batches_tracked == 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_model_that_is_random_in_eval_mode_is_refused() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block())

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(x) + torch.randn_like(x)

    with pytest.raises(ValueError, match="different outputs for the same input"):
        _ = hf_stitch.load(Noisy(), example_inputs=torch.randn(2, 8)).layers


def test_tuple_outputs_keep_their_structure() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, None]:
            bias = torch.arange(8.0) if bias is None else bias
            return self.inner(x) + bias, bias, None

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Pair(), Pair(), Pair()])
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            bias = None
            for block in self.blocks:
                x, bias, _ = block(x, bias)
            return {"logits": self.head(x)}

    adapter = hf_stitch.load(Net(), example_inputs=torch.randn(2, 8))
    assert adapter.layers == ("blocks.0", "blocks.1", "blocks.2")
    x = torch.randn(3, 8)
    assert same(adapter.decode(adapter.encode(x, "blocks.1")["blocks.1"], "blocks.1"), adapter.forward(x))


def test_halves_keep_the_attention_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves with another attention implementation than the network would differ from it on padded batches."""
    model = hf.BertModel(hf.BertConfig(**BERT, attn_implementation="eager")).eval()
    adapter = hf_stitch.load(model)
    assert adapter.back(adapter.layers[1]).model.config._attn_implementation == "eager"


def test_encode_stops_at_the_deepest_layer_and_decode_skips_earlier_layers() -> None:
    model = make("timm-resnet")
    adapter = hf_stitch.load(model, example_inputs=images(2))
    ran: list[str] = []
    handles = [
        m.register_forward_hook(lambda *_, n=n: ran.append(n)) for n, m in model.named_modules() if n in adapter.layers
    ]
    with torch.no_grad():
        representation = adapter.encode(images(2), ["layer1.0", "layer2.0"])["layer2.0"]
        assert ran == ["layer1.0", "layer2.0"]
        ran.clear()
        adapter.decode(representation, "layer2.0")
    for handle in handles:
        handle.remove()
    assert ran == ["layer3.0", "layer4.0"]


def test_a_compiled_model_is_unwrapped() -> None:
    model = make("user-code")
    adapter = hf_stitch.load(torch.compile(model), example_inputs=images(2))
    assert adapter.model is model


def test_offloaded_weights_run_and_are_shared_with_halves(tmp_path: Path) -> None:
    model, expected = make("gpt2"), make("gpt2")
    places = dict.fromkeys(("wte", "wpe", "drop", "ln_f", "h.0"), "cpu") | {"h.1": "disk", "h.2": "disk"}
    dispatched = dispatch_model(
        model,
        {"lm_head": "cpu", **{f"transformer.{name}": place for name, place in places.items()}},
        main_device="cpu",
        offload_dir=str(tmp_path),
    )
    adapter, inputs = hf_stitch.load(dispatched), texts(3, 6, "left")
    with torch.no_grad():
        representation = adapter.encode(inputs, "transformer.h.0")["transformer.h.0"]
        output = adapter.decode(representation, "transformer.h.0")
        assert torch.equal(output.logits, expected(**inputs, use_cache=False).logits)
        back = adapter.back("transformer.h.0")
        assert torch.equal(back(representation).logits, output.logits)
    assert any(p.is_meta for p in model.parameters())
    assert any(p.is_meta for p in back.parameters())


def test_hooks_that_move_inputs_do_not_reach_halves() -> None:
    """They would move the inputs of a half to the device of the network; hooks that compute stay."""

    class Doubled(ModelHook):
        def post_forward(self, module: Any, output: Any) -> Any:
            return output * 2

    model = make("gpt2")
    attach_align_device_hook(model, execution_device="cpu")
    add_hook_to_module(model.transformer.ln_f, Doubled())
    adapter, inputs = hf_stitch.load(model), texts(3, 6, "left")
    back = adapter.back("transformer.h.0")
    assert [name for name, module in back.named_modules() if hasattr(module, "_hf_hook")] == ["model.transformer.ln_f"]
    assert hasattr(model.transformer.h[1].attn.c_attn, "_hf_hook")
    with torch.no_grad():
        representation = adapter.encode(inputs, "transformer.h.0")["transformer.h.0"]
        assert torch.equal(back(representation).logits, adapter.forward(inputs).logits)


def test_gradient_checkpointing_changes_nothing() -> None:
    model = make("bert").train()
    checkpointed(model)
    adapter, inputs = hf_stitch.load(model), texts(3, 6, "right")
    layer = adapter.layers[1]
    representation = adapter.encode(inputs, layer)[layer]
    assert same(adapter.decode(representation, layer), adapter.forward(inputs))
    assert all(module.training for module in model.modules())


def test_code_before_the_cut_may_read_attributes_of_modules_after_it() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block(), Block()])
            self.again = nn.ModuleList(self.blocks)
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = x.to(self.head.weight.dtype)
            for block in self.again:
                x = block(x)
            return self.head(x)

    adapter, x = hf_stitch.load(Looking(), example_inputs=torch.randn(2, 8)), torch.randn(3, 8)
    layer = adapter.layers[1]
    with torch.no_grad():
        assert torch.equal(adapter.front(layer)(x=x).values, adapter.encode(x, layer)[layer].values)
        assert torch.equal(adapter.back(layer)(adapter.encode(x, layer)[layer]), adapter.forward(x))


def test_state_left_by_another_forward_does_not_make_a_cut_exact() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.blocks, self.kept = nn.Linear(8, 8), nn.Sequential(Block(), Block()), []

        def forward(self, x: Tensor) -> Tensor:
            self.kept[:] = [x]
            return self.blocks(self.stem(x)) + self.kept[0]

    class Hidden(Stateful):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(self.first(x)) + self.kept[0]

        def first(self, x: Tensor) -> Tensor:
            self.kept[:] = [x.detach()]
            return self.stem(x)

    for kind in (Stateful, Hidden):
        adapter = hf_stitch.load(kind(), example_inputs=torch.randn(2, 8))
        assert adapter.verify_cut("blocks.0").status == "refused"


@pytest.mark.parametrize("size", [(64, 48), (48, 64), (40, 40)])
def test_layers_and_not_shapes_distinguish_channels_from_height(size: tuple[int, int]) -> None:
    adapter = hf_stitch.load(make("timm-resnet"), example_inputs=torch.randn(2, 3, *size))
    assert adapter.spec("layer1.0").layout == "bchw"
    assert adapter.spec("layer1.0").width == 64


def test_a_first_axis_that_is_not_the_batch_is_refused() -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block())

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks(x.flatten(0, 1)).view_as(x).mean(1)

    adapter = hf_stitch.load(Folded(), example_inputs=torch.randn(2, 5, 8))
    assert adapter.layers == ()
    with pytest.raises(hf_stitch.NotACutError, match="axis 0 of its output is not the samples"):
        adapter.encode(torch.randn(2, 5, 8), "blocks.0")


def test_a_stop_of_an_iteration_in_a_forward_is_no_verification() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block())
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            dtype = next(p.dtype for p in self.blocks.parameters() if p.is_floating_point())
            return self.head(self.blocks(x.to(dtype)))

    adapter, x = hf_stitch.load(Reads(), example_inputs=torch.randn(2, 8)), torch.randn(3, 8)
    for layer in adapter.layers:
        assert torch.equal(adapter.decode(adapter.encode(x, layer)[layer], layer), adapter.forward(x))
        assert torch.equal(adapter.back(layer)(adapter.encode(x, layer)[layer]), adapter.forward(x))


def test_channels_before_length_are_positions_with_channels_and_sequences_form_no_grid() -> None:
    conv = nn.Sequential(nn.Conv1d(3, 4, 3), nn.Conv1d(4, 6, 3), nn.Flatten())
    adapter, x = hf_stitch.load(conv, example_inputs=torch.randn(2, 3, 20)), torch.randn(5, 3, 20)
    representation = adapter.encode(x, "0")["0"]
    assert representation.spec == adapter.spec("0") == RepresentationSpec("bnd", 4)
    assert torch.equal(representation.values, conv[0](x).transpose(1, 2))
    assert torch.equal(adapter.decode(representation, "0"), conv(x))
    assert torch.equal(adapter.back("0")(adapter.front("0")(input=x)), conv(x))
    sequence = nn.Sequential(Block(), Block(), nn.Flatten())
    assert hf_stitch.load(sequence, example_inputs=torch.randn(2, 9, 8)).spec("0").grid is None


def test_tokens_before_samples_are_put_in_order() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.blocks = nn.Embedding(50, 8), nn.Sequential(Block(), Block())

        def forward(self, ids: Tensor) -> Tensor:
            return self.blocks(self.embedding(ids.T)).transpose(0, 1)

    adapter, ids = hf_stitch.load(Transposed(), example_inputs={"ids": torch.arange(12).view(2, 6)}), texts(4, 9)
    representation = adapter.encode(ids["input_ids"] % 50, "blocks.0")["blocks.0"]
    assert representation.values.shape == (4, 9, 8)
    assert torch.equal(adapter.decode(representation, "blocks.0"), adapter.forward(ids["input_ids"] % 50))


def test_an_example_with_a_single_token_id_is_sufficient() -> None:
    ids = torch.full((2, 6), 7)
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert len(hf_stitch.load(make("bert"), example_inputs=example).layers) == 3


def test_a_model_that_returns_no_tensor_is_refused() -> None:
    class Mute(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> str:
            return f"{self.inner(x).sum():.3f}"

    with pytest.raises(ValueError, match=r"returns no tensor .* but str"):
        _ = hf_stitch.load(Mute(), example_inputs=torch.randn(2, 4)).layers


def test_a_hook_that_changes_the_function_is_not_dropped_silently() -> None:
    model = make("timm-resnet")
    model.layer1.register_forward_hook(lambda module, args, output: 2 * output)
    adapter = hf_stitch.load(model, example_inputs=images(2))
    with pytest.raises(ValueError, match=r"module 'layer1' of ResNet has a hook"):
        adapter.front("layer2.0")


class Quantised(nn.Module):
    """A layer whose attributes and whose saved state need its weight, as those of quantised layers and of PEFT."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def __getattr__(self, name: str) -> Any:
        transposed = None if name == "weight" else self.__dict__["_parameters"]["weight"].mT
        return transposed if name == "transposed" else super().__getattr__(name)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.transposed


def test_halves_do_not_need_what_is_left_out_of_them() -> None:
    network, x = nn.Sequential(*(Quantised() for _ in range(3))), torch.randn(4, 8)
    adapter = hf_stitch.load(network, example_inputs=x)
    front, back = adapter.front("1"), adapter.back("1")
    assert torch.equal(back(front(input=x)), network(x))
    assert [len(list(half.parameters())) for half in (front, back)] == [2, 1]


def test_a_network_that_cannot_be_copied_is_refused_by_the_name_of_its_module() -> None:
    class Locked(nn.Linear):
        def __deepcopy__(self, memo: Any) -> None:
            raise RuntimeError("no copies")

    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Locked(8, 8))
    adapter = hf_stitch.load(network, example_inputs=torch.randn(4, 8))
    with pytest.raises(ValueError, match=r"Sequential .*cannot be copied.*'2'.*Locked.*no copies"):
        adapter.back("0")
    assert torch.equal(adapter.front("0")(input=torch.ones(1, 8)).values, network[0](torch.ones(1, 8)))


def test_inference_mode_is_supported() -> None:
    adapter, x = hf_stitch.load(make("timm-resnet"), example_inputs=images(2)), images(3)
    with torch.inference_mode():
        assert same(adapter.decode(adapter.encode(x, "layer2.0")["layer2.0"], "layer2.0"), adapter.forward(x))


def test_a_representation_of_another_network_is_not_decoded_in_its_context() -> None:
    a, b = hf_stitch.load(make("hf-vit")), hf_stitch.load(make("timm-vit"))
    with torch.no_grad():
        representation = a.encode(images(2), a.layers[0])[a.layers[0]]
        with pytest.raises(ValueError, match="made by another network"):
            b.decode(representation, b.layers[0])


def test_an_error_of_the_model_on_nan_becomes_the_reason_of_a_refusal() -> None:
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block(), Block())

        def forward(self, x: Tensor) -> Tensor:
            y = self.blocks[1](self.blocks[0](x))
            if not torch.isfinite(y + x).all():
                raise ValueError("non-finite")
            return self.blocks[2](y)

    adapter = hf_stitch.load(Strict(), example_inputs=torch.randn(2, 8))
    assert "non-finite" in str(adapter.verify_cut("blocks.0")) or adapter.verify_cut("blocks.0").status == "refused"
    assert isinstance(adapter.layers, tuple)


def test_blocks_that_pass_on_a_position_bias_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config = hf.T5Config(vocab_size=100, d_model=16, d_kv=8, d_ff=32, num_layers=4, num_heads=2, pad_token_id=0)
    adapter = hf_stitch.load(hf.T5EncoderModel(config).eval())
    blocks: Any = adapter.model.get_submodule("encoder.block")
    inputs = texts(4, 6)
    expected = adapter.forward(inputs).last_hidden_state
    representation = adapter.encode(inputs, "encoder.block.2")["encoder.block.2"]
    for number in (1, 2):
        monkeypatch.setattr(blocks[number], "forward", lambda *_, **__: pytest.fail("it ran"))
    assert torch.equal(adapter.decode(representation, "encoder.block.2").last_hidden_state, expected)


def test_positions_that_a_network_appends_to_a_text_are_no_tokens() -> None:
    config = hf.ReformerConfig(
        vocab_size=100, hidden_size=16, attention_head_size=8, num_attention_heads=2, feed_forward_size=32,
        attn_layers=["local", "local"], local_attn_chunk_length=8, axial_pos_shape=[4, 8], axial_pos_embds_dim=[8, 8],
        is_decoder=False, num_labels=3,
    )  # fmt: skip
    adapter = hf_stitch.load(hf.ReformerForSequenceClassification(config).eval())
    words = "reformer.embeddings.word_embeddings"
    assert adapter.encode(texts(2, 6), words)[words].mask is not None
    padded = adapter.encode(texts(2, 13), words)[words]
    assert padded.values.shape[1] == 16
    assert padded.padding_unknown
    with pytest.raises(ValueError, match="would count padding"):
        padded.rows("mean")


def test_a_config_of_texts_without_a_limit() -> None:
    config = hf.XLNetConfig(vocab_size=100, d_model=16, n_layer=2, n_head=2, d_inner=32)
    assert hf_stitch.load(hf.XLNetModel(config).eval()).interface.max_tokens is None


def test_a_module_whose_error_the_model_catches_is_ignored() -> None:
    class Trying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.wrong, self.blocks = nn.Linear(4, 8), nn.Linear(3, 3), nn.Sequential(Block(), Block())

        def forward(self, x: Tensor) -> Tensor:
            with suppress(RuntimeError):
                x = self.wrong(x)
            return self.blocks(self.stem(x))

    adapter = hf_stitch.load(Trying(), example_inputs=torch.randn(2, 4))
    assert adapter.layers == ("blocks.0", "blocks.1")


def test_a_module_that_gives_its_caller_more_than_hooks_see_is_no_cut_and_stays() -> None:
    """As halves and stitches do (chains). Calls of torch and transformers give what hooks see."""

    class Named(nn.Linear):
        def __call__(self, x: Tensor) -> dict[str, Tensor]:
            return {"values": super().__call__(x)}

    class Layer(Block):  # as the layers of networks in transformers before 5.24
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    Layer.__call__.__module__ = "transformers.modeling_layers"
    blocks = [torch.fx.symbolic_trace(Block()), Block(), Layer()]
    blocks[1].compile(backend="eager")

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.blocks = Named(4, 8), nn.Sequential(*blocks)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.blocks(self.stem(x)["values"])
            return found

    network, x = Whole().eval(), torch.randn(2, 4)
    adapter = hf_stitch.load(network, example_inputs=x)
    assert adapter.layers == ("blocks.0", "blocks.1", "blocks.2")
    assert "stem" not in adapter.cut("blocks.1")[1].stubs
    assert {"blocks.0", "blocks.1"} <= adapter.cut("blocks.2")[1].stubs.keys()
    assert adapter.cut("blocks.1")[1].kind == "stubs"
    assert torch.equal(adapter.decode(adapter.encode(x, "blocks.1")["blocks.1"], "blocks.1"), network(x))


def test_copies_of_halves_run_apart_and_copies_of_their_parts_serve_them() -> None:
    """A program may copy a container of stand-ins (PEFT); it then still receives the values at the cut."""
    network = nn.Sequential(nn.Linear(4, 8), nn.Sequential(Block(), Block(), Block()), nn.Linear(8, 2)).eval()
    adapter, x = hf_stitch.load(network, example_inputs=torch.randn(2, 4)), torch.randn(3, 4)
    front, back, expected = adapter.front("1.1"), adapter.back("1.1"), network(x)
    for half in (front, back):
        twin = copy.deepcopy(half)
        slots = {id(module._slot) for module in twin.modules() if hasattr(module, "_slot")}
        assert slots == {id(twin._slot)} != {id(half._slot)}
        half.model[1] = copy.deepcopy(half.model[1])
    assert torch.equal(back(front(input=x)), expected)


def test_copies_of_halves_with_hooks_of_accelerate_run() -> None:
    """Its hooks keep the forward of a module, which must become that of the copy."""
    network = nn.Sequential(nn.Linear(4, 8), nn.Sequential(Block(), Block(), Block()), nn.Linear(8, 2)).eval()
    adapter, x = hf_stitch.load(network, example_inputs=torch.randn(2, 4)), torch.randn(3, 4)
    front, back = adapter.front("1.1"), adapter.back("1.1")
    for module in (*front.modules(), *back.modules()):
        add_hook_to_module(module, ModelHook())
    assert torch.equal(copy.deepcopy(back)(copy.deepcopy(front)(input=x)), network(x))


class EmptyPixels(nn.Module):
    """Reads several images a sample, and leaves out pixels that are 0, not only images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        real = (images != 0.0).any(2).flatten(1)
        hidden = self.stem(images.permute(0, 1, 3, 4, 2).flatten(1, 3))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head((hidden * real[..., None]).mean(1))


def test_pixels_of_zero_among_several_images_are_no_padding() -> None:
    adapter = hf_stitch.load(EmptyPixels().eval(), example_inputs=torch.randn(2, 2, 3, 8, 8))
    assert adapter.layers == ()
