"""Loading: names, folders, tasks and processors, without unpickling or running code of a repository."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import timm
import torch
import transformers as hf
from families import BERT, VIT, make
from PIL import Image

import hf_stitch
from hf_stitch.adapters.rewriting import network_of


def test_the_task_of_a_timm_model_is_that_of_its_head() -> None:
    options = {"pretrained": False, "num_classes": 3}
    assert hf_stitch.load("timm:resnet10t", task="image-classification", **options).task == "image-classification"
    headless = hf_stitch.load("timm:resnet10t", task="image-classification", **options | {"num_classes": 0})
    assert headless.task is None  # a command passes one task to both networks


def test_a_transformers_folder_with_its_image_processor(tmp_path: Path) -> None:
    model = hf.ViTForImageClassification(hf.ViTConfig(**VIT)).eval()
    model.save_pretrained(tmp_path)
    hf.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    adapter = hf_stitch.load(str(tmp_path))
    assert type(adapter.model) is hf.ViTForImageClassification
    assert adapter.task == "image-classification"
    inputs = adapter.preprocess([Image.new("L", (50, 40), 128), Image.new("RGB", (8, 8))])
    assert inputs["pixel_values"].shape == (2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(adapter.forward(inputs).logits, model(**inputs).logits)


def test_the_task_selects_the_head(tmp_path: Path) -> None:
    hf.BertForMaskedLM(hf.BertConfig(**BERT)).save_pretrained(tmp_path)
    assert type(hf_stitch.load(str(tmp_path)).model) is hf.BertForMaskedLM
    assert type(hf_stitch.load(str(tmp_path), task="text-classification").model) is hf.BertForSequenceClassification
    with pytest.raises(ValueError, match="task must be one of"):
        hf_stitch.load(str(tmp_path), task="poetry")


def test_a_class_that_transformers_does_not_have_is_named(tmp_path: Path) -> None:
    hf.ViTForImageClassification(hf.ViTConfig(**VIT)).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("ViTForImageClassification", "ViTForPictureClassification"))
    with pytest.warns(UserWarning, match="ViTForPictureClassification .*not in transformers.*without its head.*task="):
        assert type(hf_stitch.load(str(tmp_path)).model) is hf.ViTModel
    assert type(hf_stitch.load(str(tmp_path), task="image-classification").model) is hf.ViTForImageClassification


def test_a_timm_folder_with_its_transform(tmp_path: Path) -> None:
    model = timm.create_model("resnet10t", num_classes=3, in_chans=1).eval()
    timm.models.save_for_hf(model, tmp_path, model_args={"in_chans": 1}, safe_serialization=True)
    adapter = hf_stitch.load(str(tmp_path))
    assert adapter.reference.library == "timm"
    inputs = adapter.preprocess([Image.new("RGB", (50, 40))])
    assert inputs["x"].shape[1] == 1
    with torch.no_grad():
        assert torch.equal(adapter.forward(inputs), model(inputs["x"]))


def test_a_gguf_file_has_everything(tmp_path: Path) -> None:
    """Weights, config and tokenizer come from it: no other file is in the folder."""
    pytest.importorskip("transformers.integrations.gguf")
    model = gguf_files.lfm2()
    gguf_files.write(model, tmp_path / "tiny-F32.gguf")
    adapter, by_file = hf_stitch.load(tmp_path, gguf_file="tiny-F32.gguf"), hf_stitch.load(tmp_path / "tiny-F32.gguf")
    assert by_file.reference == adapter.reference and by_file.pinned.weights_hash == adapter.pinned.weights_hash
    assert (type(adapter.model), adapter.task) == (hf.Lfm2ForCausalLM, "text-generation")
    inputs = adapter.preprocess(["a good film", "no"])
    assert inputs["attention_mask"].sum(1).tolist() == [11, 2]
    with torch.no_grad():
        assert torch.equal(adapter.forward(inputs).logits, model(**inputs, use_cache=False).logits)
    assert adapter.layers == ("model.layers.0", "model.layers.1", "model.layers.2")
    assert type(hf_stitch.load(tmp_path, task="feature-extraction", gguf_file="tiny-F32.gguf").model) is hf.Lfm2Model
    drawn = hf_stitch.load(tmp_path, gguf_file="tiny-F32.gguf", pretrained=False)
    assert drawn.pinned.config == adapter.pinned.config and drawn.pinned.weights_hash != adapter.pinned.weights_hash


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("", {}, r"does not contain config\.json.*To load a GGUF file, pass gguf_file='tiny\.gguf'"),
        ("other.gguf", {}, r"other\.gguf is a file.*existing file.*gguf_file='other\.gguf'"),
        ("", {"gguf_file": "other.gguf"}, r"other\.gguf"),
        ("tiny.gguf", {}, r"tiny\.gguf does not start with the GGUF magic"),
    ],
    ids=["no name", "another name", "another file", "damaged"],
)
def test_a_gguf_file_that_cannot_be_loaded_is_named(name: str, options: Any, message: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers.integrations.gguf")
    (tmp_path / "tiny.gguf").write_bytes(b"none")
    with pytest.raises((ValueError, OSError), match=message):
        hf_stitch.load(tmp_path / name, **options)


def test_a_timm_network_whose_arguments_are_unknown_cannot_be_rebuilt() -> None:
    """A function of an architecture keeps no arguments: the network would be built with two heads."""
    options = {"num_heads": 4, "num_classes": 3}
    with pytest.raises(ValueError, match=r"not created by timm\.create_model, so its arguments are unknown"):
        hf_stitch.load(timm.models.vision_transformer.test_vit(**options)).blueprint()
    adapter = hf_stitch.load(timm.create_model("test_vit", **options).eval())
    twin = network_of(adapter.blueprint())
    twin.load_state_dict(adapter.model.state_dict())
    with torch.no_grad():
        assert torch.equal(twin(adapter.example["x"]), adapter.forward(adapter.example))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    model = timm.create_model("resnet10t", num_classes=3)
    timm.models.save_for_hf(model, tmp_path, safe_serialization=False)
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises((ValueError, OSError), match="safetensors"):
        hf_stitch.load(str(tmp_path))


def test_a_network_with_an_adapter_of_peft_is_not_recorded_as_its_base() -> None:
    model = make("bert")
    model.config._name_or_path = "alice/bert"
    assert hf_stitch.load(model).reference.id == "alice/bert"
    model.peft_config = {"default": object()}  # PEFT sets it, and deletes it when the adapter is merged
    assert hf_stitch.load(model).reference.id is None


def test_texts_over_the_limit_are_truncated_with_a_warning(tokenizer: hf.PreTrainedTokenizerFast) -> None:
    model = hf.RobertaModel(hf.RobertaConfig(**BERT, max_position_embeddings=12, pad_token_id=0))
    adapter = hf_stitch.load(model, processor=tokenizer)
    assert adapter.interface.max_tokens == 11
    with pytest.warns(UserWarning, match="1 of 2 texts are longer than the 11 tokens"):
        inputs = adapter.preprocess(["a b", " ".join("abcdefghijklmn")])
    assert inputs["input_ids"].shape == (2, 11)
    adapter.forward(inputs)


@pytest.mark.parametrize("text", [b"[]", b"\xff", b"[" * 10**5, b'{"model_type": ["vit"]}', b'{"\\u001b[2J": 1}'])
def test_a_broken_config_is_named(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ValueError, match=str(tmp_path)) as caught:
        hf_stitch.load(str(tmp_path))
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "preprocessor_config.json"])
def test_a_pipe_in_a_folder_is_refused_not_waited_for(name: str, tmp_path: Path) -> None:
    hf.ViTForImageClassification(hf.ViTConfig(**VIT)).save_pretrained(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} is a pipe, a socket or a device"):
        hf_stitch.load(str(tmp_path))
