"""Base models and backbones, also with gradient checkpointing and offloading."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import timm
import timm.layers
import torch
import transformers as hf
from families import BERT, GPT2, SPEECH, T5, VIT, images, texts
from hf_stitch_testing import check_adapter
from tiny_networks import checkpointed
from torch import Tensor, nn

import hf_stitch
from benchmarks import exactness, tiny
from hf_stitch.adapters import Adapter
from hf_stitch.adapters.rewriting import network_of
from hf_stitch.artefacts import StitchedModel

SMALL = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
BART = {**SMALL, "d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "vocab_size": 100, "pad_token_id": 0}
LLAMA = {**BERT, "num_key_value_heads": 2}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 24], "depths": [1, 2, 1], "layer_type": "basic"}
CONVNEXT = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 2, 1]}
WHISPER = {**BART, "num_mel_bins": 16, "max_source_positions": 30, "bos_token_id": 1, "eos_token_id": 2}
TIMM_VIT = {"img_size": 32, "patch_size": 8, "depth": 3, "embed_dim": 48, "num_heads": 3}
TIMM_RESNET = {"channels": (8, 16, 24, 32), "stem_width": 8}
TIMM_SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)}
SOME, LAST = {"out_features": ["stage1", "stage3"]}, {}

base, causal, backbone = (kind.from_config for kind in (hf.AutoModel, hf.AutoModelForCausalLM, hf.AutoBackbone))

MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: base(hf.BertConfig(**BERT)),
    "gpt2": lambda: base(hf.GPT2Config(**GPT2)),
    "t5": lambda: base(hf.T5Config(**T5, decoder_start_token_id=0)),
    "bart": lambda: base(hf.BartConfig(**BART)),
    "vit": lambda: base(hf.ViTConfig(**VIT)),
    "swin": lambda: base(hf.SwinConfig(**SWIN)),
    "resnet": lambda: base(hf.ResNetConfig(**RESNET)),
    "causal gpt2": lambda: causal(hf.GPT2Config(**GPT2)),
    "causal llama": lambda: causal(hf.LlamaConfig(**LLAMA)),
    "causal bert": lambda: causal(hf.BertConfig(**BERT, is_decoder=True)),
    "backbone resnet": lambda: backbone(hf.ResNetConfig(**RESNET, **SOME)),
    "backbone swin": lambda: backbone(hf.SwinConfig(**SWIN, out_features=["stage1", "stage2"])),
    "backbone convnext": lambda: backbone(hf.ConvNextConfig(**CONVNEXT, out_features=["stage2", "stage4"])),
    "backbone dinov2": lambda: backbone(hf.Dinov2Config(**VIT, **SOME)),
    "backbone dinov2, last map": lambda: backbone(hf.Dinov2Config(**VIT, **LAST)),
    "backbone beit, last map": lambda: backbone(hf.BeitConfig(**VIT)),
    "features resnet": lambda: timm.create_model("resnet10t", features_only=True, **TIMM_RESNET),
    "features vit": lambda: timm.create_model("vit_tiny_patch16_224", features_only=True, **TIMM_VIT),
    "features swin": lambda: timm.create_model("swin_tiny_patch4_window7_224", features_only=True, **TIMM_SWIN),
    "features tinynet": lambda: timm.create_model("tinynet_e", features_only=True),
    "headless resnet": lambda: timm.create_model("resnet10t", num_classes=0, **TIMM_RESNET),
    "headless vit": lambda: timm.create_model("vit_tiny_patch16_224", num_classes=0, global_pool="", **TIMM_VIT),
    "dropping resnet": lambda: timm.create_model("resnet10t", drop_path_rate=0.5, **TIMM_RESNET),
    "dropping vit": lambda: timm.create_model("vit_tiny_patch16_224", drop_path_rate=0.5, **TIMM_VIT),
    "headless swin": lambda: timm.create_model("swin_tiny_patch4_window7_224", num_classes=0, **TIMM_SWIN),
    "speech wav2vec2": lambda: base(hf.Wav2Vec2Config(**SPEECH)),
    "speech wav2vec2, letters": lambda: hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**SPEECH)),
    "speech hubert": lambda: base(hf.HubertConfig(**SPEECH)),
    "speech ast": lambda: base(hf.ASTConfig(**VIT, max_length=64, num_mel_bins=32)),
    "speech whisper": lambda: base(hf.WhisperConfig(**WHISPER, decoder_start_token_id=1)),
    "decoder of whisper": lambda: causal(hf.WhisperConfig(**WHISPER, decoder_start_token_id=1)),
}
SWEPT_ELSEWHERE = ("vit", "causal gpt2", "causal llama", "dropping resnet", "dropping vit")
"""Networks whose cuts ``test_exact_cuts.py`` checks."""

SIZELESS = [name for name in MODELS if name.endswith(("resnet", "convnext", "tinynet"))]
"""Networks that accept images of any size, and receive small ones here."""


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return tiny.shaken(MODELS[name]())


def load(model: nn.Module, name: str) -> Adapter:
    dtype = next(model.parameters()).dtype
    return hf_stitch.load(model, example_inputs=images(2, 64).to(dtype) if name in SIZELESS else None)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in SWEPT_ELSEWHERE])
def test_models_have_at_least_two_cuts_and_all_are_exact(name: str) -> None:
    adapter = load(make(name), name)
    layers = adapter.layers
    assert len(layers) > 1
    exactness.check(adapter, layers)
    if "backbone" in name:  # hooks on the blocks collect hidden states, which their replacements in halves need too
        check_adapter(adapter, *exactness.fresh(adapter))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["bert", "causal llama", "vit", "swin", "bart"])
def test_cuts_are_exact_in_bf16_with_either_attention(name: str, attention: str) -> None:
    model: Any = make(name).to(torch.bfloat16)
    model.set_attn_implementation(attention)
    adapter = load(model, name)
    assert adapter.verify_cut(adapter.layers[0]).plan == "stubs"
    exactness.check(adapter, adapter.layers)
    representation = adapter.encode(next(exactness.fresh(adapter)), adapter.layers[0])[adapter.layers[0]]
    assert representation.values.dtype == torch.bfloat16


# -- backbones ------------------------------------------------------------------------------------------------------
def test_a_rebuilt_half_collects_hidden_states() -> None:
    adapter = load(make("backbone dinov2, last map"), "")
    layer, inputs = adapter.layers[1], next(exactness.fresh(adapter))
    cut, plan = adapter.cut(layer)
    again = type(plan).from_dict(plan.to_dict())
    back = hf_stitch.adapters.Back(network_of(adapter.blueprint()), cut, again, adapter.interface)
    back.load_state_dict(adapter.back(layer).state_dict())
    with torch.no_grad():
        output = back(adapter.encode(inputs, layer)[layer])
        assert exactness.agree(exactness.bits(output), exactness.bits(adapter.model(**inputs)))


# -- gradient checkpointing -----------------------------------------------------------------------------------------
def gradients(model: nn.Module, output: Any) -> dict[str, Tensor]:
    values = [t for t in exactness.bits(output) if t.requires_grad]
    torch.stack([t.float().square().sum() for t in values]).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def check_gradients(adapter: Adapter, model: Any, training: bool) -> None:
    """Check that gradients through encode and decode are those of the plain model, and the model does not change."""
    inputs = next(exactness.fresh(adapter))
    plain = copy.deepcopy(model).eval()
    expected = gradients(plain, plain(**{**adapter.interface.options, **inputs}))
    model.train(training)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for layer in adapter.layers:
        found = gradients(model, adapter.decode(adapter.encode(inputs, layer)[layer], layer))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(module.training == training for module in model.modules())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("reentrant", "training"), [(False, True), (True, False)])
@pytest.mark.parametrize("name", ["causal llama", "swin", "dropping vit", "dropping resnet"])
def test_cuts_are_exact_under_gradient_checkpointing(name: str, reentrant: bool, training: bool) -> None:
    """Recomputation in a backward pass would use dropout, and update statistics of BatchNorm in training mode."""
    model: Any = make(name)
    plain, before = copy.deepcopy(model), timm.layers.use_reentrant_ckpt()
    if of_timm := name.startswith("dropping"):
        timm.layers.set_reentrant_ckpt(reentrant)
        model.set_grad_checkpointing(True)
    else:
        checkpointed(model, use_reentrant=reentrant)
    try:
        adapter = load(model.train(training), name)
        assert len(adapter.layers) > 2
        inputs = next(exactness.fresh(adapter))
        with torch.no_grad():
            expected = plain.eval()(**{**adapter.interface.options, **inputs})
            assert exactness.agree(exactness.bits(adapter.forward(inputs)), exactness.bits(expected))
        check_gradients(adapter, model, training)
        assert not of_timm or model.grad_checkpointing
        model.eval()
        exactness.check(adapter, adapter.layers)
    finally:
        timm.layers.set_reentrant_ckpt(before)


@pytest.mark.parametrize("name", ["swin", "headless vit"])
def test_halves_are_not_checkpointed_across_the_cut(name: str) -> None:
    model: Any = make(name)
    model.set_grad_checkpointing() if name == "headless vit" else checkpointed(model)
    adapter = load(model, name)
    layer, inputs = adapter.layers[1], next(exactness.fresh(adapter))
    front, back = adapter.front(layer).train(), adapter.back(layer).train()
    gradients(back, back(front(**inputs)))
    if name == "swin":  # checkpoints that are switched on again raise an error
        back.model.encoder.layers[0].gradient_checkpointing = True
        with pytest.raises(RuntimeError, match="Disable gradient checkpointing"):
            gradients(back, back(front(**inputs)))


def test_stitched_models_do_not_support_checkpoints_across_a_cut() -> None:
    def stitched(name: str) -> StitchedModel:
        net = load(make(name), name)
        cut = net.layers[1]
        return hf_stitch.stitch(net, net, images(4), source_layer=cut, target_layer=cut, matcher="identity", task=None)

    assert stitched("vit").supports_gradient_checkpointing
    assert not stitched("swin").supports_gradient_checkpointing


# -- offloading ------------------------------------------------------------------------------------------------------
def spread(model: nn.Module, places: tuple[str, ...]) -> dict[str, str]:
    """Assign the blocks and the other modules to the places in order."""
    names: list[str] = []
    for name, module in model.named_modules():
        block = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.ModuleList)
        holds_blocks = any(isinstance(child, nn.ModuleList) for child in module.modules())
        inside = name.startswith(tuple(f"{other}." for other in names))
        if name and not inside and (block or not holds_blocks):
            names.append(name)
    return {name: places[i * len(places) // len(names)] for i, name in enumerate(names)}


def check_as(adapter: Adapter, plain: nn.Module) -> None:
    """Check that the network of an adapter is exact at each cut and equals a plain one."""
    layers = adapter.layers
    assert len(layers) > 1 and adapter.device == torch.device("cpu")
    exactness.check(adapter, layers)
    inputs = next(exactness.fresh(adapter))
    with torch.no_grad():
        expected = exactness.bits(plain(**{**adapter.interface.options, **inputs}))
        assert exactness.agree(exactness.bits(adapter.forward(inputs)), expected)


def check_halves(adapter: Adapter) -> nn.Module:
    """Check that halves give the same bits, and return the last one."""
    layer, inputs = adapter.layers[0], next(exactness.fresh(adapter))
    front, back = adapter.front(layer), adapter.back(layer)
    with torch.no_grad():
        found = front(**inputs)
        assert torch.equal(found.values, adapter.encode(inputs, layer)[layer].values)
        assert exactness.agree(exactness.bits(back(found)), exactness.bits(adapter.forward(inputs)))
    return back


@pytest.mark.filterwarnings("ignore:.*pass processor= to hf_stitch.load to use raw samples")
@pytest.mark.parametrize(
    ("name", "places"), [("causal llama", ("cpu",)), ("causal llama", ("cpu", "disk")), ("vit", ("disk", "cpu"))]
)
def test_models_loaded_with_device_map(name: str, places: tuple[str, ...], tmp_path: Path) -> None:
    plain: Any = make(name)
    plain.save_pretrained(tmp_path / "model")
    options = {"device_map": spread(plain, places), "offload_folder": str(tmp_path / "offload")}
    adapter = hf_stitch.load(str(tmp_path / "model"), **options)
    check_as(adapter, plain)
    check_halves(adapter)
    assert any(p.is_meta for p in adapter.model.parameters()) == ("disk" in places)


OFFLOADED: dict[str, tuple[str, Callable[[nn.Module, Path], nn.Module]]] = {
    "all on the cpu": (
        "headless swin", lambda model, folder: accelerate.cpu_offload(model, execution_device="cpu"),
    ),
    "all on disk": (
        "causal gpt2", lambda model, folder: accelerate.disk_offload(model, str(folder), execution_device="cpu"),
    ),
    "begin on disk": (
        "headless swin", lambda model, folder: accelerate.dispatch_model(
            model, spread(model, ("disk", "cpu")), main_device="cpu", offload_dir=str(folder)
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", OFFLOADED)
def test_offloaded_models(how: str, tmp_path: Path) -> None:
    name, offload = OFFLOADED[how]
    plain = make(name)
    model = offload(copy.deepcopy(plain), tmp_path)
    adapter = hf_stitch.load(model)
    with torch.no_grad():
        adapter.model(**adapter.example)  # accelerate unties weights in the first forward
    waiting = [p.is_meta for p in model.parameters()]
    check_as(adapter, plain)
    back = check_halves(adapter)
    assert any(waiting) and (how == "begin on disk" or any(p.is_meta for p in back.parameters()))
    assert [p.is_meta for p in model.parameters()] == waiting


# -- inputs of encoder-decoders, CLIP and feature extractors -----------------------------------------------------------
@pytest.mark.parametrize(
    ("model", "content", "stack"),
    [
        (lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5, decoder_start_token_id=0)), "input_ids", "encoder"),
        (lambda: hf.BartForConditionalGeneration(hf.BartConfig(**BART)), "decoder_input_ids", "decoder"),
    ],
    ids=["t5", "bart"],
)
def test_preprocess_creates_decoder_inputs(model: Any, content: str, stack: str, tokenizer: Any) -> None:
    network = model().eval()
    adapter = hf_stitch.load(network, processor=tokenizer, content=content)
    inputs = adapter.preprocess(["a b c d e", "f g"], offsets=True)
    spans = inputs.pop("offset_mapping")
    assert torch.equal(inputs["decoder_input_ids"], network.prepare_decoder_input_ids_from_labels(inputs["input_ids"]))
    assert inputs["decoder_attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    moved = content == "decoder_input_ids"
    assert spans[1].tolist() == ([[0, 0]] if moved else []) + [[0, 1], [2, 3], [0, 0], [0, 0]] + [[0, 0]] * (not moved)
    check_adapter(adapter, inputs, adapter.preprocess(["a b", "c d e f"]))
    layer = adapter.layers[0]
    assert len(adapter.layers) == 3 and all(f"{stack}." in name for name in adapter.layers)
    assert len(adapter.encode(inputs, layer)[layer].rows("none")) == (8 if moved else 7)
    other = "input_ids" if moved else "decoder_input_ids"
    with pytest.raises(ValueError, match=f"lack {other}"):
        adapter.encode({name: value for name, value in inputs.items() if name != other}, layer)


def test_a_missing_decoder_start_token_is_an_error(tokenizer: Any) -> None:
    adapter = hf_stitch.load(hf.T5Model(hf.T5Config(**T5)).eval(), processor=tokenizer)
    with pytest.raises(ValueError, match=r"set model\.config\.decoder_start_token_id"):
        adapter.preprocess(["a b"])


@pytest.mark.parametrize("kind", [hf.CLIPTextModel, hf.CLIPTextModelWithProjection])
@pytest.mark.parametrize("end", [2, 99])
def test_clip_finds_the_end_of_texts_with_old_configs_too(kind: Any, end: int) -> None:
    torch.manual_seed(0)
    config = hf.CLIPTextConfig(**BERT, eos_token_id=end, bos_token_id=1, pad_token_id=0)
    adapter = hf_stitch.load(tiny.shaken(kind(config)))
    inputs = texts(4, 9, "right")
    last = inputs["attention_mask"].sum(1) - 1
    inputs["input_ids"] = inputs["input_ids"].clamp(max=98).scatter(1, last[:, None], 99)
    assert len(adapter.layers) == 3
    check_adapter(adapter, inputs)


def test_feature_extractors_of_another_size_get_images_of_that_size() -> None:
    adapter = hf_stitch.load(make("features vit"))
    assert adapter.example["x"].shape == (2, 3, 32, 32)
    assert adapter.processor.input_size == (3, 32, 32)


def test_wav2vec2_returns_the_input_of_its_encoder_which_has_no_cuts() -> None:
    adapter = hf_stitch.load(make("speech wav2vec2"))
    assert adapter.layers == ("feature_extractor.conv_layers.0", "feature_extractor.conv_layers.1")
    assert "bypasses" in adapter.verify_cut("encoder.layers.1").reason
    assert hf_stitch.load(make("speech wav2vec2, letters")).layers[0] == "wav2vec2.encoder.layers.0"
