"""Saving and loading of stitched models, and damaged files."""

from __future__ import annotations

import copy
import json
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import hf_stitch
import hf_stitch.auto
from hf_stitch import StitchedModel, StitchedModelForImageClassification, StitchedModelForSequenceClassification
from hf_stitch.artefacts.joining import join
from hf_stitch.artefacts.weights import load_strictly, save_weights, ties
from hf_stitch.stitches import IdentityStitch, StitchingLayer
from hf_stitch.storage.files import digest

from killing import survives  # isort: skip
from round_trips import assert_same, same_state, saved_and_loaded  # isort: skip
from records import rewrite  # isort: skip
from tiny_networks import (
    LANGUAGE,
    LAYERS,
    TEXT,
    VISION,
    adapted,
    build,
    network,
    other_tokenizer,
    plain_tokenizer,
    stitched,
)  # isort: skip

REPEATED = ("vit", "deit", "roberta")
"""Families whose way to the files is that of another one."""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("numbers", torch.zeros(3)), ("numbers", torch.zeros(4, dtype=torch.long)),
        ("weight", torch.zeros(2, 3, dtype=torch.long)), ("weight", torch.zeros(3, 2)), ("weight", torch.zeros(6)),
    ],
)  # fmt: skip
def test_weights_of_another_kind_or_shape_are_refused_by_name(name: str, value: torch.Tensor, tmp_path: Path) -> None:
    model = nn.Linear(3, 2, bias=False)
    model.register_buffer("numbers", torch.arange(3))
    save_file({**model.state_dict(), name: value}, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match=f"weights.safetensors and its config disagree about '{name}'"):
        load_strictly(model, [tmp_path / "weights.safetensors"])


# -- scores --------------------------------------------------------------------------------------------------------


def test_scores_of_other_weights_are_left_out(cnn_vit: StitchedModel, images: Any, tmp_path: Path) -> None:
    """A model that was trained after it was scored shows its scores nowhere, until it is scored again."""
    cnn_vit.config.recipe |= {"audit": {"verdict": "accurate"}}
    again = saved_and_loaded(cnn_vit, tmp_path / "scored")
    assert again.config.scores and "Its accuracy" in str(again) and again.stitcher.scores
    with torch.no_grad():
        again.stitch.body.weight.mul_(0.5)
    assert "Its accuracy" not in str(again)
    for trained in (again, saved_and_loaded(again, tmp_path / "trained")):
        assert trained.config.scores is None and trained.evaluation is None and not trained.stitcher.scores
        assert "audit" not in trained.config.recipe
    card = (tmp_path / "trained" / "README.md").read_text()
    assert "## Scores" not in card and "Its accuracy" not in card and "| changed since the fit | weights |" in card
    again.keep_scores(hf_stitch.evaluate(again, images, target=network("vit", 1), progress=False))
    scored = saved_and_loaded(again, tmp_path / "again")
    assert scored.config.scores == again.evaluation.for_card() and "Its accuracy" in str(scored)


def test_scores_are_left_out_of_a_model_that_is_saved_with_the_weights_of_a_trainer(
    cnn_vit: StitchedModel, tmp_path: Path
) -> None:
    state = {name: value.clone() for name, value in cnn_vit.state_dict().items()}
    assert saved_and_loaded(cnn_vit, tmp_path / "same", state_dict=state).config.scores
    state["stitch.body.weight"] *= 0.5
    assert saved_and_loaded(cnn_vit, tmp_path / "trained", state_dict=state).config.scores is None


def test_scores_of_earlier_versions_are_left_out_if_a_half_has_changed(cnn_vit: StitchedModel) -> None:
    del cnn_vit.config.recipe["scored_weights"]
    assert "Its accuracy" in str(cnn_vit)
    with torch.no_grad():
        next(cnn_vit.target.parameters()).mul_(0.5)
    assert "Its accuracy" not in str(cnn_vit)


# -- what cannot be saved -------------------------------------------------------------------------------------------


