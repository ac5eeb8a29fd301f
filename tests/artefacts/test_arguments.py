"""Every argument of forward, key of a config and option of from_pretrained is used, or refused by name."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import hf_stitch
import hf_stitch.auto
from hf_stitch import StitchedModel
from hf_stitch.artefacts.joining import join
from hf_stitch.stitches import IdentityStitch, StitchingLayer

from forms import load_form  # isort: skip
from tiny_networks import LAYERS, adapted, build, network, plain_tokenizer, stitched  # isort: skip

LLAMA = LAYERS["llama"]


@pytest.fixture
def whole(equal: Any) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """A copy of a stitched model, its network and inputs, which a test may change."""
    found: tuple[Any, Any, dict[str, torch.Tensor]] = copy.deepcopy(equal)
    return found


@pytest.fixture(scope="module")
def equal(texts: Any) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """A stitched model that computes what a Llama does, this Llama, and padded inputs with labels."""
    adapter = network("llama")
    model = stitched(adapter, adapter, texts, (LLAMA, LLAMA), matcher="identity")
    given = model.preprocess([sample["text"] for sample in texts[:4]])
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    return model, build("llama", 0), {**given, "labels": labels}


@pytest.mark.parametrize("items", [None, 7, torch.tensor(7)])
@pytest.mark.parametrize("shifted", ["labels", "shift_labels", "both"])
def test_the_loss_is_that_of_the_network(whole: Any, items: Any, shifted: str) -> None:
    model, plain, given = whole
    labels = given.pop("labels")
    ahead = labels.roll(-1, 1).masked_fill(torch.arange(labels.shape[1]) == labels.shape[1] - 1, -100)
    targets = {"labels": labels, "shift_labels": ahead}
    chosen = targets if shifted == "both" else {shifted: targets[shifted]}
    expected = plain(**given, **targets, num_items_in_batch=items).loss
    torch.testing.assert_close(model(**given, **chosen, num_items_in_batch=items).loss, expected, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def refusing(equal: Any, of_images: Any, images: Any, texts: Any) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Stitched models that use few arguments, and what they do use."""
    model, _, given = equal
    pixels = torch.stack([sample["image"] for sample in images[:3]])
    found = {"llama": (model, given), "images": (of_images, {"pixel_values": pixels, "labels": torch.arange(3)})}
    bloom = transformers.BloomConfig(hidden_size=24, n_layer=3, n_head=4, vocab_size=80, bos_token_id=1, eos_token_id=2)
    a = adapted("gpt2", transformers.BloomForCausalLM(bloom).eval())
    ids = {"input_ids": torch.tensor([[7, 12, 30, 9]])}
    unnumbered = stitched(a, a, texts, (a.layers[1],) * 2, matcher="identity")
    layers = ("target.transformer.h.2", "transformer.h.1")
    chain = stitched(unnumbered, a, texts, layers, matcher="identity", task="text-generation")
    wrapped, layer = load_form("bert", "wrapped"), "inner.bert.encoder.layer.1"
    inside = stitched(wrapped, wrapped, texts, (layer, layer), matcher="identity")
    return found | {"bloom": (unnumbered, ids), "chain": (chain, ids), "wrapped": (inside, ids)}


POSITIONS = {"position_ids": torch.full((1, 4), 3)}
UNUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"output_router_logits": True}, "output_router_logits"),
    ("llama", {"token_type_ids": torch.ones(4, 8, dtype=torch.int64)}, "token_type_ids"),
    ("llama", {"pixel_values": torch.zeros(4, 3, 8, 8)}, "pixel_values"),
    ("llama", {"cu_seq_lens_q": torch.tensor([0, 4])}, "cu_seq_lens_q"),
    ("llama", {"source_kept": torch.zeros(4, 2, dtype=torch.int64)}, "source_kept"),
    ("llama", {"poetry": 1}, "poetry"),
    ("images", {"output_hidden_states": torch.ones(3)}, "output_hidden_states"),
    ("images", {"num_items_in_batch": torch.ones(3)}, "num_items_in_batch"),
    ("images", {"attention_mask": torch.ones(3)}, "attention_mask"),
    ("bloom", POSITIONS, r"neither network .* uses position_ids"),
    ("chain", POSITIONS, "uses position_ids"),
    ("wrapped", {"poetry": 1}, "poetry"),
]


