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

import hf_stitch
import hf_stitch.auto
from hf_stitch import StitchedModel, Stitcher
from hf_stitch.adapters import load_recorded
from hf_stitch.artefacts.files import MODULE
from hf_stitch.reference import ModelReference

from records import reweigh, rewrite  # isort: skip
from tiny_networks import LAYERS, network, plain_tokenizer, stitched  # isort: skip


@pytest.fixture(scope="module")
def originals(images: Any, texts: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, its stitcher, and a language model with its tokenizer."""
    folder = tmp_path_factory.mktemp("originals")
    model = stitched(network("vit"), network("vit", 1), images, (LAYERS["vit"],) * 2)
    model.save_pretrained(folder / "model")
    model.stitcher.save_pretrained(folder / "stitcher")
    llama = network("llama")
    language = stitched(llama, llama, texts, (LAYERS["llama"],) * 2, matcher="identity")
    language.config.pad_token_id, language.config.eos_token_id = 0, 2  # as users do for pipelines
    language.save_pretrained(folder / "language model")
    return folder


@pytest.fixture
def copied(originals: Path, tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(originals / kind, tmp_path / kind))


@pytest.fixture
def language(copied: Callable[[str], Path]) -> Path:
    return copied("language model")


RECORD = {"model": "config.json", "stitcher": "stitcher.json", "language model": "config.json"}
MODEL = (StitchedModel, transformers.AutoModelForImageClassification)
LOADERS: dict[str, tuple[Any, ...]] = {"model": MODEL, "stitcher": (Stitcher,), "language model": (StitchedModel,)}


# -- changed artefacts -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("change", [("LABEL_0", "a cat"), ('"checksum"', '"no_checksum"')], ids=["value", "checksum"])
def test_a_changed_record_is_rejected_unless_changes_are_allowed(change: tuple[str, str], copied: Any) -> None:
    for kind in ("model", "stitcher"):
        load, path = LOADERS[kind][0], copied(kind) / RECORD[kind]
        path.write_text(path.read_text().replace(*change).replace("matcher", "found_by"))
        with pytest.raises(ValueError, match=r"changed since it was saved.*pass allow_modified=True"):
            load.from_pretrained(path.parent)
        changed = load.from_pretrained(path.parent, allow_modified=True)
        if kind == "model":
            assert changed.config.id2label[0] == ("a cat" if change[0] == "LABEL_0" else "LABEL_0")


def in_record(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda folder: rewrite(next(folder / name for name in RECORD.values() if (folder / name).exists()), change)


def scale(weights: dict[str, torch.Tensor]) -> None:
    weights.update({name: 1.01 * value for name, value in weights.items() if value.is_floating_point()})


def widen(record: dict[str, Any]) -> None:
    stitch = record["stitch"]
    stitch["source"]["width"] = stitch["target"]["width"] = 10**9
    for part in ("body", "prefix"):
        stitch[part] |= {"in_features": 10**9, "out_features": 10**9}


def follow_an_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"weight_map": {"stitch.body.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def name_a_secret(folder: Path) -> None:
    (folder.parent / "secret").write_text("x")
    rewrite(folder / "config.json", lambda record: record["manifest"].update({"../secret": "sha256:0"}))


def repeat_weights(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "model-2.safetensors")
    rewrite(folder / "config.json", lambda record: record["manifest"].update({"model-2.safetensors": "sha256:0"}))


REFUSED: dict[str, tuple[str, Callable[[Path], object], type[Exception], str]] = {
    "weights of another model": (
        "model", lambda f: reweigh(f / "model.safetensors", scale), ValueError, "changed since .* saved, or is damaged",
    ),
    "width of a stitcher": ("stitcher", in_record(widen), ValueError, "disagree|damaged|must map"),
    "width of a parent": (
        "model", in_record(lambda r: r["target"]["blueprint"]["config"].update(hidden_size=10**9)), ValueError,
        "disagree|damaged|must map",
    ),
    "attention on the Hub": (
        "model", in_record(lambda r: r["target"]["blueprint"].update(attention="someone/kernels")), ValueError,
        "may refer only to installed components of transformers and timm",
    ),
    "user code": (
        "model", in_record(lambda r: r["target"]["blueprint"].update(library="torch")), ValueError,
        "cannot be rebuilt from a config",
    ),
    "an index of shards": ("model", follow_an_index, FileNotFoundError, "the weights are missing"),
    "a weight in two files": ("model", repeat_weights, ValueError, "both contain"),
    "a file outside of the folder": ("model", name_a_secret, FileNotFoundError, r"\.\./secret, saved with"),
    **{
        f"settings of a processor: {value!r}": (
            "language model", in_record(lambda r, value=value: r.update(processor_settings=value)), ValueError,
            "processor_settings",
        )
        for value in ([], {}, {"chosen": 1, "defaults": {}}, "words")
    },
}  # fmt: skip
"""What is changed -> artefact, the change, and the error."""


@pytest.mark.parametrize("what", REFUSED)
def test_a_changed_artefact_is_refused(what: str, copied: Any) -> None:
    kind, change, error, message = REFUSED[what]
    folder = copied(kind)
    change(folder)
    for load in LOADERS[kind]:
        with pytest.raises(error, match=message):
            load.from_pretrained(folder)


def test_a_local_folder_in_a_record_is_not_loaded(copied: Any, tmp_path: Path) -> None:
    folder = copied("stitcher")
    in_record(lambda r: r["source"]["reference"].update(id=str(tmp_path)))(folder)
    with pytest.raises(ValueError, match=r"the source, ViT.* parameters, .*, was a module in memory or in a local"):
        Stitcher.from_pretrained(folder).attach()


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_path": "/tmp/weights.pth"}, {"pretrained_cfg": {"url": "http://127.0.0.1:9/weights.pth"}},
        {"use_safetensors": False}, {"gguf_file": "x.gguf"},
        *({"attn_implementation": each} for each in ("someone/kernels", "flash_attention_3", "ninja", {"": "x"})),
    ],
)  # fmt: skip
def test_a_record_cannot_set_files_addresses_or_code(options: dict[str, Any]) -> None:
    for id, library in (("timm:resnet10t", "timm"), ("someone/bert", "transformers")):
        with pytest.raises(ValueError, match="which is not allowed in a record: pass the option"):
            load_recorded(ModelReference(id, library, kwargs=options))
    record = {"id": "a/b", "library": "transformers", "kwargs": {"trust_remote_code": True}}
    assert ModelReference.from_dict(record).kwargs == {}


def test_a_config_cannot_choose_the_attention_implementation(copied: Any) -> None:
    folder = copied("model")
    keys = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
    in_record(lambda r: r.update(dict.fromkeys(keys, "someone/kernels")))(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for load in MODEL:
            assert "kernels" not in str(load.from_pretrained(folder).config._attn_implementation)


# -- what is odd, and no harm ------------------------------------------------------------------------------------------


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


# -- files beside the weights ------------------------------------------------------------------------------------------
BESIDE: dict[str, Callable[[str], str]] = {
    "tokenizer.json": lambda text: text.replace('"w1"', '"w-"').replace('"w2"', '"w1"').replace('"w-"', '"w2"'),
    "tokenizer_config.json": lambda text: "[1]",
    "generation_config.json": lambda text: "[1]",
}


@pytest.mark.parametrize("name", BESIDE)
def test_files_other_than_the_weights_are_checked(name: str, language: Path) -> None:
    folder = language
    path = folder / name
    saved = path.read_text()
    path.write_text(BESIDE[name](saved))
    assert path.read_text() != saved
    with pytest.raises(ValueError, match=r"was changed since config\.json was saved"):
        StitchedModel.from_pretrained(folder)
    if name != "tokenizer.json":
        with pytest.raises(ValueError, match=r"a processor or generation config in .* is"):
            StitchedModel.from_pretrained(folder, allow_modified=True)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"{name}, saved with the artefact, is missing in"):
        StitchedModel.from_pretrained(folder)


def test_a_tokenizer_is_the_same_if_it_makes_the_same_tokens(language: Path) -> None:
    """Padding and truncation are options of a call; tests/adapters/test_pinning.py has all parts of a tokenizer."""

    def written_again(**changes: Any) -> None:
        (language / "tokenizer.json").write_text(json.dumps({**values, **changes}))

    values = json.loads((language / "tokenizer.json").read_text())
    padding = {
        "strategy": {"Fixed": 16}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "[PAD]",
    }  # fmt: skip
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # options that a user has set are no surprise
        saved = StitchedModel.from_pretrained(language)
    assert saved.config.pad_token_id == 0
    written_again(padding=padding, truncation=truncation)
    loaded = StitchedModel.from_pretrained(language)
    for name, value in saved.preprocess(["w1 w2 w3", "w4"]).items():
        assert torch.equal(loaded.preprocess(["w1 w2 w3", "w4"])[name], value)
    changed = r"tokenizer\.json was changed since config\.json was saved"
    written_again(padding={**padding, "direction": "Left"})
    with pytest.raises(ValueError, match=changed):
        StitchedModel.from_pretrained(language)
    written_again(padding=padding)
    in_record(lambda record: record.pop("processor_settings"))(language)  # as version 0.2.0 wrote it
    with pytest.raises(ValueError, match=changed):
        StitchedModel.from_pretrained(language)


def test_files_that_the_record_does_not_name_are_not_read(language: Path) -> None:
    saved = StitchedModel.from_pretrained(language).processor.get_vocab()
    names = ("chat_template.jinja", "added_tokens.json")
    for name in (*names, "model-00002-of-00002.safetensors"):
        (language / name).write_bytes(b'{"w1": 77}' if name.endswith("json") else b"not from this model")
    with pytest.warns(UserWarning, match="which (was|were) not saved with the artefact") as warned:
        loaded = StitchedModel.from_pretrained(language)
    told = " ".join(str(each.message) for each in warned)
    assert all(name in told for name in names)
    assert loaded.processor.chat_template is None and loaded.processor.get_vocab() == saved


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
    kind.from_pretrained(folder, trust_remote_code=True).save_pretrained(tmp_path / "again")
    assert {file.name for file in folder.iterdir()} == {file.name for file in (tmp_path / "again").iterdir()}
    ran = tmp_path / "ran"
    with (folder / MODULE).open("a") as file:
        file.write(f"open({str(ran)!r}, 'w').close()\n")
    for load in (StitchedModel.from_pretrained, partial(kind.from_pretrained, trust_remote_code=True)):
        with pytest.raises(ValueError, match=f"{MODULE} was changed since"):
            load(folder)
    assert not ran.exists()