def llama_llama(texts: Any, target: Any) -> StitchedModel:
    other = hf_stitch.load(target, processor=plain_tokenizer())
    return stitched(network("llama"), other, texts, (LAYERS["llama"], LAYERS["llama"]))


def test_a_model_with_a_quantised_network_is_refused_in_a_sentence(texts: Any, tmp_path: Path) -> None:
    quantised = build("llama", 1)
    quantised.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    with pytest.raises(ValueError, match=r"quantised network \(bitsandbytes\) cannot be saved: .*Stitcher.attach"):
        llama_llama(texts, quantised).save_pretrained(tmp_path / "model")


def test_a_model_with_an_adapter_of_peft_is_refused_in_a_sentence(texts: Any, tmp_path: Path) -> None:
    def forward(self: Any, x: Any) -> Any:
        return nn.Linear.forward(self, x)

    kind = type("Linear", (nn.Linear,), {"__module__": "peft.tuners.lora.layer", "forward": forward})
    changed = build("llama", 1)
    for name, module in [(n, m) for n, m in changed.named_modules() if n.endswith("q_proj")]:
        changed.set_submodule(name, kind(module.in_features, module.out_features, bias=False))
    with pytest.raises(ValueError, match=r"an adapter of PEFT inside: merge it .*merge_and_unload.*Stitcher.attach"):
        llama_llama(texts, changed).save_pretrained(tmp_path / "model")


# -- round trips ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[pytest.mark.slow] * (each in REPEATED)) for each in VISION + LANGUAGE[:-1]]
)
def test_every_family_on_both_sides(
    family: str, net: Any, images: Any, texts: Any, inputs: Any, tmp_path: Path
) -> None:
    """Buffers that networks do not save (Swin, Llama), tied weights (GPT-2), names that loaders rewrite (ConvNeXt)."""
    a, layer = net(family), LAYERS[family]
    model = stitched(a, a, texts if family in LANGUAGE else images, (layer, layer))
    again = saved_and_loaded(model, tmp_path)
    assert_same(model, again, inputs(a))
    if family in LANGUAGE:
        words = [sample["text"] for sample in texts[:3]]
        for name, value in model.preprocess(words).items():
            assert torch.equal(again.preprocess(words)[name], value)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param("float16", "float16", marks=pytest.mark.slow),
        ("bfloat16", "bfloat16"),
        pytest.param("float32", "bfloat16", marks=pytest.mark.slow),
        ("bfloat16", "float32"),
    ],
)
@pytest.mark.parametrize("layers", [("vit", "swin"), ("gpt2", "llama")], ids="-".join)
def test_every_part_keeps_its_dtype(
    source: str, target: str, layers: tuple[str, str], images: Any, texts: Any, inputs: Any, tmp_path: Path
) -> None:
    a, b = network(layers[0], 0, source), network(layers[1], 1, target)
    data = texts if layers[0] in LANGUAGE else [{**sample, "image": sample["image"]} for sample in images]
    model = stitched(a, b, data, (LAYERS[layers[0]], LAYERS[layers[1]]))
    assert {p.dtype for p in model.source.parameters()} == {getattr(torch, source)}
    assert {p.dtype for p in model.target.parameters()} == {getattr(torch, target)}
    assert model.stitch.body.weight.dtype == torch.float32
    assert_same(model, saved_and_loaded(model, tmp_path), inputs(a))