@pytest.mark.parametrize(("which", "unused", "message"), UNUSED)
def test_an_unused_argument_is_refused_by_name(which: str, unused: dict[str, Any], message: str, refusing: Any) -> None:
    model, given = refusing[which]
    with pytest.raises(ValueError, match=message):
        model(**given, **unused)
    assert model(**given, **dict.fromkeys(unused)).logits is not None
    if which in ("bloom", "chain"):
        with pytest.raises(ValueError, match=message):
            model.generate(**given, **unused)
        assert model.generate(**given, max_new_tokens=2).shape == (1, 6)


def test_arguments_that_change_nothing_are_left_out(refusing: Any) -> None:
    model, given = refusing["llama"]
    zeros = torch.zeros_like(given["input_ids"])
    assert torch.equal(model(**given, token_type_ids=zeros).logits, model(**given).logits)
    model, given = refusing["images"]
    assert "attention_mask" not in inspect.signature(model.forward).parameters
    assert torch.equal(model(**given, use_cache=False).logits, model(**given).logits)


def test_a_wrapper_takes_what_the_network_inside_names(refusing: Any) -> None:
    model, given = refusing["wrapped"]
    assert torch.equal(model(**given, **POSITIONS).logits, build("bert", 0)(**given, **POSITIONS).logits)


