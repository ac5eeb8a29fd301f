"""Networks with atoms compute what the plain ones compute, and become plain again."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import timm
import torch
from hf_stitch_filter_atoms import AtomConv2d, atomize, deatomize
from torch import nn

NETWORKS = {
    "resnet18": 64,
    "tf_efficientnet_b0": 64,  # Conv2dSame, depthwise
    "rexnet_100": 64,
    "resnetv2_50x1_bit": 224,  # StdConv2d; smaller images are less exact, with plain convolutions too
    "convnext_atto": 64,  # depthwise 7×7
    "mobilenetv3_small_100": 64,
    "regnetx_002": 64,  # grouped
    "nfnet_l0": 64,  # ScaledStdConv2d
}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_timm_compute_the_same(name: str) -> None:
    torch.manual_seed(0)
    net = timm.create_model(name, num_classes=10).eval()
    x = torch.randn(2, 3, NETWORKS[name], NETWORKS[name])
    classes = {n: type(m) for n, m in net.named_modules()}
    order = [n for n, _ in net.named_parameters()]
    with torch.no_grad():
        before = net(x)
        lost = atomize(net)
        with_atoms = net(x)
        deatomize(net)
        back = net(x)
    assert lost.worst < 1e-6
    assert relative(with_atoms, before) <= 1e-5
    assert relative(back, before) <= 1e-5
    assert {n: type(m) for n, m in net.named_modules()} == classes
    assert [n for n, _ in net.named_parameters()] == order


@pytest.mark.parametrize("options", [
    {"groups": 2}, {"groups": 4}, {"stride": 2}, {"dilation": 2}, {"padding": 1}, {"padding": "same"}, {"bias": False},
    {"padding": 2, "padding_mode": "reflect"}, {"padding": 2, "padding_mode": "circular"}, {"dtype": torch.float64},
    {"padding": 1, "padding_mode": "replicate", "dtype": torch.bfloat16},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kernel", [1, 3, (1, 7), (5, 3)], ids=str)
def test_every_kind_of_convolution(options: dict[str, object], kernel: int | tuple[int, int]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 8, kernel, **options)).train()
    dtype = net[0].weight.dtype
    x = torch.randn(2, 4, 16, 16, dtype=dtype)
    before = net(x)
    size = net[0].weight.shape[2:].numel()
    atomize(net)
    conv = net[0]
    assert type(conv) is AtomConv2d and conv.training
    assert conv.atoms.shape == (size, *conv.kernel_size) and conv.atoms.dtype == dtype
    gram = conv.atoms.detach().double().flatten(1) @ conv.atoms.detach().double().flatten(1).T
    torch.testing.assert_close(
        gram, torch.eye(size, dtype=torch.float64), atol=0.02 if dtype == torch.bfloat16 else 1e-6, rtol=0
    )
    assert relative(net(x), before) <= {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 0.01}[dtype]


def test_copies_pickles_and_state_dicts() -> None:
    net = timm.create_model("tf_efficientnet_b0", num_classes=3).eval()
    atomize(net, atoms=4)
    x = torch.randn(1, 3, 64, 64)
    wanted = net(x)
    other = timm.create_model("tf_efficientnet_b0", num_classes=3).eval()
    atomize(other, atoms=4)
    other.load_state_dict(net.state_dict(), strict=True)
    saved = io.BytesIO()
    torch.save(net, saved)
    saved.seek(0)
    for same in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(saved, weights_only=False), other):
        assert [type(m) for m in same.modules()] == [type(m) for m in net.modules()]
        assert torch.equal(same(x), wanted)
        assert same.conv_stem.atoms is not net.conv_stem.atoms
    with torch.device("meta"):
        skeleton = timm.create_model("tf_efficientnet_b0", num_classes=3).eval()
    atomize(skeleton, atoms=4)
    skeleton.load_state_dict(net.state_dict(), strict=True, assign=True)
    assert torch.equal(skeleton(x), wanted)


def test_requires_grad_and_hooks_stay() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    net[0].requires_grad_(False)
    seen: list[int] = []
    net[1].register_forward_hook(lambda *_: seen.append(1))
    atomize(net)
    assert not any(p.requires_grad for p in net[0].parameters()) and all(p.requires_grad for p in net[1].parameters())
    net(torch.zeros(1, 3, 8, 8)).sum().backward()
    assert seen == [1] and net[1].atoms.grad is not None and net[1].coefficients.grad is not None
    net[1].coefficients.requires_grad_(False)
    deatomize(net)
    assert not net[0].weight.requires_grad and net[1].weight.requires_grad


def test_fewer_atoms_report_what_is_lost() -> None:
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 1))
    weight = net[0].weight.detach().clone()
    lost = atomize(net, atoms=5)
    values = torch.linalg.svdvals(weight.flatten(2).flatten(0, 1).double())
    assert lost.by_layer["0"] == pytest.approx(
        (values[5:].square().sum() / values.square().sum()).sqrt().item(), rel=1e-5
    )
    assert lost.worst == lost.by_layer["0"] > lost.by_layer["1"]
    assert relative(net[0].weight, weight) == pytest.approx(lost.worst, rel=1e-5)
    assert net[1].atoms.shape == (1, 1, 1)


def test_a_module_at_two_places_is_atomized_once() -> None:
    conv = nn.Conv2d(3, 3, 3, padding=1)
    net = nn.Sequential(conv, nn.ReLU(), conv)
    x = torch.randn(1, 3, 6, 6)
    before = net(x)
    assert list(atomize(net, layers=["2", "0"]).by_layer) == ["0"]
    assert net[0] is net[2] and isinstance(net[0], AtomConv2d)
    assert relative(net(x), before) < 1e-6


def test_initialization_is_that_of_the_base_class() -> None:
    conv = AtomConv2d(8, 16, 3, atoms=9)
    old = conv.weight.detach().clone()
    torch.manual_seed(3)
    conv.reset_parameters()
    torch.manual_seed(3)
    torch.testing.assert_close(conv.weight, nn.Conv2d(8, 16, 3).weight)
    assert not torch.equal(conv.weight, old)


def test_export() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    atomize(net)
    x = torch.randn(1, 3, 6, 6)
    torch.testing.assert_close(torch.export.export(net, (x,)).module()(x), net(x))


def shared_weight() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3))
    net[1].weight = net[0].weight
    return net


def with_nan() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3))
    with torch.no_grad():
        net[1].weight[0] = torch.nan
    return net


def two() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3), nn.ReLU())


@pytest.mark.parametrize(("make", "arguments", "message"), [
    (two, {"atoms": 0}, "atoms must be an integer >= 1 or None, got 0"),
    (two, {"atoms": -2}, "atoms must be an integer >= 1 or None, got -2"),
    (two, {"atoms": 2.5}, "atoms must be an integer >= 1 or None, got 2.5"),
    (two, {"layers": ["0", "conv"]}, "layer 'conv' does not exist; the convolutions of the network: '0', '1'"),
    (two, {"layers": ["0", "2"]}, "layer '2' must be an nn.Conv2d, got ReLU"),
    (two, {"layers": "0"}, r"layers must be a list or None, got '0'; write \['0'\]"),
    (two, {"layers": []}, "layers must not be empty"),
    (lambda: nn.Sequential(nn.Linear(2, 2)), {}, "Sequential must have a convolution"),
    (lambda: nn.Sequential(nn.Conv1d(2, 2, 1)), {}, "must have a convolution"),
    (shared_weight, {}, "0.weight and 1.weight share a parameter"),
    (shared_weight, {"layers": ["1"]}, "0.weight and 1.weight share a parameter"),
    (with_nan, {}, "layer '1' must be finite"),
    (lambda: nn.Sequential(two(), nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 3))), {}, "parametrization"),
    (lambda: nn.Sequential(nn.Conv2d(3, 3, 3), nn.LazyConv2d(3, 3)), {}, "not initialized"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_bad_inputs_are_refused_before_anything_changes(make, arguments, message) -> None:
    net = make()
    before = [(n, type(m)) for n, m in net.named_modules()]
    with pytest.raises(ValueError, match=message):
        atomize(net, **arguments)
    assert [(n, type(m)) for n, m in net.named_modules()] == before


def test_atomized_networks_are_not_atomized_again() -> None:
    net = two()
    atomize(net, layers=["1"])
    with pytest.raises(ValueError, match="layer '1' is already atomized; call deatomize first"):
        atomize(net)
    assert type(net[0]) is nn.Conv2d
    deatomize(net)
    with pytest.raises(ValueError, match="must have convolutions with atoms"):
        deatomize(net)
    with pytest.raises(ValueError, match="at most 9"):
        AtomConv2d(3, 3, 3, atoms=10)
