"""Stitched models of rewritten networks are saved and loaded; what could not be loaded again is not saved."""

from __future__ import annotations

import functools
import shutil
import types
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations

import hf_stitch
from hf_stitch import StitchedModel, Stitcher
from hf_stitch.adapters.rewriting import rewrite, rewrites_of
from hf_stitch.artefacts.description import Description
from hf_stitch.plugins import Entry, entry_of
from hf_stitch.registry import PluginError, registries

import records  # isort: skip
from round_trips import assert_same, saved_and_loaded  # isort: skip
from factorising import Factorise, Factorised  # isort: skip
from tiny_networks import LAYERS, SIZE, TEXT, adapted, build, network, plain_tokenizer, stitched  # isort: skip


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registries.rewrites._entries, "factorise", Entry.of("factorise", Factorise))


def rewritten(family: str, *changes: Factorise, seed: int = 0) -> hf_stitch.Adapter:
    model = build(family, seed)
    for change in changes:
        rewrite(model, change)
    return adapted(family, model)


CHANGES = {
    "deit": (Factorise(3), Factorise(2, ["qkv"])),
    "bert": (Factorise(3, ["dense", "query"]),),
    "gpt2": (),
    "llama": (Factorise(5, ["lm_head"]), Factorise(4, ["q_proj"])),
}


@pytest.mark.parametrize("pair", [("deit", "deit"), ("bert", "bert"), ("llama", "gpt2")], ids="-".join)
def test_a_model_of_rewritten_networks_is_loaded_with_the_same_bits(
    pair: tuple[str, str], images: Any, texts: Any, inputs: Any, tmp_path: Path
) -> None:
    a, b = (rewritten(family, *CHANGES[family], seed=seed) for seed, family in enumerate(pair))
    model = stitched(a, b, images if pair[0] == "deit" else texts, (LAYERS[pair[0]], LAYERS[pair[1]]))
    model.save_pretrained(tmp_path)
    again = StitchedModel.from_pretrained(tmp_path)
    assert_same(model, again, inputs(a))
    assert any(isinstance(module, Factorised) for module in again.modules())
    halves: list[Any] = [again.source, again.target]
    for half, family in zip(halves, pair, strict=True):
        assert [record["rank"] for record in rewrites_of(half.model)] == [change.rank for change in CHANGES[family]]
    assert {p.dtype for p in StitchedModel.from_pretrained(tmp_path, dtype="bfloat16").parameters()} == {torch.bfloat16}
    again.save_pretrained(tmp_path / "again")
    assert_same(model, StitchedModel.from_pretrained(tmp_path / "again"), inputs(a))


def test_a_chain_with_rewritten_networks_is_loaded_with_the_same_bits(images: Any, inputs: Any, tmp_path: Path) -> None:
    a, b, c = (rewritten("deit", *changes, seed=i) for i, changes in enumerate([(Factorise(3),), (), (Factorise(2),)]))
    first = stitched(a, b, images, ("blocks.0", "blocks.0"))
    chain = stitched(hf_stitch.load(first), c, images, ("target.blocks.1", "blocks.1"))
    chain.save_pretrained(tmp_path / "chain")
    again = StitchedModel.from_pretrained(tmp_path / "chain")
    assert_same(chain, again, inputs(a))
    recorded, loaded = (hf_stitch.load(model).pinned.config for model in (chain, again))
    assert recorded is not None and loaded is not None
    assert {"target.rewrites", "source.source.rewrites"} <= recorded.chosen.keys()
    assert recorded.changes(loaded) == []
    assert [each["name"] for each in again.config.requires if each["registry"] == "rewrites"] == ["factorise"]


# -- what a machine lacks, and what an attacker writes -----------------------------------------------------------------


