"""Architecture overrides: one class for each family, and one row in this test."""

from __future__ import annotations

from typing import Any

import made_up
import pytest
import torch
import transformers as hf
from families import BERT, SPEECH
from hf_stitch_testing import check_adapter, check_override

import hf_stitch
from hf_stitch.adapters.doctor import diagnose
from hf_stitch.adapters.overrides import Override, override_of
from hf_stitch.registry import Entry, registries

SIGLIP = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "patch_size": 4}
FAMILIES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "made-up": (made_up.MadeUp, ("first", "second")),
    "siglip2": (
        lambda: hf.Siglip2ForImageClassification(hf.Siglip2Config(vision_config=SIGLIP)),
        tuple(f"vision_model.encoder.layers.{i}" for i in range(3)),
    ),
    "speech": (
        lambda: hf.Data2VecAudioModel(hf.Data2VecAudioConfig(**SPEECH)),
        tuple(f"feature_extractor.conv_layers.{i}" for i in range(2)),
    ),
    "clip": (
        lambda: hf.CLIPTextModel(hf.CLIPTextConfig(**BERT, pad_token_id=0, bos_token_id=1, eos_token_id=2)),
        tuple(f"encoder.layers.{i}" for i in range(3)),
    ),
}
"""Family -> a function that creates a network, and the expected cuts."""


@pytest.mark.parametrize("name", FAMILIES)
def test_families_with_an_override(name: str) -> None:
    make, layers = FAMILIES[name]
    torch.manual_seed(0)
    network = make().eval()
    adapter = hf_stitch.load(network)
    assert adapter.layers == layers
    check_adapter(adapter, {n: v.flip(0) if v.is_floating_point() else v for n, v in adapter.example.items()})
    if name == "clip":
        check_override(override_of(network), network)


def test_an_override_cannot_turn_a_bypassed_layer_into_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_up.ForMadeUp, "blocks", lambda self, model: ("branch", "second"))
    adapter = hf_stitch.load(made_up.MadeUp().eval())
    assert adapter.layers == ("second",)
    found = diagnose(adapter)
    assert [e.status for e in found.layers] == ["refused", "verified"]
    assert "bypasses" in found.layers[0].reason
    assert any("cannot be overridden" in line for line in found.advice)


def test_a_class_that_is_not_an_override_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registries.overrides._entries, "MadeUp", Entry.of("MadeUp", dict))
    with pytest.raises(TypeError, match="the override of MadeUp must be an Override, got dict"):
        hf_stitch.load(made_up.MadeUp())


def test_a_name_with_its_package_applies_to_that_class_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(made_up.MadeUp):
        pass

    other = type("Net", (made_up.MadeUp,), {"__module__": "elsewhere.nets"})()
    monkeypatch.delitem(registries.overrides._entries, "MadeUp")
    monkeypatch.setitem(registries.overrides._entries, "elsewhere.Net", Entry.of("elsewhere.Net", made_up.ForMadeUp))
    assert type(override_of(other)) is made_up.ForMadeUp
    assert type(override_of(Net())) is Override


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ("first", "must return its blocks as a tuple of names or as None, got 'first'"),
        (("first", "secnd"), "names a block 'secnd' that MadeUp does not have; did you mean 'second'"),
    ],
)
def test_invalid_blocks_of_an_override_are_refused(blocks: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(made_up.ForMadeUp, "blocks", lambda self, model: blocks)
    with pytest.raises((TypeError, ValueError), match=message):
        hf_stitch.load(made_up.MadeUp())
