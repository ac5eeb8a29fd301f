"""Common silent errors of feature extraction: bypasses, padding, in-place operations, leaks."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from accelerate.hooks import ModelHook, add_hook_to_module, attach_align_device_hook
from families import GPT2, Block, Code, FlatNet, images, make, texts
from torch import Tensor, nn

import hf_stitch
from hf_stitch.representation import RepresentationSpec


def test_in_place_operations_after_the_cut_do_not_change_captured_values() -> None:
    model = make("user-code")
    adapter = hf_stitch.load(model, example_inputs=images(2))
    with torch.no_grad():
        captured = adapter.encode(images(2), ["bn1", "bn2"])
        assert captured["bn1"].values.min() < 0
        assert torch.equal(captured["bn1"].values, model.bn1(model.conv1(images(2))))


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_head_that_searches_for_the_last_token_finds_it_without_the_ids(side: str) -> None:
    """GPT-2's classifier reads input_ids, which decode never sees.

    The context must contain the ends of texts, even if padding and end of text have the same id.
    """
    torch.manual_seed(0)
    adapter = hf_stitch.load(hf.GPT2ForSequenceClassification(hf.GPT2Config(**{**GPT2, "pad_token_id": 2})).eval())
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


class Padded(nn.Module):
    """User code that looks for padding among its token ids, as ESM-2 of fair-esm does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=1)
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(8, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens.eq(self.embedding.padding_idx)
        x, real = self.embedding(tokens), None if not padding.any() else ~padding[..., None]
        for block in self.blocks:
            x = block(x) if real is None else block(x) * real
        return self.head(x)


def test_user_code_that_looks_for_padding_is_cut() -> None:
    network, tokens = Padded().eval(), torch.tensor([[3, 4, 5, 1, 1], [3, 4, 5, 6, 7]])
    adapter = hf_stitch.load(network, example_inputs=torch.randint(2, 20, (2, 6)))
    assert adapter.layers == ("blocks.0", "blocks.1")
    for layer in adapter.layers:
        encoded = adapter.encode(tokens, layer)[layer]
        assert set(encoded.context["tokens"].unique().tolist()) == {adapter.interface.filler_id, 1}
        assert torch.equal(adapter.decode(encoded, layer), network(tokens))


def test_an_attention_without_gradients_is_named() -> None:
    """That of flex_attention has none on CPUs, and the trace needs them."""

    def attend(self: Any, x: Tensor) -> Tensor:
        if x.requires_grad and self.config._attn_implementation == "flex_attention":
            raise NotImplementedError("no backward on CPU.")
        return self.second(self.first(x))

    network = Code(attend, first=nn.Linear(4, 4), second=nn.Linear(4, 2))
    network.config = SimpleNamespace(_attn_implementation="flex_attention")  # type: ignore[assignment]
    adapter = hf_stitch.load(nn.Sequential(network), example_inputs=torch.randn(2, 4))
    with pytest.raises(ValueError, match=r'on CPU\. Its attention .* flex_.*load it with attn_implementation="sdpa"'):
        adapter.layers  # noqa: B018
    network.config._attn_implementation = "sdpa"  # type: ignore[union-attr]
    assert adapter.layers == ("0",)


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


def test_an_example_with_a_single_token_id_is_sufficient() -> None:
    ids = torch.full((2, 6), 7)
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert len(hf_stitch.load(make("bert"), example_inputs=example).layers) == 3


def test_a_hook_that_changes_the_function_is_not_dropped_silently() -> None:
    model = make("timm-resnet")
    model.layer1.register_forward_hook(lambda module, args, output: 2 * output)
    adapter = hf_stitch.load(model, example_inputs=images(2))
    with pytest.raises(ValueError, match=r"module 'layer1' of ResNet has a hook"):
        adapter.front("layer2.0")


def test_a_network_that_cannot_be_copied_is_refused_by_the_name_of_its_module() -> None:
    class Locked(nn.Linear):
        def __deepcopy__(self, memo: Any) -> None:
            raise RuntimeError("no copies")

    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Locked(8, 8))
    adapter = hf_stitch.load(network, example_inputs=torch.randn(4, 8))
    with pytest.raises(ValueError, match=r"Sequential .*cannot be copied.*'2'.*Locked.*no copies"):
        adapter.back("0")
    assert torch.equal(adapter.front("0")(input=torch.ones(1, 8)).values, network[0](torch.ones(1, 8)))


def test_a_representation_of_another_network_is_not_decoded_in_its_context() -> None:
    a, b = hf_stitch.load(make("hf-vit")), hf_stitch.load(make("timm-vit"))
    with torch.no_grad():
        representation = a.encode(images(2), a.layers[0])[a.layers[0]]
        with pytest.raises(ValueError, match="comes from another network"):
            b.decode(representation, b.layers[0])


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


def test_a_config_of_texts_without_a_limit() -> None:
    config = hf.XLNetConfig(vocab_size=100, d_model=16, n_layer=2, n_head=2, d_inner=32)
    assert hf_stitch.load(hf.XLNetModel(config).eval()).interface.max_tokens is None


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
    """A program may copy a container of stand-ins (PEFT); it then still receives the values at the cut.

    Hooks of accelerate keep the forward of a module, which must become that of the copy.
    """
    network = nn.Sequential(nn.Linear(4, 8), nn.Sequential(Block(), Block(), Block()), nn.Linear(8, 2)).eval()
    adapter, x = hf_stitch.load(network, example_inputs=torch.randn(2, 4)), torch.randn(3, 4)
    front, back, expected = adapter.front("1.1"), adapter.back("1.1"), network(x)
    for half in (front, back):
        twin = copy.deepcopy(half)
        slots = {id(module._slot) for module in twin.modules() if hasattr(module, "_slot")}
        assert slots == {id(twin._slot)} != {id(half._slot)}
        half.model[1] = copy.deepcopy(half.model[1])
    assert torch.equal(back(front(input=x)), expected)
    for module in (*front.modules(), *back.modules()):
        add_hook_to_module(module, ModelHook())
    assert torch.equal(copy.deepcopy(back)(copy.deepcopy(front)(input=x)), expected)


def test_pixels_of_zero_among_several_images_are_no_padding() -> None:
    """A network of several images a sample may leave out pixels that are 0, not only images."""

    def run(net: Any, images: Tensor) -> Tensor:
        real = (images != 0.0).any(2).flatten(1)
        hidden = net.blocks(net.stem(images.permute(0, 1, 3, 4, 2).flatten(1, 3)))
        return net.head((hidden * real[..., None]).mean(1))

    net = Code(run, stem=nn.Linear(3, 8), blocks=nn.Sequential(Block(), Block(), Block()), head=nn.Linear(8, 5))
    assert hf_stitch.load(net, example_inputs=torch.randn(2, 2, 3, 8, 8)).layers == ()
