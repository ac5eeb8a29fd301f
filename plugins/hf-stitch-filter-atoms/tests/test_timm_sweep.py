"""The smallest network of every module of timm computes the same with atoms, and is plain again afterwards."""

from __future__ import annotations

import copy
import warnings

import pytest
import timm
import torch
from hf_stitch_filter_atoms import atomize, deatomize
from torch import nn

LARGEST = 15_000_000
"""Most parameters of a network."""


def smallest(module: str) -> str | None:
    """The smallest network of a module of timm that has convolutions and is not too large."""
    sizes = {}
    for name in timm.list_models(module=module):
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                net = timm.create_model(name)
            except Exception:  # some compute with their weights when they are built
                continue
        if any(isinstance(part, nn.Conv2d) for part in net.modules()):
            sizes[name] = sum(p.numel() for p in net.parameters())
    name = min(sizes, key=lambda each: (sizes[each], each), default=None)
    return name if name is not None and sizes[name] <= LARGEST else None


def measured_net(net: nn.Module) -> dict[str, float]:
    """Relative errors of the output: with atoms, plain again, and of the plain network against float64."""
    net.eval()
    x = torch.randn(2, *net.pretrained_cfg["input_size"])
    plain = [(name, type(part)) for name, part in net.named_modules()]
    shapes = {name: p.shape for name, p in net.named_parameters()}
    with torch.no_grad():
        before = output(net, x)
        exact = output(copy.deepcopy(net).double(), x.double())
        lost = atomize(net).worst
        with_atoms = output(net, x)
        deatomize(net)
        back = output(net, x)
    assert [(name, type(part)) for name, part in net.named_modules()] == plain
    assert {name: p.shape for name, p in net.named_parameters()} == shapes
    return {
        "weights": lost,
        "atoms": error(with_atoms, before),
        "back": error(back, before),
        "float32": error(before.double(), exact),
    }


def output(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found = net(x)
    return found[0] if isinstance(found, tuple | list) else found


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("module", timm.list_modules()[::6])
def test_modules_of_timm(module: str) -> None:
    name = smallest(module)
    if name is None:
        pytest.skip("no small network with convolutions")
    torch.manual_seed(0)
    errors = measured_net(timm.create_model(name))
    # Some untrained networks multiply rounding errors, also those of plain float32.
    allowed = max(1e-5, 3 * errors["float32"])
    assert errors["weights"] < 1e-6 and errors["atoms"] <= allowed and errors["back"] <= allowed, (name, errors)
