"""Exact cuts in unusual families, and in some of all."""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
import transformers
from families import Code
from timm.models import regnet, vgg
from torch import nn

import hf_stitch
from benchmarks import exactness, tiny, zoo
from benchmarks.zoo_records import FILE, TITLES, Record, read, report, write

UNUSUAL = {
    "a layer shared by all": ("text", "albert"),
    "two texts": ("text", "bart"),
    "padded to a multiple inside": ("text", "longformer"),
    "tokens before samples": ("causal", "xlnet"),
    "several streams for each token": ("causal", "prophetnet"),
    "latents instead of tokens": ("masked", "perceiver"),
    "tokens pooled and brought back": ("masked", "funnel"),
    "embeddings in a tuple": ("masked", "ibert"),
    "an attribute read of the cut": ("masked", "modernbert"),
    "layers of two kinds, one a state space": ("causal", "jamba"),
    "experts": ("causal", "mixtral"),
    "patches padded to one length": ("image", "siglip2"),
}
"""What is unusual -> suite and model type of transformers."""

TIMM: dict[str, Callable[[], nn.Module]] = {
    "a flat list of layers": lambda: vgg.VGG([8, "M", 16, "M", 16, 16, "M"], mlp_ratio=0.01, num_classes=5),
    "a tree": lambda: timm.create_model("dla46_c", levels=(1, 1, 1, 2, 2, 1), channels=(8, 8, 16, 16, 32, 32)),
    "dense blocks": lambda: timm.create_model("densenet121", block_config=(2, 2, 2), growth_rate=8, num_classes=5),
    "stages without a list": lambda: regnet.RegNet(regnet.RegNetCfg(depth=6, w0=8, wa=8.0, wm=2.0, group_size=4)),
    "CLS enters late": lambda: timm.create_model("cait_xxs24_224", img_size=64, depth=3, embed_dim=48, num_heads=4),
    "channels last, windows": lambda: timm.create_model(
        "swinv2_cr_tiny_224", img_size=64, depths=(1, 1, 2), embed_dim=24, num_heads=(2, 2, 4)
    ),
}
"""What is unusual -> a function that creates a model of timm."""


@pytest.mark.parametrize("feature", UNUSUAL)
def test_unusual_families_of_transformers(feature: str) -> None:
    jamba = inspect.getsource(transformers.JambaModel.forward)
    if feature.endswith("state space") and "isinstance(decoder_layer" in jamba:
        pytest.skip("Jamba of transformers 5.10 asks its layers for their class, which stand-ins do not have")
    adapter = zoo.adapter_of(*UNUSUAL[feature])
    layers = adapter.layers
    assert len(layers) > 1
    exactness.check(adapter, layers)


@pytest.mark.parametrize("feature", TIMM)
def test_unusual_families_of_timm(feature: str) -> None:
    torch.manual_seed(0)
    model, example = tiny.shaken(TIMM[feature]()), torch.randn(2, 3, 64, 64)
    tiny.calibrate(model, {"x": example})
    adapter = hf_stitch.load(model, example_inputs=example)
    layers = adapter.layers
    assert len(layers) > 2
    exactness.check(adapter, layers)


def test_the_check_detects_an_inexact_decode_and_a_constant_output(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = zoo.adapter_of("text", "bert")
    decode = adapter.decode
    monkeypatch.setattr(adapter, "decode", lambda r, layer: decode(r.replace(values=r.values + 1e-6), layer))
    with pytest.raises(exactness.InexactError, match=r"layer\.1': decode\(encode\(x\)\) differs from model"):
        exactness.check(adapter, ("bert.encoder.layer.1",))
    constant = Code(lambda net, x: net.blocks(x) * 0, blocks=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.raises(ValueError, match="the same output for different inputs"):
        exactness.check(hf_stitch.load(constant, example_inputs=torch.randn(2, 4)), ("blocks.0",))


def test_a_crash_or_timeout_affects_one_family_only(monkeypatch: pytest.MonkeyPatch) -> None:
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("the sweep requires fork, which this system does not support")

    def examined(act: Callable[[], object]) -> Record:
        monkeypatch.setattr(zoo, "examine", lambda suite, family: act())
        return zoo.examined("text", "bert", 1)

    assert "the process died (exit code 3)" in examined(lambda: __import__("os")._exit(3)).reason
    assert "took more than 1 s" in examined(lambda: __import__("time").sleep(60)).reason


def test_the_committed_records_are_a_row_per_family_and_keep_their_promises(tmp_path: Path) -> None:
    found = read()
    for suite, (_, least) in TITLES.items():
        rows = [record for record in found.values() if record.suite == suite]
        assert sum(record.exact > 1 for record in rows) >= least
        assert all(record.reason for record in rows if record.exact < 2)
    assert not [record for record in found.values() if record.inexact or record.exact != record.cuts]
    write(list(found.values())[::-1], tmp_path / "zoo.json")
    assert (tmp_path / "zoo.json").read_text() == FILE.read_text()
    page = report(found.values())
    assert all(f"\n| {record.family} | {record.model} |" in page for record in found.values())


@pytest.mark.parametrize(
    ("suite", "family"), [(suite, family) for suite in zoo.SUITES for family in zoo.families(suite)[::16]]
)
def test_a_family_has_no_inexact_cut_and_two_or_a_reason(suite: str, family: str) -> None:
    """One family of sixteen: ``python -m benchmarks.zoo`` examines all."""
    record = zoo.examined(suite, family)
    assert not record.inexact
    assert record.exact > 1 or record.reason
