"""Untrained twins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hf_stitch
from hf_stitch.adapters import untrained

from tiny_networks import LAYERS, network  # isort: skip


@pytest.mark.parametrize("family", ["cnn", "deit", "bert", "gpt2"])
def test_only_the_weights_differ(family: str, inputs: Any) -> None:
    adapter = network(family)
    state = torch.get_rng_state()
    twin, again, other = (untrained(adapter, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert twin.layers == adapter.layers and twin.interface == adapter.interface
    assert twin.processor is adapter.processor and twin.reference.id is None
    one, two, three, own = (dict(each.model.named_parameters()) for each in (twin, again, other, adapter))
    assert {name: p.shape for name, p in one.items()} == {name: p.shape for name, p in own.items()}
    assert all(torch.equal(one[name], two[name]) for name in one)
    drawn = [name for name in one if one[name].std() > 0]
    assert any(not torch.equal(one[name], own[name]) for name in drawn)
    assert any(not torch.equal(one[name], three[name]) for name in drawn)
    batch = inputs(adapter)
    layer = LAYERS[family]
    assert not torch.allclose(twin.encode(batch, layer)[layer].values, adapter.encode(batch, layer)[layer].values)


def test_user_code() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) * self.scale

    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double().eval()
    net[1].running_mean.fill_(3.0)
    twin = untrained(hf_stitch.load(net, example_inputs=torch.randn(2, 4).double()))
    assert twin.model[1].running_mean.abs().max() == 0 and twin.model[0].weight.dtype == torch.float64
    assert net[1].running_mean.min() == 3
    scaled = Scaled()
    scaled.scale.data = torch.arange(3.0)
    twin = untrained(hf_stitch.load(scaled, example_inputs=torch.randn(2, 4)))
    assert not torch.equal(twin.model.body.weight, scaled.body.weight)
    assert sorted(twin.model.scale.tolist()) == [0, 1, 2] and scaled.scale.tolist() == [0, 1, 2]
