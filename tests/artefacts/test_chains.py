"""Stitched models are networks: they are cut and stitched again, into chains of several networks and stitches."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_stitch_testing import check_adapter
from torch import Tensor, nn

import hf_stitch
from hf_stitch import Adapter, StitchedModel, Stitcher, load
from hf_stitch.adapters import ExampleError
from hf_stitch.artefacts import Description
from hf_stitch.artefacts.joining import join
from hf_stitch.stitches import StitchingLayer

from records import rewrite  # isort: skip
from tiny_networks import LAYERS, SIZE, WORDS, network  # isort: skip

FIRST = {"vit": "vit.layers.0", "llama": "model.layers.0", "bert": "bert.encoder.layer.0"}
"""The layer at which the network in the middle of a chain begins."""
CHAINS = [("cnn", "vit", "convnext"), ("gpt2", "llama", "gpt2"), ("bert", "bert", "roberta")]


def samples(family: str) -> Any:
    if family in ("cnn", "vit", "convnext"):
        return torch.randn(40, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    words = random.Random(1)
    return [" ".join(words.choices(WORDS[:40], k=words.randint(3, 8))) for _ in range(40)]


def outputs(model: Any, given: Any) -> Tensor:
    with torch.no_grad():
        found = model(**model.preprocess(given))
    return found if isinstance(found, Tensor) else found.logits


def fitted(a: Adapter, la: str, b: Adapter, lb: str, data: Any, pooling: Any = "none") -> StitchingLayer:
    options: dict[str, Any] = {"pooling": pooling, "task": None, "progress": False, "matcher": "ridge", "ridge": 1.0}
    return hf_stitch.stitch(a, b, data, source_layer=la, target_layer=lb, **options).stitch


@cache
def chains(families: tuple[str, str, str]) -> tuple[StitchedModel, StitchedModel, StitchedModel]:
    """Three networks with the same two stitches: A → B, (A → B) → C and A → (B → C)."""
    a, b, c = (network(family, seed) for seed, family in enumerate(families))
    la, lb, lc = (LAYERS[family] for family in families)
    first, data = FIRST[families[1]], samples(families[0])
    begin = fitted(a, la, b, first, data)
    ab = join(a, la, begin, b, first, task=b.task)
    end = fitted(load(ab), f"target.{lb}", c, lc, data, "mean" if "roberta" in families else "none")
    left = join(load(ab), f"target.{lb}", end, c, lc, task=c.task)
    return ab, left, join(a, la, begin, load(join(b, lb, end, c, lc, task=c.task)), f"source.{first}", task=c.task)


@pytest.mark.parametrize("families", CHAINS[:2], ids="-".join)
def test_both_ways_to_build_a_chain_of_three_give_the_same_bits(families: tuple[str, str, str], tmp_path: Path) -> None:
    data = samples(families[0])[:7]
    _, left, right = chains(families)
    expected = outputs(left, data)
    assert torch.equal(outputs(right, data), expected)
    assert type(left) is type(right) and left.task == network(families[2], 2).task
    for name, model in (("left", left), ("right", right)):
        model.save_pretrained(tmp_path / name)
        again = StitchedModel.from_pretrained(tmp_path / name)
        assert type(again) is type(model) and torch.equal(outputs(again, data), expected)
        assert load(str(tmp_path / name)).pinned.changes(load(model).pinned) == {}


@pytest.mark.parametrize("families", CHAINS[1:], ids="-".join)
def test_layers_of_a_chain_have_the_names_of_their_own_networks_and_are_cuts(families: tuple[str, str, str]) -> None:
    _, left, right = (load(model) for model in chains(families))
    data = samples(families[0])
    first, (la, lb, lc) = FIRST[families[1]], (LAYERS[family] for family in families)
    for adapter, ends in (
        (left, (f"source.source.{la}", f"source.target.{first}", f"source.target.{lb}", f"target.{lc}")),
        (right, (f"source.{la}", f"target.source.{first}", f"target.source.{lb}", f"target.target.{lc}")),
    ):
        assert set(ends) <= set(adapter.layers), adapter.candidates
        assert not any(".model.source" in name or ".model.target" in name for name in adapter.layers)
        assert all(adapter.layer_name(adapter.module_name(name)) == name for name in ends)
        x = adapter.preprocess(data[:3])
        for name, found in adapter.encode(x, ends).items():
            assert torch.equal(adapter.decode(found, name).logits, adapter.forward(x).logits), name
    check_adapter(left, left.preprocess(data[:3]), left.preprocess(data[3:8]))
    assert Description.of(chains(families)[1].config.to_dict(), whole=True).source_layer == f"target.{lb}"


def test_decoding_the_last_network_of_a_chain_skips_the_others() -> None:
    stubs = load(chains(CHAINS[1])[1]).cut("target.transformer.h.2")[1].stubs
    assert {"source.model.source.model.transformer.h.0", "source.model.target.model.model.layers.1.inner"} <= set(stubs)


def test_a_saved_chain_of_language_models_generates_the_same_with_and_without_its_cache(tmp_path: Path) -> None:
    for name, model in zip(("left", "right"), chains(CHAINS[1])[1:], strict=True):
        model.save_pretrained(tmp_path / name)
        again: Any = StitchedModel.from_pretrained(tmp_path / name)
        assert again.config.num_hidden_layers == 2 + 1 + 1  # h.0, h.1 | layers.1 | h.2
        inputs = again.preprocess(samples("gpt2")[:3])
        options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "output_logits": True}
        options["return_dict_in_generate"] = True
        cached, plain = (again.generate(**inputs, use_cache=use, **options) for use in (True, False))
        assert torch.equal(cached.sequences, plain.sequences)
        torch.testing.assert_close(torch.stack(cached.logits), torch.stack(plain.logits))


def test_an_image_chain_takes_the_size_for_which_its_source_was_cut_each_time(tmp_path: Path) -> None:
    ab = chains(CHAINS[0])[0]
    ab.save_pretrained(tmp_path)
    for _ in range(2):  # stateless
        adapter = load(str(tmp_path))
        assert adapter.interface.content == ("x",) and adapter.example["x"].shape[1:] == (3, SIZE, SIZE)
        assert "target.vit.layers.1" in adapter.layers
    assert list(load(ab, example_inputs={"pixel_values": torch.randn(2, 3, SIZE, SIZE)}).example) == ["x"]
    cut = r"cut at 'layer2.0' for x of the shape \(3, 32, 32\), got \(3, 64, 64\)"
    task = "for the task image-classification, got task='text-generation'"
    for job, error, message in (
        (lambda: load(ab, example_inputs=torch.randn(2, 3, 64, 64)).layers, ValueError, cut),
        (lambda: load(ab, content="pixel_values"), ExampleError, "content must be 'x'"),
        (lambda: load(str(tmp_path), pretrained=False), TypeError, "unexpected option 'pretrained'"),
        (lambda: load(str(tmp_path), task="text-generation"), ValueError, task),
    ):
        with pytest.raises(error, match=message):
            job()


@pytest.mark.parametrize("layer", ["layer1.0", "layer2.0", "layer3.0"])  # 8 x 8, 4 x 4 and 2 x 2 positions
def test_layers_after_a_stitch_that_resamples_keep_their_grid_and_prefix_tokens(layer: str) -> None:
    a, b = network("cnn"), network("vit", 1)
    made = join(a, layer, fitted(a, layer, b, "vit.layers.0", samples("cnn")), b, "vit.layers.0", task=b.task)
    for name in ("vit.layers.0", "vit.layers.2"):
        assert load(made).spec(f"target.{name}") == b.spec(name)
    assert b.spec("vit.layers.2").grid == (4, 4)


def test_settings_of_a_chain_name_what_differs(tmp_path: Path) -> None:
    ab = chains(CHAINS[0])[0]
    ab.save_pretrained(tmp_path)
    other = StitchedModel.from_pretrained(tmp_path)
    config: Any = other.target.model.config
    config.layer_norm_eps = 0.1
    changes = load(ab).pinned.changes(load(other).pinned)["config"]
    assert changes[-1] == "target.layer_norm_eps 1e-12, now 0.1" and "modules.target.model.config" in changes[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda found: found["config"]["source"]["interface"]["shapes"].update(x=[3, 0, 9000]),
            "source.interface.shapes.x.1 must be an integer >= 1",
        ),
        (lambda found: found.update(config=[1]), "source.blueprint.config in .* must be an object"),
    ],
)
def test_a_damaged_record_in_a_chain_is_refused(change: Callable[[Any], object], message: str, tmp_path: Path) -> None:
    chains(CHAINS[0])[1].save_pretrained(tmp_path)
    rewrite(tmp_path / "config.json", lambda record: change(record["source"]["blueprint"]))
    with pytest.raises(ValueError, match=message):
        StitchedModel.from_pretrained(tmp_path, allow_modified=True)


# -- networks of user code ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_user_code() -> tuple[list[Any], StitchedModel, StitchedModel, Tensor]:
    """Three networks, the stitched model of the first two and that of all three, and vectors."""
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(3)]
    data = torch.randn(60, 4)
    a, b, c = (load(net, example_inputs=data[:2]) for net in nets)
    options: dict[str, Any] = {"task": None, "progress": False}
    ab = hf_stitch.stitch(a, b, data, source_layer="1", target_layer="1", **options)
    return nets, ab, hf_stitch.stitch(ab, c, data, source_layer="target.3", target_layer="1", **options), data


def test_a_chain_of_user_code_equals_plain_torch_and_is_loaded_again_without_an_example(of_user_code: Any) -> None:
    nets, ab, abc, data = of_user_code
    maps: Any = [ab.stitch.body, abc.stitch.body]
    with torch.no_grad():
        hidden = nets[0][:2](data) @ maps[0].weight.T + maps[0].bias
        hidden = nets[1][2:4](hidden) @ maps[1].weight.T + maps[1].bias
        expected = nets[2][2:](hidden)
        torch.testing.assert_close(abc(input=data), expected, rtol=1e-5, atol=1e-6)
        again = load(abc)
        assert again.interface.content == ("input",)  # the name of the first network, not pixel_values
        assert {"source.source.1", "source.target.1", "source.target.3", "target.3"} <= set(again.layers)
        torch.testing.assert_close(again.forward(data), expected, rtol=1e-5, atol=1e-6)
    for _ in range(2):
        adapter = load(ab)
        assert adapter.example["input"].shape[1:] == (4,) and {"source.1", "target.1"} <= set(adapter.layers)
        ab.parents = None  # as in a copy, or after loading


def test_a_chain_of_user_code_is_saved_in_one_folder(of_user_code: Any, tmp_path: Path) -> None:
    nets, ab, abc, data = of_user_code
    abc.stitcher.save_pretrained(tmp_path / "chain")
    stitcher, example = Stitcher.from_pretrained(tmp_path / "chain"), {"example_inputs": data[:2]}
    a, b, c = (load(net, **example) for net in nets)
    with torch.no_grad():
        expected = abc(input=data)
        for ends, options in (
            (((a, b), c), {}), ((tuple(nets[:2]), nets[2]), example), (((a, b), nets[2]), example), ((ab, c), {}),
        ):  # fmt: skip
            assert torch.equal(stitcher.attach(*ends, **options)(input=data), expected)
    timm: Any = ("timm:resnet10t", b)  # is loaded with the option
    for given, error, message in (
        ({"source": timm, "target": c, "pretrained": False}, ValueError, "the source Sequential, .* has other weights"),
        ({"source": (a, b), "target": c, "pretrained": False}, TypeError, "pretrained: loading options require a netw"),
        ({"target": c}, ValueError, r"the source is a stitched model, .* as source=\(source, target\)"),
        ({"source": (b, a), "target": c}, ValueError, "the network passed as the source, Sequential, .* are swapped"),
        ({"source": (a, b), "target": (b, c)}, TypeError, "the target is one network, got a tuple of 2"),
        ({"source": (a, b, c), "target": c}, TypeError, "the source is stitched from two networks, .*, got 3"),
    ):
        with pytest.raises(error, match=message):
            stitcher.attach(**given)
    for changed in ("stitch.source.safetensors", "stitcher.json"):
        copied = Path(shutil.copytree(tmp_path / "chain", tmp_path / changed))
        content = bytearray((copied / changed).read_bytes())
        content[-20] ^= 1
        (copied / changed).write_bytes(bytes(content))
        with pytest.raises(ValueError, match=re.escape(changed)):
            Stitcher.from_pretrained(copied)
    stitcher.save_pretrained(tmp_path / "again")
    assert {p.name for p in (tmp_path / "again").iterdir()} == {p.name for p in (tmp_path / "chain").iterdir()}
    ab.stitcher.save_pretrained(tmp_path / "again")  # over the chain, of which no file remains
    assert [p.name for p in (tmp_path / "again").glob("*.safetensors")] == ["stitch.safetensors"]


def test_a_chain_is_the_new_encoder_of_a_network(of_user_code: Any) -> None:
    nets, ab, _, data = of_user_code
    a = load(nets[0], example_inputs=data[:2])
    with pytest.raises(TypeError, match=r"encoder_layer is missing: .* one of source\..*, target\."):
        hf_stitch.swap(a, ab, data, target_layer="1")
    swapped = hf_stitch.swap(a, ab, data, encoder_layer="target.3", target_layer="3", matcher="lstsq", task=None)
    with torch.no_grad():
        hidden = load(ab).encode(data, "target.3")["target.3"].rows("mean")
        body: Any = swapped.stitch.body
        expected = nets[0][4](hidden @ body.weight.T + body.bias)
        torch.testing.assert_close(swapped(input=data), expected, rtol=1e-4, atol=1e-5)
