"""Saving and loading of stitched models and stitchers: every matcher, family and dtype, and every way of loading."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from collections.abc import Callable
from functools import cache, partial
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
from hf_stitch import StitchedModel, Stitcher
from hf_stitch.artefacts.joining import join
from hf_stitch.artefacts.weights import load_strictly, save_weights, ties
from hf_stitch.matchers import ClosedFormMatcher
from hf_stitch.registry import registries
from hf_stitch.stitches import IdentityStitch, StitchingLayer
from hf_stitch.storage.files import digest

from round_trips import assert_same, same_state, saved_and_loaded  # isort: skip
from records import rewrite  # isort: skip
from tiny_networks import (
    LANGUAGE,
    LAYERS,
    TEXT,
    adapted,
    build,
    network,
    plain_tokenizer,
    stitched,
)  # fmt: skip # isort: skip

from two_tokenizers import LAYER, SENTENCES, decoder  # isort: skip

# -- artefact × matcher × way of loading -------------------------------------------------------------------------------

Made = tuple[StitchedModel, tuple[Any, Any], dict[str, Any]]
"""A stitched model, what its stitcher is attached to, and a batch."""
OPTIONS: dict[str, dict[str, Any]] = {
    "attention": {"causal": True}, "lasso": {"alpha": 0.01}, "low_rank": {"rank": 4}, "ridge": {"ridge": 1.0},
    "low_rank_residual": {"rank": 2}, "residual_mlp": {"width": 4, "epochs": 1}, "piecewise": {"clusters": 2},
}  # fmt: skip
TRAINED = ("residual_mlp", "piecewise")
MATCHERS = [
    name
    for name in registries.matchers
    if registries.matchers.entry(name).origin == "built-in"
    and (name in TRAINED or issubclass(registries.matchers.get(name), ClosedFormMatcher))
]


def between(source: str, target: str, *dtypes: str, **options: Any) -> Callable[[Any, Any, Any], Made]:
    def make(images: Any, texts: Any, inputs: Any) -> Made:
        a, b = network(source, 0, *dtypes[:1]), network(target, 1, *dtypes[1:])
        data = texts if source in LANGUAGE else images
        return stitched(a, b, data, (LAYERS[source], LAYERS[target]), **options), (a, b), inputs(a)

    return make


def replaced(images: Any, texts: Any, inputs: Any) -> Made:
    """A model whose stitch was replaced after it was fitted."""
    model, ends, batch = between("cnn", "vit")(images, texts, inputs)
    model.stitch = model.stitch.identity()
    return model, ends, batch


def partial_network(kind: str, side: int, images: Any, texts: Any, inputs: Any) -> Made:
    """A network without an optional part, or with one, as the source or as the target."""
    config: Any = build(kind, 0).config
    if kind == "bert":
        model: Any = transformers.BertModel(config, add_pooling_layer=False)
    else:
        model = transformers.ViTModel(config, add_pooling_layer=False, use_mask_token=True)
    ends = [adapted(kind, model.eval()), network(kind, 1)]
    layers = [next(name for name in ends[0].layers if name.endswith("1")), LAYERS[kind]]
    if side:
        ends.reverse()
        layers.reverse()
    made = stitched(*ends, texts if kind == "bert" else images, tuple(layers), task=ends[1].task)
    return made, (ends[0], ends[1]), inputs(ends[0])


def of_two_tokenizers(source: str, target: str, *_: Any) -> Made:
    a, b = decoder(source), decoder(target)
    made = stitched(a, b, SENTENCES, (LAYER[source], LAYER[target]), align="prefix", own=source == "gpt2")
    return made, (a, b), made.preprocess(SENTENCES[3:6])


def made_by(matcher: str) -> Callable[[Any, Any, Any], Made]:
    """Networks of unequal widths, unless the matcher takes equal ones alone."""
    pair = ("cnn", "deit") if registries.matchers.get(matcher).unequal_widths else ("vit", "vit")
    return between(*pair, matcher=matcher, **OPTIONS.get(matcher, {}))


MODELS: dict[str, Callable[[Any, Any, Any], Made]] = {
    **{matcher: made_by(matcher) for matcher in MATCHERS},
    **{family: between(family, family) for family in ("cnn", "convnext", "swin", "bert", "gpt2")},
    "decoders": between("gpt2", "llama"), "two vocabularies": between("roberta", "bert", pooling="mean"),
    "without a head": between("llama", "t5", task=None), "replaced": replaced,
    "float16": between("vit", "swin", "float16", "float16"), "bfloat16": between("gpt2", "llama", *["bfloat16"] * 2),
    "one in bfloat16": between("vit", "swin", "bfloat16", "float32"),
    "the other in bfloat16": between("gpt2", "llama", "float32", "bfloat16"),
    **{f"parts of {kind} {side}": partial(partial_network, kind, side) for kind in ("bert", "vit") for side in (0, 1)},
    "prefixes of llama": partial(of_two_tokenizers, "llama", "gpt2"),
    "prefixes of gpt2": partial(of_two_tokenizers, "gpt2", "llama"),
}  # fmt: skip
"""Buffers that networks do not save (Swin, Llama), tied weights (GPT-2), names that loaders rewrite (ConvNeXt), …"""


def attached(model: StitchedModel, ends: tuple[Any, Any], folder: Path) -> StitchedModel:
    model.stitcher.save_pretrained(folder)
    assert {path.name for path in folder.glob("*.[js]*")} - {"source_tokenizer.json", "target_tokenizer.json"} == {
        "stitch.safetensors", "stitcher.json"
    }  # fmt: skip
    stitcher = Stitcher.from_pretrained(folder)
    for name in ("source", "source_layer", "target", "target_layer", "task", "scores"):
        assert getattr(stitcher, name) == getattr(model.stitcher, name), name
    assert stitcher.stitch.to_dict() == model.stitcher.stitch.to_dict()
    return stitcher.attach(*ends)


def in_shards(model: StitchedModel, _: Any, folder: Path) -> StitchedModel:
    again = saved_and_loaded(model, folder, max_shard_size="30KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return saved_and_loaded(again, folder)  # old shards are deleted


def by_an_auto_class(model: StitchedModel, _: Any, folder: Path, kind: Any = transformers.AutoModel) -> Any:
    model.save_pretrained(folder)
    return kind.from_pretrained(folder)


WAYS: dict[str, Callable[[StitchedModel, tuple[Any, Any], Path], StitchedModel]] = {
    "model": lambda model, _, folder: saved_and_loaded(model, folder),
    "stitcher": attached,
    "shards": in_shards,
    "auto": by_an_auto_class,
    "state": lambda model, _, folder: StitchedModel.from_pretrained(
        None, config=saved_and_loaded(model, folder).config, state_dict=model.state_dict()
    ),
    "copy": lambda model, _, folder: copy.deepcopy(model),
    "pickle": lambda model, _, folder: pickle.loads(pickle.dumps(model)),
}


@pytest.fixture(scope="module")
def made(images: Any, texts: Any, inputs: Any) -> Callable[[str], Made]:
    """``made(name)``: a row of the table, which no test changes."""
    return cache(lambda name: MODELS[name](images, texts, inputs))


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, way) for name in MODELS for way in ("model", "stitcher") if (name, way) != ("replaced", "stitcher")),
        *((name, way) for name in ("cnn", "decoders", "two vocabularies") for way in list(WAYS)[2:]),
    ],
)
def test_loaded_equals_saved(name: str, way: str, made: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, ends, batch = made(name)
    again = WAYS[way](model, ends, tmp_path / "saved")
    if name == "one in bfloat16":
        for part, dtype in ((model.source, "bfloat16"), (model.target, "float32"), (model.stitch.body, "float32")):
            assert {parameter.dtype for parameter in part.parameters()} == {getattr(torch, dtype)}
    if (name, way) == ("two vocabularies", "model"):
        saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
        assert saved.get_vocab() == ends[0].processor.get_vocab()
    assert "instantiate a model of type" not in capfd.readouterr().err  # of the processor
    assert_same(model, again, batch)
    assert not {p.data_ptr() for p in again.parameters()} & {p.data_ptr() for p in model.parameters()}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in again.modules())
    assert again.source._slot.values is again.target._slot.values is None  # no activations are kept


def test_classes_of_a_head_load_their_own_models_alone(saved: Path, cnn_vit: StitchedModel) -> None:
    kind = hf_stitch.StitchedModelForImageClassification
    for each in (kind, transformers.AutoModelForImageClassification):
        assert type(each.from_pretrained(saved)) is type(cnn_vit) is kind
    with pytest.raises(ValueError, match=f"contains a {kind.__name__}, not a StitchedModelForSequenceClassification"):
        hf_stitch.StitchedModelForSequenceClassification.from_pretrained(saved)


# -- files -------------------------------------------------------------------------------------------------------------


def test_saving_again_writes_the_same_files(saved: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    StitchedModel.from_pretrained(saved).save_pretrained(tmp_path / "twin")
    assert torch.equal(torch.get_rng_state(), before)
    files = {path.name: path.read_bytes() for path in saved.iterdir()}
    assert sorted(files) == [
        "README.md", "config.json", "model.safetensors", "modeling_hf_stitch.py", "preprocessor_config.json",
    ]  # fmt: skip
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "twin").iterdir()}


def test_the_module_beside_a_model_has_the_classes_that_its_config_names(saved: Path) -> None:
    for reference in json.loads((saved / "config.json").read_text(encoding="utf-8"))["auto_map"].values():
        assert isinstance(get_class_from_dynamic_module(reference, str(saved)), type)


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


# -- scores ------------------------------------------------------------------------------------------------------------


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
    # saved with the weights of a trainer
    state = {name: value.clone() for name, value in scored.state_dict().items()}
    assert saved_and_loaded(scored, tmp_path / "same", state_dict=state).config.scores
    state["stitch.body.weight"] *= 0.5
    assert saved_and_loaded(scored, tmp_path / "other", state_dict=state).config.scores is None
    del cnn_vit.config.recipe["scored_weights"]  # as earlier versions wrote it
    assert "Its accuracy" in str(cnn_vit)
    with torch.no_grad():
        next(cnn_vit.target.parameters()).mul_(0.5)
    assert "Its accuracy" not in str(cnn_vit)


# -- what cannot be saved ----------------------------------------------------------------------------------------------


def into_llama(change: Callable[[Any], object], texts: Any) -> StitchedModel:
    change(target := build("llama", 1))
    b = hf_stitch.load(target, processor=plain_tokenizer())
    return stitched(network("llama"), b, texts, (LAYERS["llama"], LAYERS["llama"]))


def quantised(model: Any) -> None:
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def adapted_by_peft(model: Any) -> None:
    def forward(self: Any, x: Any) -> Any:
        return nn.Linear.forward(self, x)

    kind = type("Linear", (nn.Linear,), {"__module__": "peft.tuners.lora.layer", "forward": forward})
    for name, module in [(n, m) for n, m in model.named_modules() if n.endswith("q_proj")]:
        model.set_submodule(name, kind(module.in_features, module.out_features, bias=False))


def of_user_code(texts: Any) -> StitchedModel:
    nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)]
    a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
    return stitched(a, b, torch.randn(60, 4), ("1", "1"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(into_llama, quantised), r"quantized network \(bitsandbytes\) cannot be saved: .*Stitcher.attach"),
        (partial(into_llama, adapted_by_peft), r"with a PEFT adapter: merge it .*merge_and_unload.*Stitcher.att"),
        (of_user_code, r"Sequential is a custom class .* Save the Stitcher"),
    ],
    ids=["quantised", "peft", "user code"],
)
def test_a_model_that_cannot_be_saved_is_refused(make: Any, message: str, texts: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make(texts).save_pretrained(tmp_path / "model")
    assert not list(tmp_path.glob("**/*.safetensors"))


# -- weights that share memory -----------------------------------------------------------------------------------------


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
        (lambda names: {**names, "stitch.forward": "target.forward"}, "lacks the weight 'target.forward' in tied_wei"),
        (lambda names: {**names, next(iter(names.values())): next(iter(names.values()))}, "both contain"),
        (lambda names: {name: 5 for name in names}, "tied_weights.* must be a text, got 5"),
    ],
)
def test_a_damaged_record_of_shared_memory_is_refused(change: Any, message: str, shared: Path, tmp_path: Path) -> None:
    shutil.copytree(shared, tmp_path, dirs_exist_ok=True)
    rewrite(tmp_path / "config.json", lambda record: record.update(tied_weights=change(record["tied_weights"])))
    with pytest.raises(ValueError, match=message):
        StitchedModel.from_pretrained(tmp_path)


# -- checkpoints of a trainer ------------------------------------------------------------------------------------------


def test_a_checkpoint_with_the_tokenizer_of_a_trainer_loads(net: Any, texts: Any, tmp_path: Path) -> None:
    """It is written after the model, with the padding of the last batch."""
    plain_tokenizer().save_pretrained(tmp_path / "tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    tokenizer.model_max_length = 30
    model = stitched(net("bert"), net("bert", 1), texts, (LAYERS["bert"],) * 2, ridge=1.0)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, save_steps=1, report_to=[], disable_tqdm=True, use_cpu=True
    )
    data = [{**tokenizer(sample["text"]), "labels": sample["label"]} for sample in texts[:16]]
    collate = transformers.DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
    transformers.Trainer(model, arguments, collate, data, processing_class=tokenizer).train()
    folder = tmp_path / "checkpoint-1"
    digests = json.loads((folder / "config.json").read_text())["manifest"]
    assert {name for name, each in digests.items() if digest(folder / name) != each} >= {"tokenizer.json"}
    loaded, samples = StitchedModel.from_pretrained(folder), [sample["text"] for sample in texts[:5]]
    for name, value in loaded.preprocess(samples).items():
        assert torch.equal(value, net("bert").preprocess(samples)[name]), name


# -- code that does not run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["model", "stitcher", "network"])
def test_pickles_are_never_opened(what: str, saved: Path, saved_stitcher: Path, tmp_path: Path) -> None:
    folder = {"model": saved, "stitcher": saved_stitcher}.get(what, tmp_path)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    if what == "network":
        build("vit", 0).config.save_pretrained(folder)
    trace = tmp_path / "unpickled"

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (trace,)

    torch.save({"weight": Bomb()}, folder / ("stitch.bin" if what == "stitcher" else "pytorch_model.bin"))
    load: Any = {"model": StitchedModel, "stitcher": Stitcher}.get(what)
    with pytest.raises((OSError, ValueError), match="safetensors"):
        (load.from_pretrained if load else hf_stitch.load)(str(folder))
    assert not trace.exists()


def test_code_of_a_repository_does_not_run_by_default(tmp_path: Path) -> None:
    auto = {"AutoConfig": "code.Config", "AutoModel": "code.Model"}
    config = {"model_type": "custom", "auto_map": auto, "architectures": ["Model"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        hf_stitch.load(str(tmp_path))
    assert not (tmp_path / "ran").exists()