class Swallowing(nn.Module):
    """User code whose forward takes any arguments and uses one of those that it does not name."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, input: Tensor, **others: Any) -> Tensor:
        return self.head(self.body(input) + others["shift"])


def test_user_code_that_takes_anything_uses_what_its_example_contains() -> None:
    given = {"input": torch.randn(3, 4), "shift": torch.arange(3)[:, None]}
    a = hf_stitch.load(Swallowing().eval(), example_inputs=given, content="input")
    b = hf_stitch.load(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), example_inputs=given["input"])
    layer = StitchingLayer(a.spec("body"), b.spec("0"), "flatten", IdentityStitch(8, 8))
    model = join(a, "body", layer, b, "0", task=None)
    assert torch.equal(model(**given), b.model[1](a.model.body(given["input"])))
    with pytest.raises(ValueError, match=r"the source, Swallowing, .* uses poetry: .*name it in the forward"):
        model(**given, poetry=1)


CHANGED: dict[str, Any] = {"output_router_logits": True, "chunk_size_feed_forward": 2, "is_encoder_decoder": True}
READ = {
    "architectures", "_name_or_path", "dtype", "id2label", "label2id", "model_type", "problem_type", "return_dict",
    "transformers_version", "output_hidden_states", "output_attentions",
}  # fmt: skip
"""Keys that describe the model, or that other tests change."""


def test_the_keys_of_a_config_are_all_listed_here() -> None:
    assert READ | CHANGED.keys() >= transformers.PreTrainedConfig().to_dict().keys()


@pytest.mark.parametrize("name", CHANGED)
def test_a_key_of_the_config_that_nothing_uses_is_refused_by_name(whole: Any, name: str) -> None:
    model, _, given = whole
    model.set_attn_implementation("eager")
    setattr(model.config, name, CHANGED[name])
    with pytest.raises(ValueError, match=f"config.{name}"):
        model(**given)


def test_the_config_decides_what_is_returned_unless_an_argument_does(whole: Any) -> None:
    model, _, given = whole
    model.config.output_hidden_states = model.config.use_cache = True
    assert isinstance(model(**given, output_hidden_states=False)[-1], transformers.Cache)
    assert not isinstance(model(**given, use_cache=False, output_hidden_states=False)[-1], transformers.Cache)
    model.config.use_cache, model.config.return_dict = None, False
    assert isinstance(model(**given, output_hidden_states=False), tuple)


def test_a_config_decides_how_labels_are_read_and_how_many_outputs_a_new_model_has(of_images: Any, images: Any) -> None:
    config, pixels = copy.deepcopy(of_images.config), torch.stack([sample["image"] for sample in images[:3]])
    for kind, labels, loss in (
        ("multi_label_classification", torch.ones(3, 1), functional.binary_cross_entropy_with_logits),
        ("regression", torch.ones(3), functional.mse_loss),
    ):
        config.problem_type, config.num_labels = kind, 1
        found = type(of_images)(copy.deepcopy(config))(pixels, labels)
        assert torch.equal(found.loss, loss(found.logits, torch.ones(3, 1)))
    config.problem_type = "poetry"
    with pytest.raises(ValueError, match=r"config.problem_type 'poetry' does not fit a head for image-classification"):
        type(of_images)(config)(pixels, labels)


WITHOUT_EFFECT: Mapping[str, Any] = {
    "use_safetensors": True, "weights_only": True, "low_cpu_mem_usage": True, "trust_remote_code": True,
    "adapter_kwargs": {"token": "hf_x", "revision": "main"}, "_from_auto": True, "_commit_hash": "0" * 40,
}  # fmt: skip
REFUSED: Mapping[str, Any] = {
    "use_safetensors": False, "weights_only": False, "code_revision": "main", "variant": "fp16",
    "adapter_kwargs": {"_adapter_model_path": "folder"}, "state_dict": {}, "quantization_config": {"bits": 4},
    "tp_plan": "auto", "key_mapping": {"a": "b"}, "ignore_mismatched_sizes": True,
    "gguf_file": "x.gguf", "generation_config": object(), "attn": "eager", "proxies": {"https": "x"},
    "revison": "old", "dtype": "bf16", "torch_dtype": torch.int8,
}  # fmt: skip
TOLD = {
    "adapter_kwargs": "PEFT adapter", "revison": "unexpected option 'revison'; did you mean 'revision'",
    "quantization_config": "quantization_config: quantize both", "torch_dtype": "dtype must be a floating-point",
}  # fmt: skip
"""What an error contains beside the name, or in its place."""


def test_each_option_of_from_pretrained_has_an_effect_or_is_refused(folders: Path, of_images: Any, images: Any) -> None:
    folder, given = folders / "model", {"pixel_values": torch.stack([sample["image"] for sample in images[:3]])}
    with torch.device("meta"), pytest.raises(RuntimeError, match="meta device"):
        StitchedModel.from_pretrained(folder)
    for name, value in REFUSED.items():
        with pytest.raises((TypeError, ValueError), match=TOLD.get(name, name)):
            StitchedModel.from_pretrained(folder, **{name: value})
    found = StitchedModel.from_pretrained(folder, **WITHOUT_EFFECT)
    assert torch.equal(found(**given).logits, of_images(**given).logits)
    signature = inspect.signature(transformers.PreTrainedModel.from_pretrained).parameters
    ours = inspect.signature(StitchedModel.from_pretrained).parameters.keys() | WITHOUT_EFFECT.keys() | REFUSED.keys()
    downloads = hf_stitch.hub.DownloadOptions.__annotations__.keys()
    for name in signature.keys() - ours - downloads - {"pretrained_model_name_or_path", "model_args"}:
        with pytest.raises(TypeError, match=name):
            StitchedModel.from_pretrained(folder, **{name: object()})


# -- adapters of PEFT --------------------------------------------------------------------------------------------------


def _adapter_beside(folder: Path, base: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{base}", "peft_type": "LORA"}}')
    (folder / "adapter_model.safetensors").write_bytes(b"")


def test_a_folder_with_a_peft_adapter_is_refused(whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, alone, network = (tmp_path / name for name in ("model", "adapter", "network"))
    whole[0].save_pretrained(saved)
    _adapter_beside(alone, saved)
    _adapter_beside(saved, saved)
    for load in (StitchedModel.from_pretrained, hf_stitch.load, transformers.AutoModelForCausalLM.from_pretrained):
        for folder in (alone, saved):
            with pytest.raises((ValueError, FileNotFoundError), match=r"PEFT adapter.*PeftModel.from_pretrained"):
                load(str(folder))
    build("llama", 0).save_pretrained(network)
    plain_tokenizer().save_pretrained(network)
    _adapter_beside(network, network)
    monkeypatch.setattr("transformers.utils.is_peft_available", lambda: False)
    with pytest.raises(ImportError, match="PEFT adapter"):
        hf_stitch.load(str(network))