@pytest.fixture(scope="module")
def original(images: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model whose source is rewritten, which no test changes."""
    folder = tmp_path_factory.mktemp("rewritten")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registries.rewrites._entries, "factorise", Entry.of("factorise", Factorise))
        a, b = rewritten("deit", Factorise(3)), network("deit", 1)
        stitched(a, b, images, ("blocks.1", "blocks.1")).save_pretrained(folder)
    return folder


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def test_a_rewrite_that_is_not_installed_is_named_before_anything_is_built(
    saved: Path, images: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built: list[Any] = []
    monkeypatch.setattr(timm, "create_model", lambda *args, **options: built.append(args))
    monkeypatch.delitem(registries.rewrites._entries, "factorise")
    assert Description.read(saved).source_layer == "blocks.1"  # which needs no rewrite
    with pytest.raises(PluginError, match=r"requires 'factorise' among rewrites.*registered at run time"):
        StitchedModel.from_pretrained(saved)
    monkeypatch.undo()
    entry = EntryPoint("factorise", "factorising:Factorise", "hf_stitch.rewrites")
    vars(entry)["dist"] = SimpleNamespace(name="hf-stitch-factorising", version="0.1.0", entry_points=EntryPoints())
    monkeypatch.setitem(registries.rewrites.__dict__, "_plugins", {entry.name: entry_of("rewrites", entry)})
    a, b = rewritten("deit", Factorise(3)), rewritten("deit", seed=1)
    stitched(a, b, images, ("blocks.1", "blocks.1")).save_pretrained(tmp_path / "other")
    StitchedModel.from_pretrained(tmp_path / "other")
    monkeypatch.setitem(registries.rewrites.__dict__, "_plugins", {})
    monkeypatch.setattr(timm, "create_model", lambda *args, **options: built.append(args))
    with pytest.raises(PluginError, match=r"hf-stitch-factorising 0.1.0.*pip install hf-stitch-factorising"):
        StitchedModel.from_pretrained(tmp_path / "other")
    assert not built


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found[0].update(url="https://x.org"), "unexpected option 'url'"),
        (lambda found: found[0].update(rank=2), "down.*expected shape"),
        (lambda found: found[0].update(rank=10**18), "config.json is damaged"),
        (lambda found: found[0].update(name="os:system"), "requires a method that is not installed"),
        (lambda found: found.__setitem__(0, "factorise"), "rewrites.0 must be an object"),
        (lambda found: found.extend([found[0]] * 2000), "no linear layer"),
        (lambda found: found.clear(), "disagree about"),
    ],
)
def test_a_damaged_record_of_a_rewrite_is_refused(saved: Path, change: Callable[[Any], object], message: str) -> None:
    records.rewrite(saved / "config.json", lambda record: change(record["source"]["blueprint"]["rewrites"]))
    with pytest.raises(ValueError, match=message):
        StitchedModel.from_pretrained(saved)


# -- what cannot be rebuilt is not saved -------------------------------------------------------------------------------


Change = Callable[[Any], object]
MLP = "blocks.0.mlp"


def one_module_more(model: Any) -> None:
    model.get_submodule(f"{MLP}.drop1").add_module("more", nn.ReLU())  # no sequence: nothing runs it
    model.get_submodule("blocks.0.drop_path1").forward = nn.ReLU().forward


def unregistered(model: Any) -> None:
    rewrite(model, type("Unknown", (Factorise,), {"name": "unknown"})(3))


def rewritten_and_changed(model: Any) -> None:
    rewrite(model, Factorise(3, ["fc1"]))
    Factorise(3, ["fc2"]).apply(model)


REFUSED: dict[str, tuple[Change, str]] = {
    "factorised by hand": (
        Factorise(3).apply, r"source\.model\.blocks\.0\.mlp\.fc1 'torch.*Linear', now 'factorising.Factorised'",
    ),
    "one module more": (
        one_module_more, r": source\.model\.blocks\.0\.drop_path1\.forward not set, now '.*forward'\. ",
    ),
    "parametrized": (
        lambda model: parametrizations.weight_norm(model.get_submodule(f"{MLP}.fc1")), "parametrizations",
    ),
    "low rank": (
        lambda model: model.get_submodule(f"{MLP}.fc1").register_parameter("lora_A", nn.Parameter(torch.ones(2, 36))),
        r"the tensor 'source\.model\.blocks\.0\.mlp\.fc1\.lora_A'",
    ),
    "unregistered": (unregistered, "no 'unknown' among rewrites"),
    "rewritten and changed": (rewritten_and_changed, r"fc2\.down"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_rebuilt_is_refused_when_saving(name: str, images: Any, inputs: Any, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    model = build("deit", 0)
    change(model)
    a, b = adapted("deit", model.eval()), network("deit", 1)
    found = stitched(a, b, images, ("blocks.1", "blocks.1"))
    with pytest.raises(ValueError, match=message) as error:
        found.save_pretrained(tmp_path / "model")
    assert "Stitcher.attach" in str(error.value)
    assert not list(tmp_path.glob("**/*.safetensors"))
    found.stitcher.save_pretrained(tmp_path / "stitcher")
    attached = Stitcher.from_pretrained(tmp_path / "stitcher").attach(source=a, target=b)
    with torch.no_grad():
        assert torch.equal(attached(**inputs(a)).logits, found(**inputs(a)).logits)
    with pytest.raises(ValueError, match=r"the source .* has other weights|fitted to, but other settings"):
        attached.stitcher.attach(source=adapted("deit", build("deit", 0)), target=b)


CHANGED: dict[str, tuple[str, Change, str, str]] = {
    "one more in a sequence": (
        "cnn", lambda model: model.conv1.append(nn.ReLU()), r"conv1 '?\[.*'6'\]", r"conv1 '?\[.*'7'\]",
    ),
    "another epsilon in the config": (
        "vit", lambda model: setattr(model.config, "layer_norm_eps", 0.5),
        r"layernorm_before\.eps 0\.5, now 1e-12", r"config\.layer_norm_eps .*now 0\.5",
    ),
}  # fmt: skip
"""Change -> family, and what the error contains if the change was made before and after the networks were stitched."""


@pytest.mark.parametrize("name", CHANGED)
def test_a_change_of_a_live_network_is_in_no_file_that_loads_without_it(name: str, images: Any, tmp_path: Path) -> None:
    family, change, before, after = CHANGED[name]
    model = build(family, 0)
    change(model)
    b, layers = network(family, 1), (LAYERS[family],) * 2
    live = stitched(adapted(family, model), b, images, layers)
    with pytest.raises(ValueError, match=before):
        live.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"config: .*modules\."):
        live.stitcher.attach(network(family), b)
    late = stitched(network(family), b, images, layers)
    change(late.source.model)
    for save in (late.save_pretrained, lambda folder: late.stitcher.save_pretrained(folder)):
        with pytest.raises(ValueError, match=after):
            save(tmp_path)
    assert not list(tmp_path.iterdir())


def doubling_input(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tuple(2 * arg for arg in args), kwargs


HOOKED: dict[str, Callable[[nn.Module], Any]] = {
    "source.model.vit.layers.0.mlp": lambda module: module.register_forward_hook(lambda _, __, values: 2 * values),
    "target.model.vit.layers.2.mlp": lambda module: module.register_forward_pre_hook(doubling_input, with_kwargs=True),
    "stitch": lambda module: module.register_forward_hook(lambda _, __, values: 2 * values),
    "": lambda module: module.register_forward_hook(lambda _, __, output: output),
}


def test_a_model_with_a_hook_is_not_saved_without_it(images: Any, inputs: Any, tmp_path: Path) -> None:
    a = network("vit")
    model = stitched(a, network("vit", 1), images, (LAYERS["vit"],) * 2)
    before = model(**inputs(a)).logits
    for name, hook in HOOKED.items():
        handle = hook(model.get_submodule(name))
        assert not name or not torch.equal(model(**inputs(a)).logits, before)
        with pytest.raises(ValueError, match=rf"{name or 'network'}\.hooks not set, now \[.*(doubling|lambda)"):
            model.save_pretrained(tmp_path)
        if name.startswith(("source", "target")):
            with pytest.raises(ValueError, match=r"half was changed by hand since it was cut \(.*hooks not set"):
                model.stitcher.save_pretrained(tmp_path)
        handle.remove()
    model.save_pretrained(tmp_path)


# -- what may be changed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["trl.trainer.utils", "mine"])
def test_a_wrapper_of_forward_is_left_out_only_if_a_trainer_made_it(place: str, images: Any, tmp_path: Path) -> None:
    model = stitched(network("deit"), network("deit", 1), images, ("blocks.1", "blocks.1"))
    code = "def forward(self, *args, **inputs):\n    return plain(self, *args, **inputs)"
    names: dict[str, Any] = {"__name__": place, "plain": type(model).forward}
    exec(code, names)
    model.forward = types.MethodType(functools.wraps(names["plain"])(names["forward"]), model)
    if place == "mine":
        with pytest.raises(ValueError, match="forward"):
            model.save_pretrained(tmp_path)
        return
    model.save_pretrained(tmp_path)
    inputs = {"x": torch.rand(2, 3, SIZE, SIZE)}
    with torch.no_grad():
        assert torch.equal(hf_stitch.StitchedModel.from_pretrained(tmp_path)(**inputs).logits, model(**inputs).logits)


def test_networks_that_a_forward_changes_are_attached(texts: Any) -> None:
    """BigBird takes its full attention for short texts, and keeps it."""

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        config = transformers.BigBirdConfig(**TEXT, max_position_embeddings=40)
        return hf_stitch.load(transformers.BigBirdModel(config).eval(), processor=plain_tokenizer())

    nets = made(0), made(1)
    found = stitched(*nets, texts, ("encoder.layer.1",) * 2, task=None)
    assert nets[0].model.attention_type == "original_full" != made(0).model.attention_type
    found.stitcher.attach(made(0), made(1))


def test_what_no_forward_in_eval_mode_reads_may_be_changed(images: Any, net: Any, texts: Any, tmp_path: Path) -> None:
    found = stitched(adapted("vit", build("vit", 0)), network("vit", 1), images, (LAYERS["vit"],) * 2)
    for module in found.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    found.source.model.config.use_cache = found.source.model.gradient_checkpointing = True
    found.set_attn_implementation("eager")
    found.double().save_pretrained(tmp_path / "images")
    found = stitched(net("bert"), net("bert", 1), texts, (LAYERS["bert"],) * 2)
    found.enable_input_require_grads()  # a hook of training
    found.save_pretrained(tmp_path / "texts")


def test_removed_layers_and_synchronised_batch_norms_are_no_change(images: Any, inputs: Any, tmp_path: Path) -> None:
    model = build("deit", 0)
    model.set_submodule("blocks.2.mlp.act", nn.ReLU())
    norms = [adapted("cnn", timm.layers.convert_sync_batchnorm(build("cnn", seed)).eval()) for seed in (0, 1)]
    for name, (a, b), layer in (
        ("removed", (adapted("deit", model), rewritten("deit", seed=1)), "blocks.1"),
        ("norms", norms, LAYERS["cnn"]),
    ):
        found = stitched(a, b, images, (layer, layer))
        assert_same(found, saved_and_loaded(found, tmp_path / name), inputs(a))
