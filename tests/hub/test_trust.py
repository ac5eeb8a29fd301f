"""Untrusted files: damaged or harmful artefacts are rejected with a message and never change the output."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import hf_stitch
import hf_stitch.auto
from hf_stitch import StitchedModel, Stitcher
from hf_stitch.adapters import load_recorded
from hf_stitch.artefacts.files import MODULE
from hf_stitch.reference import ModelReference

from records import rewrite  # isort: skip
from tiny_networks import LAYERS, network, plain_tokenizer, stitched  # isort: skip


@pytest.fixture(scope="module")
def originals(images: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of a tiny model and its stitcher."""
    folder = tmp_path_factory.mktemp("originals")
    a, b = network("vit"), network("vit", 1)
    model = hf_stitch.stitch(a, b, images, source_layer=LAYERS["vit"], target_layer=LAYERS["vit"], progress=False)
    model.save_pretrained(folder / "model")
    model.stitcher.save_pretrained(folder / "stitcher")
    return {"model": folder / "model", "stitcher": folder / "stitcher"}


@pytest.fixture
def copied(originals: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A function that copies an artefact for modification."""
    return lambda kind: Path(shutil.copytree(originals[kind], tmp_path / kind))


RECORD = {"model": "config.json", "stitcher": "stitcher.json"}
WEIGHTS = {"model": "model.safetensors", "stitcher": "stitch.safetensors"}
LOAD: dict[str, Callable[..., Any]] = {"model": StitchedModel.from_pretrained, "stitcher": Stitcher.from_pretrained}
MODEL_BY: dict[str, Callable[[Path], Any]] = {
    "StitchedModel": StitchedModel.from_pretrained,
    "an Auto class": transformers.AutoModelForImageClassification.from_pretrained,
}


def test_weights_of_another_artefact_are_rejected(copied: Any) -> None:
    for kind in WEIGHTS:
        folder = copied(kind)
        weights = load_file(folder / WEIGHTS[kind])
        save_file({name: value * 1.01 if value.is_floating_point() else value for name, value in weights.items()},
                  folder / WEIGHTS[kind])  # fmt: skip
        with pytest.raises(ValueError, match=r"was changed since .* was saved, or is damaged"):
            LOAD[kind](folder)


@pytest.mark.parametrize("change", [("LABEL_0", "a cat"), ('"checksum"', '"no_checksum"')], ids=["value", "checksum"])
def test_a_changed_record_is_rejected_unless_changes_are_allowed(change: tuple[str, str], copied: Any) -> None:
    for kind, name in RECORD.items():
        path = copied(kind) / name
        path.write_text(path.read_text().replace(*change).replace("matcher", "found_by"))
        with pytest.raises(ValueError, match=r"changed since it was saved.*pass allow_modified=True"):
            LOAD[kind](path.parent)
        changed = LOAD[kind](path.parent, allow_modified=True)
        if kind == "model":
            assert changed.config.id2label[0] == ("a cat" if change[0] == "LABEL_0" else "LABEL_0")


# -- sizes -------------------------------------------------------------------------------------------------------------
def widen(stitch: dict[str, Any]) -> None:
    stitch["source"]["width"] = stitch["target"]["width"] = 10**9
    for part in ("body", "prefix"):
        stitch[part] |= {"in_features": 10**9, "out_features": 10**9}


def forget_labels(record: dict[str, Any]) -> dict[str, Any]:
    """Remove the names of the classes, which take precedence over their number."""
    return {} if record.pop("id2label") is record.pop("label2id") else record


HUGE: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "width of a stitcher": ("stitcher", lambda r: widen(r["stitch"])),
    "width of a parent": ("model", lambda r: r["target"]["blueprint"]["config"].update(hidden_size=10**9)),
    "layers": ("model", lambda r: r["target"]["blueprint"]["config"].update(num_hidden_layers=10**9)),
    "classes": ("model", lambda r: forget_labels(r).update(num_labels=10**9)),
}


@pytest.mark.parametrize(
    ("what", "load"),
    [
        (what, load)
        for what, (kind, _) in HUGE.items()
        for load in (MODEL_BY.values() if kind == "model" else [LOAD[kind]])
    ],
)
def test_sizes_that_the_files_do_not_have_are_refused(what: str, load: Any, copied: Any) -> None:
    kind, change = HUGE[what]
    folder = copied(kind)
    rewrite(folder / RECORD[kind], change)
    with pytest.raises(ValueError, match=r"disagree|damaged|must map"):
        load(folder)


def test_labels_can_have_any_name(copied: Any) -> None:
    """Names of labels can match the keys of layer counts."""
    folder = copied("model")
    labels = {"bricklayer": 12_000, "LABEL_0": 0}
    rewrite(folder / RECORD["model"], lambda r: r["target"]["blueprint"]["config"].update(label2id=labels))
    rewrite(folder / RECORD["model"], lambda r: r["recipe"].update(blocks=10**6))
    loaded = StitchedModel.from_pretrained(folder)
    assert loaded.config.target["blueprint"]["config"]["label2id"] == labels
    assert loaded.config.recipe["blocks"] == 10**6


def test_a_network_with_buffers_beyond_the_memory_limit_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers without memory while building, and those computed from them, are read from the file."""
    monkeypatch.setattr("hf_stitch.adapters.untrusted.ROOM", 2**14)
    kind = transformers.GPTNeoForCausalLM
    size = {"vocab_size": 80, "hidden_size": 8, "num_layers": 3, "num_heads": 1, "intermediate_size": 8}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPTNeoConfig(**size, **ends, attention_types=[[["global"], 3]], max_position_embeddings=100)
    texts = [{"text": " ".join(f"w{(7 * i + j) % 40}" for j in range(5))} for i in range(20)]
    a = hf_stitch.load(kind(config).eval(), processor=plain_tokenizer())
    made = stitched(a, a, texts, (a.layers[1], a.layers[0]), matcher="identity", task=None)
    made.save_pretrained(tmp_path)
    words = made.preprocess(["w1 w2 w3"])
    with torch.no_grad():
        assert torch.equal(StitchedModel.from_pretrained(tmp_path)(**words).logits, made(**words).logits)


# -- harm --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_path": "/tmp/weights.pth"},
        {"pretrained_cfg": {"url": "http://127.0.0.1:9/weights.pth"}},
        {"attn_implementation": "someone/kernels"},
        {"use_safetensors": False},
        {"gguf_file": "x.gguf"},
    ],
)
def test_a_record_cannot_set_files_addresses_or_code(options: dict[str, Any]) -> None:
    for id, library in (("timm:resnet10t", "timm"), ("someone/bert", "transformers")):
        with pytest.raises(ValueError, match="which a record may not set on its own: pass the option yourself"):
            load_recorded(ModelReference(id, library, kwargs=options))