def test_weights_in_several_files(cnn_vit: StitchedModel, net: Any, inputs: Any, tmp_path: Path) -> None:
    again = saved_and_loaded(cnn_vit, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert_same(cnn_vit, again, inputs(net("cnn")))
    assert_same(cnn_vit, saved_and_loaded(again, tmp_path), inputs(net("cnn")))  # old shards are deleted


def test_saving_again_writes_the_same_files(saved: Path, tmp_path: Path) -> None:
    StitchedModel.from_pretrained(saved).save_pretrained(tmp_path / "twin")
    files = sorted(path.name for path in saved.iterdir())
    assert files == [
        "README.md",
        "config.json",
        "model.safetensors",
        "modeling_hf_stitch.py",
        "preprocessor_config.json",
    ]
    assert files == sorted(path.name for path in (tmp_path / "twin").iterdir())
    for name in files:
        assert (saved / name).read_bytes() == (tmp_path / "twin" / name).read_bytes()


def test_the_module_beside_a_model_has_the_classes_that_its_config_names(saved: Path) -> None:
    named = json.loads((saved / "config.json").read_text(encoding="utf-8"))["auto_map"].values()
    for reference in named:
        assert isinstance(get_class_from_dynamic_module(reference, str(saved)), type)


def test_after_replacing_the_stitch(cnn_vit: StitchedModel, net: Any, inputs: Any, tmp_path: Path) -> None:
    cnn_vit.stitch = cnn_vit.stitch.identity()
    assert_same(cnn_vit, saved_and_loaded(cnn_vit, tmp_path), inputs(net("cnn")))


def test_loading_in_another_dtype(saved: Path) -> None:
    for dtype in ("bfloat16", torch.bfloat16):
        assert {p.dtype for p in StitchedModel.from_pretrained(saved, dtype=dtype).parameters()} == {torch.bfloat16}
    assert {p.dtype for p in StitchedModel.from_pretrained(saved, dtype="auto").parameters()} == {torch.float32}


def test_loading_keeps_the_random_state(saved: Path) -> None:
    before = torch.get_rng_state()
    StitchedModel.from_pretrained(saved)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_local_path_is_saved(images: Any, tmp_path: Path) -> None:
    build("vit", 0).save_pretrained(tmp_path / "parent")
    a = hf_stitch.load(str(tmp_path / "parent"))
    b = adapted("vit", transformers.ViTForImageClassification.from_pretrained(tmp_path / "parent"))
    model = stitched(a, b, images, (LAYERS["vit"], LAYERS["vit"]))
    model.save_pretrained(tmp_path / "model")
    model.stitcher.save_pretrained(tmp_path / "stitcher")
    StitchedModel.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "again")
    for path in (tmp_path / "model", tmp_path / "stitcher", tmp_path / "again"):
        for file in path.glob("*.json"):
            assert str(tmp_path) not in file.read_text()


