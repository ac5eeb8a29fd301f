"""Networks with common coefficients, and training of atoms only."""

from __future__ import annotations

import copy

import pytest
import torch
from atom_networks import pair, plain, relative
from hf_stitch_filter_atoms import atomize, share_coefficients, train_atoms_only
from torch import nn


def coefficients(net: nn.Module) -> list[torch.Tensor]:
    return [net.get_parameter(f"{i}.coefficients").detach() for i in (0, 3, 5)]


def test_coefficients_of_a_reference() -> None:
    nets, reference = [plain(1), plain(2)], plain(3)
    for net in (*nets, reference):
        atomize(net)
    before = copy.deepcopy(reference.state_dict())
    weights = [net[0].weight.detach().clone() for net in nets]
    lost = share_coefficients(nets, reference)
    for net, weight, truncation in zip(nets, weights, lost, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(coefficients(net), coefficients(reference), strict=True))
        columns = reference[0].coefficients.detach().flatten(0, 1).double()
        best = torch.linalg.lstsq(columns, weight.flatten(2).flatten(0, 1).double()).solution
        torch.testing.assert_close(net[0].atoms.detach().double().flatten(1), best, atol=1e-5, rtol=1e-4)
        assert truncation.by_layer["0"] == pytest.approx(relative(net[0].weight, weight), rel=1e-4)
        assert truncation.worst > 0.3
    assert all(torch.equal(value, before[name]) for name, value in reference.state_dict().items())


def test_a_network_keeps_its_function_under_its_own_coefficients() -> None:
    a, b = pair()
    x = torch.randn(2, 3, 12, 12)
    wanted = b(x)
    assert share_coefficients([b], a)[0].worst < 1e-6
    assert relative(b(x), wanted) < 1e-5


def test_the_best_common_coefficients() -> None:
    nets = [plain(seed) for seed in range(3)]
    for net in nets:
        atomize(net, atoms=6)
    weights = [net[0].weight.detach().clone().double() for net in nets]
    lost = share_coefficients(nets)
    assert all(torch.equal(x, y) for x, y in zip(coefficients(nets[0]), coefficients(nets[2]), strict=True))
    values = torch.linalg.svdvals(torch.cat([w.flatten(2).flatten(0, 1) for w in weights], 1))
    errors = sum((t.by_layer["0"] * w.norm()).square() for t, w in zip(lost, weights, strict=True))
    assert errors == pytest.approx(values[6:].square().sum().item(), rel=1e-5)


def test_networks_with_equal_coefficients_share_them_without_loss() -> None:
    a, b = pair()
    x = torch.randn(2, 3, 12, 12)
    wanted = b(x)
    assert max(t.worst for t in share_coefficients([a, b])) < 1e-6
    assert relative(b(x), wanted) < 1e-5


def test_more_atoms_than_filters() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3))
    atomize(net)
    assert share_coefficients([net])[0].worst < 1e-6


def test_what_does_not_fit_is_refused_before_anything_changes() -> None:
    a, b, other = plain(0), plain(1), plain(2, width=4)
    atomize(a)
    before = copy.deepcopy(a.state_dict())
    for models, message in (([], "models must not be empty"), ([a, b], "call hf_stitch_filter_atoms.atomize first")):
        with pytest.raises(ValueError, match=message):
            share_coefficients(models)
    atomize(b, atoms=5)
    atomize(other)
    with pytest.raises(ValueError, match=r"layer '0' must have .* \(8, 3, 9, 3, 3\) and \(8, 3, 5, 3, 3\)"):
        share_coefficients([a, b])
    with pytest.raises(ValueError, match="layer '0' must have"):
        share_coefficients([a], other)
    small = plain()
    atomize(small, layers=["0"])
    with pytest.raises(ValueError, match="must have atoms at layer '3'"):
        share_coefficients([a, small])
    assert all(torch.equal(value, before[name]) for name, value in a.state_dict().items())


def test_only_atoms_learn() -> None:
    net = plain()
    atomize(net)
    learns = train_atoms_only(net, also=["8"])
    names = [name for name, p in net.named_parameters() if p.requires_grad]
    assert names == ["0.atoms", "3.atoms", "5.atoms", "8.weight", "8.bias"]
    assert [id(p) for p in learns] == [id(net.get_parameter(name)) for name in names]
    before = copy.deepcopy(net.state_dict())
    optimizer = torch.optim.SGD(learns, 0.1, weight_decay=0.1)
    net(torch.randn(4, 3, 12, 12)).square().sum().backward()
    optimizer.step()
    changed = {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == set(names)


def test_unknown_modules_are_refused() -> None:
    net = plain()
    with pytest.raises(ValueError, match="must have convolutions with atoms"):
        train_atoms_only(net)
    atomize(net)
    for also, message in (
        (["head"], "module 'head' does not exist"),
        (["2"], "'2' must have parameters"),
        ("fc", "a list of"),
    ):
        with pytest.raises(ValueError, match=message):
            train_atoms_only(net, also=also)
    assert all(p.requires_grad for p in net.parameters())


def test_a_network_that_is_named_twice_costs_the_same_twice() -> None:
    net, reference = plain(1), plain(2)
    for each in (net, reference):
        atomize(each)
    first, second = share_coefficients([net, net], reference)
    assert first.by_layer == second.by_layer and first.worst > 0.3