def test_a_record_cannot_enable_remote_code() -> None:
    assert (
        ModelReference.from_dict({"id": "a/b", "library": "transformers", "kwargs": {"trust_remote_code": True}}).kwargs
        == {}
    )


def test_a_local_folder_in_a_record_is_not_loaded(copied: Any, tmp_path: Path) -> None:
    folder = copied("stitcher")
    rewrite(folder / RECORD["stitcher"], lambda r: r["source"]["reference"].update(id=str(tmp_path)))
    with pytest.raises(ValueError, match=r"the source, ViT.* parameters, .*, was a module in memory or in a local"):
        Stitcher.from_pretrained(folder).attach()


BACKBONE = {"backbone": "someone/network", "use_timm_backbone": False}
"""Options with which transformers would load a config from the Hub."""


@pytest.mark.parametrize("load", MODEL_BY.values(), ids=MODEL_BY)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.update(attention="someone/kernels"), "may refer only to components of transformers and timm"),
        (lambda b: b["config"].update(attn_implementation="someone/kernels:run"), "only to components"),
        (lambda b: b["config"].update(sub={"_attn_implementation": {"": "someone/kernels"}}), "only to components"),
        (lambda b: b.update({"class": "DPTForDepthEstimation", "config": BACKBONE}), "only to components"),
        (lambda b: b["config"].update(sub={**BACKBONE, "backbone": "gpt2"}), "only to components"),
        (lambda b: b.update({"class": "AutoModel"}), "transformers has no model class 'AutoModel'"),
        (lambda b: b.update(library="os"), "no 'os' among adapters"),
        (lambda b: b.update(library="torch"), "cannot be rebuilt from a config"),
    ],
)
def test_a_config_can_only_name_registered_components(
    change: Any, message: str, load: Any, copied: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: Any, **__: Any) -> Any:
        raise AssertionError("the Hub was accessed")

    monkeypatch.setattr("transformers.backbone_utils.hf_api", ask)
    folder = copied("model")
    rewrite(folder / RECORD["model"], lambda r: change(r["target"]["blueprint"]))
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"])
def test_a_config_cannot_choose_the_attention_implementation(key: str, copied: Any) -> None:
    folder = copied("model")
    rewrite(folder / RECORD["model"], lambda r: r.update({key: "someone/kernels"}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for loaded in (StitchedModel, transformers.AutoModelForImageClassification):
            assert "kernels" not in str(loaded.from_pretrained(folder).config._attn_implementation)


def test_an_index_of_shards_is_not_followed(copied: Any, tmp_path: Path) -> None:
    folder = copied("model")
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    index = {"weight_map": {"stitch.body.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match="the weights are missing"):
        StitchedModel.from_pretrained(folder)


def test_two_files_with_the_same_weight_are_rejected(copied: Any) -> None:
    folder = copied("model")
    shutil.copy(folder / "model.safetensors", folder / "model-2.safetensors")
    rewrite(folder / RECORD["model"], lambda r: r["manifest"].update({"model-2.safetensors": "sha256:0"}))
    with pytest.raises(ValueError, match="both contain"):
        StitchedModel.from_pretrained(folder)


@pytest.fixture(scope="module")
def language_model(texts: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model with its tokenizer."""
    folder = tmp_path_factory.mktemp("language_model")
    a = network("llama")
    made = stitched(a, a, texts, (LAYERS["llama"],) * 2, matcher="identity")
    made.config.pad_token_id, made.config.eos_token_id = 0, 2  # as users do for pipelines
    made.save_pretrained(folder)
    return folder


BESIDE: dict[str, Callable[[str], str]] = {
    "tokenizer.json": lambda text: text.replace('"w1"', '"w-"').replace('"w2"', '"w1"').replace('"w-"', '"w2"'),
    "tokenizer_config.json": lambda text: "[1]",
    "generation_config.json": lambda text: "[1]",
}


@pytest.mark.parametrize("name", BESIDE)
def test_files_other_than_the_weights_are_checked(name: str, language_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(language_model, tmp_path / "model"))
    path = folder / name
    path.write_text(BESIDE[name](path.read_text()))
    assert path.read_bytes() != (language_model / name).read_bytes()
    with pytest.raises(ValueError, match=r"was changed since config\.json was saved"):
        StitchedModel.from_pretrained(folder)
    if name != "tokenizer.json":
        with pytest.raises(ValueError, match=r"a processor or generation config in .* is"):
            StitchedModel.from_pretrained(folder, allow_modified=True)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"has no {name}, which was saved with it"):
        StitchedModel.from_pretrained(folder)


def written_again(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((folder / "tokenizer.json").read_text())
    change(values)
    (folder / "tokenizer.json").write_text(json.dumps(values))


PADDING = {
    "strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
    "pad_token": "[PAD]",
}  # fmt: skip
TRUNCATION = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
OTHER_TOKENS: dict[str, Callable[[dict[str, Any]], object]] = {
    "normalizer": lambda t: t.update(normalizer={"type": "Lowercase"}),
    "pre_tokenizer": lambda t: t.update(pre_tokenizer={"type": "WhitespaceSplit"}),
    "unknown token": lambda t: t["model"].update(unk_token="[PAD]"),
    "a token less": lambda t: t["model"]["vocab"].pop("w7"),
    "side of padding": lambda t: t.update(padding={**PADDING, "direction": "Left"}),
    "side of truncation": lambda t: t.update(truncation={**TRUNCATION, "direction": "Left"}),
    "post_processor": lambda t: t.update(
        post_processor={"type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]}
    ),
}


def test_a_tokenizer_with_other_padding_and_truncation_is_the_same(language_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(language_model, tmp_path / "model"))
    written_again(folder, lambda t: t.update(padding=PADDING, truncation=TRUNCATION))
    loaded, saved = (StitchedModel.from_pretrained(each) for each in (folder, language_model))
    for name, value in saved.preprocess(["w1 w2 w3", "w4"]).items():
        assert torch.equal(loaded.preprocess(["w1 w2 w3", "w4"])[name], value)


@pytest.mark.parametrize("change", OTHER_TOKENS)
def test_a_tokenizer_that_makes_other_tokens_is_another(change: str, language_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(language_model, tmp_path / "model"))
    written_again(folder, OTHER_TOKENS[change])
    with pytest.raises(ValueError, match=r"tokenizer\.json was changed since config\.json was saved"):
        StitchedModel.from_pretrained(folder)


def test_a_record_without_the_settings_of_its_processor_takes_no_other_files(
    language_model: Path, tmp_path: Path
) -> None:
    """As version 0.2.0 wrote it."""
    folder = Path(shutil.copytree(language_model, tmp_path / "model"))
    rewrite(folder / RECORD["model"], lambda record: record.pop("processor_settings"))
    StitchedModel.from_pretrained(folder)
    written_again(folder, lambda t: t.update(padding=PADDING))
    with pytest.raises(ValueError, match=r"tokenizer\.json was changed since config\.json was saved"):
        StitchedModel.from_pretrained(folder)


@pytest.mark.parametrize("value", [[], {}, {"chosen": 1, "defaults": {}}, "words"])
def test_settings_of_a_processor_that_are_none_are_refused(value: Any, language_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(language_model, tmp_path / "model"))
    rewrite(folder / RECORD["model"], lambda record: record.update(processor_settings=value))
    with pytest.raises(ValueError, match="processor_settings"):
        StitchedModel.from_pretrained(folder)


@pytest.mark.parametrize("name", ["chat_template.jinja", "added_tokens.json", "model-00002-of-00002.safetensors"])
def test_files_that_the_record_does_not_name_are_not_read(name: str, language_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(language_model, tmp_path / "model"))
    content = b'{"w1": 77}' if name.endswith("json") else b"not from this model"
    (folder / name).write_bytes(content)
    if name.endswith("safetensors"):
        loaded = StitchedModel.from_pretrained(folder)
    else:
        with pytest.warns(UserWarning, match=f"also contains {name}, which was not saved with the artefact"):
            loaded = StitchedModel.from_pretrained(folder)
    assert loaded.processor.chat_template is None
    assert loaded.processor.get_vocab() == StitchedModel.from_pretrained(language_model).processor.get_vocab()


def test_options_set_by_a_user_cause_no_warning(language_model: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert StitchedModel.from_pretrained(language_model).config.pad_token_id == 0


def test_files_in_a_record_must_be_in_the_folder(copied: Any, tmp_path: Path) -> None:
    folder = copied("model")
    (tmp_path / "secret").write_text("x")
    rewrite(folder / RECORD["model"], lambda record: record["manifest"].update({"../secret": "sha256:0"}))
    with pytest.raises(FileNotFoundError, match=r"has no \.\./secret"):
        StitchedModel.from_pretrained(folder)


def test_code_in_the_folder_of_a_model_is_not_run(copied: Any, tmp_path: Path) -> None:
    folder = copied("model")
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"auto_map": {"AutoImageProcessor": "code.Processor"}, "image_processor_type": "Processor"})
    )
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Processor: pass\n")
    with pytest.warns(UserWarning, match="also contains preprocessor_config.json"):
        assert StitchedModel.from_pretrained(folder).processor is None
    assert not (tmp_path / "ran").exists()


def test_the_module_beside_a_model_is_verified_and_not_run(copied: Any, tmp_path: Path) -> None:
    """Also where ``auto_map`` names another repository, and transformers may run code."""
    folder = copied("model")
    rewrite(folder / RECORD["model"], lambda record: record["auto_map"].update(AutoModel="org/name--code.Model"))
    kind = transformers.AutoModelForImageClassification
    model = kind.from_pretrained(folder, trust_remote_code=True)
    model.save_pretrained(tmp_path / "again")
    assert {file.name for file in folder.iterdir()} == {file.name for file in (tmp_path / "again").iterdir()}
    ran = tmp_path / "ran"
    with (folder / MODULE).open("a") as file:
        file.write(f"open({str(ran)!r}, 'w').close()\n")
    for load in (StitchedModel.from_pretrained, partial(kind.from_pretrained, trust_remote_code=True)):
        with pytest.raises(ValueError, match=f"{MODULE} was changed since"):
            load(folder)
    assert not ran.exists()


# -- sizes of saved files ---------------------------------------------------------------------------------------------
def test_a_stitcher_of_two_base_sized_networks_is_small(tmp_path: Path) -> None:
    from hf_stitch.representation import RepresentationSpec
    from hf_stitch.stitches import LinearStitch, StitchingLayer

    text = RepresentationSpec("bnd", 768)
    end = ModelReference("alice/bert", "transformers", weights_hash="sha256:" + "0" * 64)
    Stitcher(StitchingLayer(text, text, "none", LinearStitch(768, 768)), end, "a", end, "b").save_pretrained(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2.5e6
