"""Stitchers, saved, loaded and attached to their networks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_stitch
from hf_stitch import Stitcher
from hf_stitch.matchers import ClosedFormMatcher
from hf_stitch.registry import registries

from records import rewrite  # isort: skip
from round_trips import assert_same, saved_and_loaded  # isort: skip
from tiny_networks import LAYERS, adapted, build, network, stitched  # isort: skip

BUILT_INS = [name for name in registries.matchers if registries.matchers.entry(name).origin == "built-in"]
CLOSED_FORMS = [name for name in BUILT_INS if issubclass(registries.matchers.get(name), ClosedFormMatcher)]
OPTIONS = {
    "attention": {"causal": True}, "lasso": {"alpha": 0.01}, "low_rank": {"rank": 4}, "ridge": {"ridge": 1.0},
}  # fmt: skip


def content(stitcher: Stitcher) -> tuple[Any, ...]:
    ends = (stitcher.source, stitcher.source_layer, stitcher.target, stitcher.target_layer)
    return (*ends, stitcher.task, stitcher.scores, stitcher.stitch.to_dict(), json.loads(json.dumps(stitcher.recipe)))


PAIRS = [("cnn", "deit"), ("vit", "vit"), ("gpt2", "llama"), ("roberta", "bert")]
CASES = [
    pytest.param(
        matcher,
        pair,
        id=f"{'-'.join(pair)}-{matcher}",
        marks=[pytest.mark.slow] * (pair != PAIRS[0] and number % 5 > 0),
    )
    for pair in PAIRS
    for number, matcher in enumerate(CLOSED_FORMS)
]
"""Of all pairs but the first, four fifths of the matchers are slow tests."""


@pytest.mark.parametrize(("matcher", "pair"), CASES)
def test_a_saved_and_loaded_model_and_an_attached_stitcher_are_the_same(
    matcher: str, pair: tuple[str, str], net: Any, images: Any, texts: Any, inputs: Any, tmp_path: Path
) -> None:
    a, b = net(pair[0]), net(pair[1], 1)
    if (
        not registries.matchers.get(matcher).unequal_widths
        and a.spec(LAYERS[pair[0]]).width != b.spec(LAYERS[pair[1]]).width
    ):
        pytest.skip(f"{matcher} takes equal widths")
    options = {**OPTIONS.get(matcher, {}), "pooling": "mean" if pair[0] == "roberta" else "none"}
    model = stitched(
        a,
        b,
        images if pair[0] in ("cnn", "vit") else texts,
        (LAYERS[pair[0]], LAYERS[pair[1]]),
        matcher=matcher,
        **options,
    )
    batch, folder = inputs(a), tmp_path / "stitcher"
    assert_same(model, saved_and_loaded(model, tmp_path / "model"), batch)
    model.stitcher.save_pretrained(folder)
    again = Stitcher.from_pretrained(folder)
    assert content(again) == content(model.stitcher)
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "stitch.safetensors", "stitcher.json"]
    attached = again.attach(a.model if pair[0] == "vit" else a, b)
    with torch.no_grad():
        assert torch.equal(attached(**batch).logits, model(**batch).logits)
    assert type(attached) is type(model)
    assert attached.config.scores == model.config.scores


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_networks_of_other_dtypes(dtype: str, images: Any, inputs: Any, tmp_path: Path) -> None:
    a, b = network("vit", 0, dtype), network("swin", 1, dtype)
    model = stitched(a, b, images, (LAYERS["vit"], LAYERS["swin"]))
    model.stitcher.save_pretrained(tmp_path)
    attached = Stitcher.from_pretrained(tmp_path).attach(a, b)
    assert attached.stitch.body.weight.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(attached(**inputs(a)).logits, model(**inputs(a)).logits)


def test_networks_of_user_code_are_attached_as_modules(tmp_path: Path) -> None:
    nets = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)]
    a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
    x = torch.randn(60, 4)
    model = stitched(a, b, x, ("1", "1"), matcher="lstsq")
    model.stitcher.save_pretrained(tmp_path)
    stitcher = Stitcher.from_pretrained(tmp_path)
    assert torch.equal(stitcher.attach(a, b)(input=x), model(input=x))
    for side, given in (("source", {"target": b}), ("target", {"source": a})):
        with pytest.raises(
            ValueError,
            match=f"the {side}, .* parameters, .*, was a module in memory or in a local folder: pass it, as {side}=…",
        ):
            stitcher.attach(**given)


def test_a_local_folder_is_passed_to_attach(images: Any, inputs: Any, net: Any, tmp_path: Path) -> None:
    build("vit", 0).save_pretrained(tmp_path / "vit")
    a = hf_stitch.load(str(tmp_path / "vit"))
    model = stitched(a, net("cnn", 1), images, (LAYERS["vit"], LAYERS["cnn"]))
    model.stitcher.save_pretrained(tmp_path / "stitcher")
    attached = Stitcher.from_pretrained(tmp_path / "stitcher").attach(str(tmp_path / "vit"), net("cnn", 1))
    with torch.no_grad():
        assert torch.equal(attached(**inputs(a)).logits, model(**inputs(a)).logits)


def test_attaching_changes_neither_the_stitcher_nor_the_networks(saved_stitcher: Path, net: Any) -> None:
    stitcher = Stitcher.from_pretrained(saved_stitcher)
    attached = stitcher.attach(net("cnn"), net("vit", 1))
    assert attached.parents == (net("cnn"), net("vit", 1))
    with torch.no_grad():
        for parameter in attached.parameters():
            parameter.zero_()
    assert bool(stitcher.stitch.body.weight.any())
    assert all(bool(p.any()) for p in net("vit", 1).model.vit.layers[2].mlp.parameters() if p.dim() > 1)


@pytest.mark.parametrize("side", ["source", "target"])
def test_other_weights_are_rejected(side: str, saved_stitcher: Path, net: Any) -> None:
    parents = {"source": net("cnn"), "target": net("vit", 1)}
    parents[side] = net("cnn", 7) if side == "source" else net("vit", 7)
    with pytest.raises(ValueError, match=f"the {side} .* has other weights than the stitch was fitted to"):
        Stitcher.from_pretrained(saved_stitcher).attach(**parents)


def test_a_single_changed_weight_is_rejected(saved_stitcher: Path, net: Any) -> None:
    model = build("cnn", 0)
    assert adapted("cnn", model).pinned.weights_hash == net("cnn").pinned.weights_hash
    with torch.no_grad():
        model.fc.bias[0] += 1e-3
    with pytest.raises(ValueError, match="has other weights"):
        Stitcher.from_pretrained(saved_stitcher).attach(adapted("cnn", model), net("vit", 1))


def test_a_synchronised_save_waits_for_the_names_of_new_folders(
    saved_stitcher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda file: flushed.add(os.fstat(file).st_ino))
    Stitcher.from_pretrained(saved_stitcher).save_pretrained(tmp_path / "new" / "below", sync=True)
    assert {path.stat().st_ino for path in (tmp_path, tmp_path / "new", tmp_path / "new" / "below")} <= flushed


def test_size_and_repr(saved_stitcher: Path) -> None:
    assert sum(path.stat().st_size for path in saved_stitcher.iterdir()) < 22_000
    assert repr(Stitcher.from_pretrained(saved_stitcher)).endswith(f"{LAYERS['vit']})")


# -- errors --------------------------------------------------------------------------------------------------------


def test_an_unknown_task_is_rejected(saved_stitcher: Path, net: Any) -> None:
    rewrite(saved_stitcher / "stitcher.json", lambda c: c.update(task="image-clasification"))
    with pytest.raises(ValueError, match="no 'image-clasification' among tasks; did you mean"):
        Stitcher.from_pretrained(saved_stitcher).attach(net("cnn"), net("vit", 1))


def test_pickles_are_never_opened(saved_stitcher: Path) -> None:
    (saved_stitcher / "stitch.safetensors").rename(saved_stitcher / "stitch.bin")
    with pytest.raises(FileNotFoundError, match=r"has no stitch\.safetensors"):
        Stitcher.from_pretrained(saved_stitcher)
