"""Rewrites of networks: how they are applied, recorded in blueprints, and repeated without weights."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from hf_stitch_testing import check_rewrite
from torch import nn

from hf_stitch import load
from hf_stitch.adapters.rewriting import network_of, rewrite, rewrites_of
from hf_stitch.adapters.untrusted import weightless
from hf_stitch.registry import Entry, UnknownNameError, registries

from factorising import Factorise, Factorised  # isort: skip
from tiny_networks import build  # isort: skip


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registries.rewrites._entries, "factorise", Entry.of("factorise", Factorise))


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(("family", "ending"), [("deit", ("fc1", "fc2")), ("bert", ("dense",))])
def test_a_rewrite_conforms(family: str, ending: tuple[str, ...]) -> None:
    check_rewrite(Factorise(3, ending), build(family, 0))


@pytest.mark.parametrize("given", ["factorise:rank=3", {"name": "factorise", "rank": 3}, Factorise(3)], ids=str)
def test_rewrites_are_applied_and_recorded_in_order(given: Any) -> None:
    model = build("deit", 0)
    assert rewrites_of(model) == []
    rewrite(model, given)
    rewrite(model, Factorise(2, ["qkv"]))
    assert isinstance(model.get_submodule("blocks.0.mlp.fc1"), Factorised)
    records = [
        {"name": "factorise", "rank": 3, "ending": ["fc1", "fc2"]},
        {"name": "factorise", "rank": 2, "ending": ["qkv"]},
    ]
    assert rewrites_of(model) == rewrites_of(copy.deepcopy(model)) == records
    blueprint = load(model).blueprint()
    assert blueprint["rewrites"] == records
    again = network_of(json.loads(json.dumps(blueprint)))
    assert shapes(again) == shapes(model) and rewrites_of(again) == records
    assert not any(module.training for module in again.modules())
    with weightless():
        assert shapes(network_of(blueprint)) == shapes(model)


def test_only_rewritten_networks_have_rewrites_in_their_records() -> None:
    plain, other = build("deit", 0), build("deit", 0)
    rewrite(other, Factorise(3))
    assert "rewrites" not in load(plain).blueprint()
    before, after = load(plain).pinned.config, load(other).pinned.config
    assert before is not None and after is not None
    assert [change.partition(" ")[0] for change in before.changes(after)] == ["rewrites"]


def test_pins_follow_a_rewrite_whose_code_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an edit of a plugin: what was built with the old code is no longer compared with."""
    old = build("deit", 0)
    rewrite(old, Factorise(3, ["fc1"]))
    assert not [key for key in load(old).pinned.config.chosen if key.startswith("modules.")]

    class Further(Factorise):
        def apply(self, model: nn.Module) -> None:
            super().apply(model)
            model.set_submodule("norm", nn.Identity())

    monkeypatch.setitem(registries.rewrites._entries, "factorise", Entry.of("factorise", Further))
    assert any(key.startswith("modules.norm") for key in load(old).pinned.config.chosen)
    new = build("deit", 0)
    rewrite(new, {"name": "factorise", "rank": 3, "ending": ["fc1"]})
    assert not [key for key in load(new).pinned.config.chosen if key.startswith("modules.")]


def test_a_rewrite_that_fails_is_not_recorded() -> None:
    model = build("deit", 0)
    for given, error, message in (
        (Factorise(3, ["nothing"]), ValueError, "no linear layer"),
        ("factorize:rank=3", UnknownNameError, "did you mean 'factorise'"),
        ({"name": "factorise", "rank": 3, "url": "x"}, TypeError, "unexpected option 'url'"),
        (Factorise(torch.ones(1)), TypeError, "JSON"),  # type: ignore[arg-type]
    ):
        with pytest.raises(error, match=message):
            rewrite(model, given)
    assert rewrites_of(model) == [] and shapes(model) == shapes(build("deit", 0))