def test_no_warning_about_the_processor(
    net: Any, texts: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    a = net("bert")
    saved_and_loaded(stitched(a, a, texts, (LAYERS["bert"], LAYERS["bert"])), tmp_path)
    transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert "instantiate a model of type" not in capfd.readouterr().err


def test_auto_classes_load_it(saved: Path, cnn_vit: StitchedModel, net: Any, inputs: Any) -> None:
    for kind in (transformers.AutoModelForImageClassification, transformers.AutoModel):
        assert_same(cnn_vit, kind.from_pretrained(saved), inputs(net("cnn")))


# -- weights that share memory -------------------------------------------------------------------------------------


def t5() -> Any:
    """Both of its stacks, up to a cut of the decoder, read one table of words."""
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=80, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    return hf_stitch.load(model, content="decoder_input_ids"), network("llama")


def albert() -> Any:
    """Its head has one bias by two names."""
    model = adapted("bert", transformers.AlbertForMaskedLM(transformers.AlbertConfig(**TEXT)).eval())
    return model, model


def tied(model: nn.Module) -> list[list[str]]:
    """Return the names of weights with several names."""
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    return [each for each in names.values() if len(each) > 1]


@cache
def joined(kind: Any) -> tuple[StitchedModel, dict[str, torch.Tensor]]:
    """A stitched model with weights that share memory, and inputs."""
    torch.manual_seed(0)
    a, b = kind()
    layers = a.layers[0], b.layers[0]
    specs = a.spec(layers[0]), b.spec(layers[1])
    stitch = StitchingLayer(*specs, "none", IdentityStitch(specs[0].width, specs[1].width))
    return join(a, layers[0], stitch, b, layers[1], task=None), a.example


@pytest.fixture(params=[t5, albert])
def sharing(request: Any) -> tuple[StitchedModel, dict[str, torch.Tensor]]:
    """A copy of such a model, which a test may change."""
    model, batch = joined(request.param)
    return copy.deepcopy(model), batch


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of such a model."""
    joined(albert)[0].save_pretrained(folder := tmp_path_factory.mktemp("shared"))
    return folder


@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_weights_that_share_memory_are_saved_once_and_share_it_again(size: str, sharing: Any, tmp_path: Path) -> None:
    model, batch = sharing
    again = saved_and_loaded(model, tmp_path, max_shard_size=size)
    assert_same(model, again, batch)
    assert tied(model) == tied(again) != []
    weights = {id(each): each.nbytes for each in (*model.parameters(), *model.buffers())}
    written = sum(tensor.nbytes for file in tmp_path.glob("*.safetensors") for tensor in load_file(file).values())
    assert written == sum(weights.values())
    for each in (model, again):
        each(**batch).logits.sum().backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert_same(model, again, batch)
    again.save_pretrained(tmp_path / "again")
    assert_same(model, StitchedModel.from_pretrained(tmp_path / "again", dtype="float32"), batch)


def test_layers_of_user_code_share_their_weights_in_a_half() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    net[2].weight = net[0].weight
    a = hf_stitch.load(net, example_inputs=torch.randn(2, 8))
    model = stitched(a, a, torch.randn(60, 8), ("2", "2"), task=None)
    again = model.stitcher.attach(a, a)
    assert tied(model) == tied(again) == [["source.model.0.weight", "source.model.2.inner.weight"]]


def test_a_square_weight_is_not_tied_to_its_transpose(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = nn.Parameter(net[0].weight.detach().T)
    assert ties(net.state_dict()) == {}
    save_weights(net.state_dict(), tmp_path, "5GB", ties(net.state_dict()))
    again = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    load_strictly(again, [tmp_path / "model.safetensors"])
    assert same_state(net, again)


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_weights_that_share_memory_are_placed(place: str, sharing: Any, tmp_path: Path) -> None:
    model, batch = sharing
    model.save_pretrained(tmp_path)
    again = StitchedModel.from_pretrained(tmp_path, device_map={"source": place, "stitch": "cpu", "target": place})
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, model(**batch).logits)
    assert place == "disk" or tied(again) == tied(model)
    again.save_pretrained(tmp_path / "again")
    assert same_state(model, StitchedModel.from_pretrained(tmp_path / "again"))


def test_weights_that_were_saved_apart_stay_apart(sharing: Any, tmp_path: Path) -> None:
    """So did version 0.2, whose models may have been trained since."""
    model, batch = sharing
    for _, *others in tied(model):
        for name in others:
            place, _, key = name.rpartition(".")
            setattr(model.get_submodule(place), key, nn.Parameter(model.get_parameter(name) + 1))
    again = saved_and_loaded(model, tmp_path)
    assert_same(model, again, batch)
    assert tied(again) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda names: {**names, "x": next(iter(names.values()))}, "disagree about 'x': expected no such weight"),
        (lambda names: dict.fromkeys(names, "nowhere"), "lacks . weights"),
        (lambda names: {}, "lacks . weights"),
        (lambda names: dict.fromkeys(names, "stitch.x"), "lacks . weights"),
        (
            lambda names: {**names, "stitch.forward": "target.forward"},
            "has no weight 'target.forward', which tied_weights",
        ),
        (lambda names: {**names, next(iter(names.values())): next(iter(names.values()))}, "both contain"),
        (lambda names: {name: 5 for name in names}, "tied_weights.* must be a text, got 5"),
    ],
)
def test_a_damaged_record_of_shared_memory_is_refused(change: Any, message: str, shared: Path, tmp_path: Path) -> None:
    shutil.copytree(shared, tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path / "config.json", lambda record: record.update(tied_weights=change(record["tied_weights"])))
    with pytest.raises(ValueError, match=message):
        StitchedModel.from_pretrained(tmp_path)


# -- training ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", ["stitch", "all"])
def test_trainer_trains_it_and_its_checkpoint_loads(
    trained: str, net: Any, images: Any, inputs: Any, tmp_path: Path
) -> None:
    """With a source of timm, whose forward method takes only its input."""
    model = stitched(net("cnn"), net("vit", 1), images, (LAYERS["cnn"], LAYERS["vit"]))
    if trained == "stitch":
        model.requires_grad_(False)
        model.stitch.requires_grad_(True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        learning_rate=1e-2,
        seed=0,
    )
    data = [{"pixel_values": sample["image"], "label": sample["label"]} for sample in images[:32]]
    trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8])
    trainer.train()
    changed = {name.split(".")[0] for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert changed == ({"stitch"} if trained == "stitch" else {"source", "stitch", "target"})
    metrics = trainer.evaluate()
    pixels, labels = torch.stack([s["image"] for s in images[:8]]), torch.tensor([s["label"] for s in images[:8]])
    again = StitchedModel.from_pretrained(tmp_path / "checkpoint-2")
    with torch.no_grad():
        assert again(pixel_values=pixels, labels=labels).loss.item() == pytest.approx(metrics["eval_loss"], rel=1e-5)
    assert same_state(again, model)


def written_beside(tokenizer: Any, net: Any, texts: Any, folder: Path) -> Path:
    """Return the checkpoint that Trainer writes of a stitched model of texts, with a tokenizer of its own."""
    model = stitched(net("bert"), net("bert", 1), texts, (LAYERS["bert"],) * 2, ridge=1.0)
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=1, save_steps=1, report_to=[], disable_tqdm=True, use_cpu=True
    )
    data = [{**tokenizer(sample["text"]), "labels": sample["label"]} for sample in texts[:16]]
    collate = transformers.DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
    transformers.Trainer(model, arguments, collate, data, processing_class=tokenizer).train()
    return folder / "checkpoint-1"


def test_a_checkpoint_with_the_tokenizer_of_a_trainer_loads(net: Any, texts: Any, tmp_path: Path) -> None:
    """It is written after the model, with the padding of the last batch."""
    plain_tokenizer().save_pretrained(tmp_path / "tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    tokenizer.model_max_length = 30
    folder = written_beside(tokenizer, net, texts, tmp_path / "run")
    digests = json.loads((folder / "config.json").read_text())["manifest"]
    assert {name for name, each in digests.items() if digest(folder / name) != each} >= {"tokenizer.json"}
    loaded, samples = StitchedModel.from_pretrained(folder), [sample["text"] for sample in texts[:5]]
    for name, value in loaded.preprocess(samples).items():
        assert torch.equal(value, net("bert").preprocess(samples)[name]), name


@pytest.mark.parametrize("change", ["vocabulary", "padding_side"])
def test_a_checkpoint_with_another_tokenizer_is_refused(change: str, net: Any, texts: Any, tmp_path: Path) -> None:
    (other_tokenizer() if change == "vocabulary" else plain_tokenizer()).save_pretrained(tmp_path / "tokenizer")
    side = "left" if change == "padding_side" else "right"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer", padding_side=side)
    folder = written_beside(tokenizer, net, texts, tmp_path / "run")
    with pytest.raises(ValueError, match=r"tokenizer(_config)?\.json was changed since config\.json was saved"):
        StitchedModel.from_pretrained(folder)


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "preprocessor_config.json", "README.md"])
def test_a_pipe_in_the_folder_is_rejected_not_waited_for(name: str, saved: Path) -> None:
    (saved / name).unlink()
    os.mkfifo(saved / name)
    with pytest.raises(ValueError, match=f"{name} is a pipe, a socket or a device"):
        StitchedModel.from_pretrained(saved)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_this_user_may_not_read_is_not_called_damaged(name: str, saved: Path) -> None:
    def attempt() -> None:
        if os.getuid() == 0:
            os.setuid(65534)  # the administrator may read everything
        with pytest.raises(PermissionError, match=f"{name}: permission denied"):
            StitchedModel.from_pretrained(saved)

    opened(saved)
    (saved / name).chmod(0o600)
    assert survives(attempt)


def test_another_user_may_load_what_was_saved(cnn_vit: StitchedModel, tmp_path: Path) -> None:
    def attempt() -> None:
        if os.getuid() == 0:
            os.setuid(65534)
        StitchedModel.from_pretrained(tmp_path / "model")

    before = os.umask(0o022)
    try:
        cnn_vit.save_pretrained(tmp_path / "model", max_shard_size="10KB")
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "model").iterdir()} == {"0o644"}
    opened(tmp_path / "model")
    assert survives(attempt)


def opened(folder: Path) -> None:
    """Let other users enter a folder."""
    for part in (folder, *folder.parents):
        if part.stat().st_uid == os.getuid() and part != Path("/"):
            part.chmod(part.stat().st_mode | 0o055)


def test_a_missing_shard_is_rejected(cnn_vit: StitchedModel, tmp_path: Path) -> None:
    cnn_vit.save_pretrained(tmp_path, max_shard_size="100KB")
    sorted(tmp_path.glob("model-*.safetensors"))[1].unlink()
    with pytest.raises(ValueError, match=r"lacks \d+ weights"):
        StitchedModel.from_pretrained(tmp_path)


def test_the_class_of_another_head_is_rejected(saved: Path) -> None:
    assert isinstance(StitchedModelForImageClassification.from_pretrained(saved), StitchedModelForImageClassification)
    with pytest.raises(
        ValueError, match="contains a StitchedModelForImageClassification, not a StitchedModelForSequenceClassification"
    ):
        StitchedModelForSequenceClassification.from_pretrained(saved)


def test_device_map_with_one_device(saved: Path) -> None:
    assert StitchedModel.from_pretrained(saved, device_map="cpu").device.type == "cpu"


def test_an_empty_config_is_rejected() -> None:
    with pytest.raises(ValueError, match="this config describes no stitched model"):
        StitchedModel(hf_stitch.StitchConfig())


def pickled(folder: Path, name: str) -> Path:
    """Write weights as a pickle that creates a file when it is opened; return the path of this file."""
    trace = folder / "unpickled"

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (trace,)

    torch.save({"weight": Bomb()}, folder / name)
    return trace


def test_pickles_are_never_opened(saved: Path, tmp_path: Path) -> None:
    (saved / "model.safetensors").unlink()
    trace = pickled(saved, "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors"):
        StitchedModel.from_pretrained(saved)
    assert not trace.exists()


@pytest.mark.parametrize("family", ["vit", "cnn"])
def test_load_opens_no_pickles(family: str, tmp_path: Path) -> None:
    if family == "vit":
        build("vit", 0).config.save_pretrained(tmp_path)
    else:
        (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnet10t", "num_classes": 5}))
    trace = pickled(tmp_path, "pytorch_model.bin")
    with pytest.raises((OSError, ValueError), match="safetensors"):
        hf_stitch.load(str(tmp_path))
    assert not trace.exists()


def test_code_of_a_repository_does_not_run_by_default(tmp_path: Path) -> None:
    config = {
        "model_type": "custom",
        "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"},
        "architectures": ["Model"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        hf_stitch.load(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_networks_of_user_code_are_not_saved_whole(tmp_path: Path) -> None:
    nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)]
    a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
    model = stitched(a, b, torch.randn(60, 4), ("1", "1"))
    with pytest.raises(ValueError, match=r"Sequential is a class of user code .* Save the Stitcher"):
        model.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()
