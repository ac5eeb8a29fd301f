"""Metrics of weights equal dense algebra, for networks of all kinds and forms, and say what they cannot compare."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_stitch_testing import check_weight_metric
from hf_stitch_versions import RelativeChange, UpdateRank, WeightCosine
from hf_stitch_versions.changes.weights import dense, effective
from torch import Tensor, nn

import hf_stitch
from hf_stitch.adapters import unwrap
from hf_stitch.metrics import NotComparable, WeightMetric
from hf_stitch.statistics import Weights
from hf_stitch.training import Dynamics, DynamicsRecorder

from tests.forms import RANK, TARGETS, form_of  # isort: skip
from tests.tiny_networks import build  # isort: skip

METRICS = {"weight_cosine": WeightCosine, "relative_change": RelativeChange, "update_rank": UpdateRank}
FAMILIES = ("bert", "gpt2", "t5", "swin", "cnn")
"""Transformers of text have no convolutions; GPT-2 keeps its matrices transposed."""


def moved(model: nn.Module, by: float = 0.1, seed: int = 5) -> nn.Module:
    """A copy whose weights have noise."""
    generator, twin = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    with torch.no_grad():
        for value in twin.parameters():
            value.add_(by * torch.randn(value.shape, generator=generator))
    return twin


def values(metric: WeightMetric, a: nn.Module, b: nn.Module) -> dict[str, float]:
    """The values of the layers of one name."""
    x, y = metric.read(a), metric.read(b)
    return {layer: metric.value(x[layer], y[layer]) for layer in x}


def own(module: nn.Module, axes: int) -> list[np.ndarray]:
    """The weights of a module itself, as NumPy arrays."""
    state = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    kept = [value for name, value in state.items() if name not in module._non_persistent_buffers_set]
    return [value.detach().double().numpy() for value in kept if value.is_floating_point() and value.dim() >= axes]


def expected(name: str, x: list[np.ndarray], y: list[np.ndarray]) -> float:
    one, other = (np.concatenate([value.ravel() for value in side]) for side in (x, y))
    if name == "weight_cosine":
        return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
    if name == "relative_change":
        return float(np.linalg.norm(other - one) / np.linalg.norm(one))
    found = []
    for before, after in zip(x, y, strict=True):
        change = (after - before).reshape(len(before), -1)
        share = np.linalg.svd(change, compute_uv=False)
        energy, share = float((share**2).sum()), share[share > 0] / share.sum()
        found.append((np.exp(-(share * np.log(share)).sum()) / min(change.shape), energy))
    ranks, energies = np.array(found).T
    return float((ranks * energies).sum() / energies.sum())


@pytest.mark.parametrize("family", ["gpt2", "cnn"])
@pytest.mark.parametrize("name", METRICS)
def test_the_contract_of_metrics_of_weights(name: str, family: str) -> None:
    a = build(family, 0)
    check_weight_metric(METRICS[name], a, moved(a))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", METRICS)
def test_the_values_are_those_of_dense_algebra(name: str, family: str) -> None:
    a = build(family, 0)
    b = moved(a)
    axes = 1 if name == "relative_change" else 2
    found = values(METRICS[name](), a, b)
    modules = {
        layer: module for layer, module in a.named_modules(remove_duplicate=False) if layer and own(module, axes)
    }
    roots = {layer: value for layer, value in a.named_parameters(recurse=False) if value.dim() >= axes}
    assert found.keys() == modules.keys() | roots.keys()
    for layer, module in modules.items():
        wanted = expected(name, own(module, axes), own(b.get_submodule(layer), axes))
        assert found[layer] == pytest.approx(wanted, rel=1e-5), layer
    for layer in roots:
        sides = ([net.get_parameter(layer).detach().double().numpy()] for net in (a, b))
        assert found[layer] == pytest.approx(expected(name, *sides), rel=1e-5), layer


def test_which_weights_are_read() -> None:
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.LSTM(4, 3), nn.Conv2d(1, 2, 3))
    net.append(nn.BatchNorm2d(2))
    assert list(WeightCosine().read(net)) == list(UpdateRank().read(net)) == ["0", "1", "3", "4"]
    read = RelativeChange().read(net)
    assert list(read) == ["0", "1", "2", "3", "4", "5"]
    assert list(read["5"].tensors) == ["weight", "bias", "running_mean", "running_var"]
    assert list(WeightCosine().read(net)["3"].tensors) == ["weight_ih_l0", "weight_hh_l0"]
    for metric in (WeightCosine(), UpdateRank()):
        with pytest.raises(ValueError, match="requires matrices, kernels and embeddings, but LayerNorm does not"):
            metric.read(nn.LayerNorm(3))


# -- what the values mean ----------------------------------------------------------------------------------------------
def test_a_change_is_relative_to_the_first_network() -> None:
    a = build("bert", 0)
    b = copy.deepcopy(a)
    with torch.no_grad():
        for value in b.parameters():
            value.mul_(1.5)
    for pair, change in (((a, b), 1 / 2), ((b, a), 1 / 3)):
        found = values(RelativeChange(), *pair)
        assert found == pytest.approx(dict.fromkeys(found, change))
    for metric in (WeightCosine(), UpdateRank()):
        assert metric.symmetric and values(metric, a, b) == values(metric, b, a)
    assert values(WeightCosine(), a, b) == pytest.approx(dict.fromkeys(WeightCosine().read(a), 1))


def test_the_rank_of_an_update() -> None:
    torch.manual_seed(0)
    a = nn.Sequential(nn.Linear(12, 20), nn.Conv2d(3, 8, 3))
    b = copy.deepcopy(a).double()
    with torch.no_grad():
        b[0].weight.add_(
            torch.linalg.qr(torch.randn(20, 3).double()).Q @ torch.linalg.qr(torch.randn(12, 3).double()).Q.T
        )
    assert values(UpdateRank(), a, b) == {"0": pytest.approx(3 / 12, rel=1e-4), "1": 0.0}


def test_weights_that_are_zero_have_no_cosine_and_no_relative_change() -> None:
    a, b = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3))
    with torch.no_grad():
        for value in a.parameters():
            value.zero_()
    assert values(RelativeChange(), a, a) == {"0": 0.0} and values(RelativeChange(), b, a) == {"0": 1.0}
    with pytest.raises(NotComparable, match="layer '0': the relative change is not defined"):
        values(RelativeChange(), a, b)
    for pair in ((a, b), (b, a)):
        with pytest.raises(NotComparable, match="layer '0': the cosine is not defined"):
            values(WeightCosine(), *pair)


# -- what cannot be compared -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", METRICS)
def test_other_shapes_are_not_comparable(name: str) -> None:
    a, b = nn.Sequential(nn.Linear(3, 4)), nn.Sequential(nn.Linear(3, 5))
    with pytest.raises(NotComparable, match=r"layer '0': it has weight \(4, 3\).*but '0' has weight \(5, 3\)"):
        values(METRICS[name](), a, b)
    metric = METRICS[name]()
    read = metric.read(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, 3)))
    if name == "update_rank":
        with pytest.raises(NotComparable, match="layer '0': '2' is a different layer; update_rank compares layers of"):
            metric.value(read["0"], read["2"])
    else:
        assert math.isfinite(metric.value(read["0"], read["2"]))
    if name == "relative_change":
        with pytest.raises(NotComparable, match=r"weight \(3, 3\), bias \(3,\), but '1' has weight \(3, 3\);"):
            metric.value(read["0"], read["1"])


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_told(name: str, number: float) -> None:
    a = build("llama", 0)
    b = moved(a)
    with torch.no_grad():
        b.get_submodule("model.layers.1.mlp.up_proj").weight[0, 0] = number
    atlas = hf_stitch.compare(a, b, metrics=[METRICS[name]()])
    layer = "model.layers.1.mlp.up_proj"
    place = atlas.layers_a.index(layer)
    assert np.isnan(atlas[name][place, place]) and name not in atlas.whole
    assert "its weights contain NaN or infinity" in atlas.undefined[f"{name}: {layer} -> {layer}"]
    assert np.isfinite(atlas[name].diagonal()).sum() == len(atlas.layers_a) - 1


def test_offloaded_weights_are_refused() -> None:
    for metric in METRICS.values():
        with pytest.raises(ValueError, match="requires weights in memory, but accelerate offloads the weights of Bert"):
            metric().read(form_of("bert", "offloaded"))


# -- forms -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_an_adapter_counts_as_merged(family: str, name: str) -> None:
    plain, live = build(family, 0), form_of(family, "peft")
    metric, network = METRICS[name](), unwrap(live)
    with live.disable_adapter():
        before = metric.read(network)
    adapted, merged = metric.read(network), metric.read(plain)
    assert adapted.keys() == merged.keys() == before.keys()
    changed = {layer for layer in merged if layer.endswith(TARGETS[family])}
    for layer, each in adapted.items():
        found = metric.value(before[layer], each)
        assert found == pytest.approx(metric.value(before[layer], merged[layer]), rel=1e-3), layer
        if name == "update_rank":
            most = RANK / min(each.tensors["weight"].shape)
            assert 0 < found < 1.01 * most if layer in changed else found == 0
        if name == "relative_change":
            assert (found > 0.1) == (layer in changed)


@pytest.mark.parametrize("form", ["int8", "weight norm", "pruned"])
def test_other_forms_are_read_as_what_they_compute(form: str) -> None:
    metric, plain, other = RelativeChange(), build("bert", 0), form_of("bert", form)
    found = values(metric, plain, other)
    assert max(found.values()) < (0.01 if form == "int8" else 1e-6)
    assert values(WeightCosine(), plain, other) == pytest.approx(dict.fromkeys(WeightCosine().read(plain), 1), abs=1e-4)


class LowRank(nn.Linear):
    """A linear layer whose weight is the product of two factors."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__(inputs, outputs)
        del self._parameters["weight"]
        self.left, self.right = (nn.Parameter(torch.randn(shape)) for shape in ((outputs, rank), (rank, inputs)))

    @property
    def weight(self) -> Tensor:
        return self.left @ self.right


def test_weights_that_a_class_makes_of_others_are_read() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(LowRank(6, 5, 2), nn.Tanh(), LowRank(5, 3, 1))
    found = effective(net)
    assert list(found) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert torch.equal(found["0.weight"], net[0].left @ net[0].right)
    plain = dense(net)
    assert [type(layer) for layer in plain] == [nn.Linear, nn.Tanh, nn.Linear] and type(net[0]) is LowRank
    assert set(dict(plain.named_parameters())) == set(found)
    x = torch.randn(4, 6)
    assert torch.equal(plain(x), net(x))
    assert values(RelativeChange(), net, plain) == {"0": 0.0, "2": 0.0}


def test_filter_atoms_are_read_as_the_kernels_that_they_make() -> None:
    atoms = pytest.importorskip("hf_stitch_filter_atoms")
    net = build("cnn", 0)
    divided = copy.deepcopy(net)
    atoms.atomize(divided)
    assert effective(divided).keys() == effective(net).keys()
    assert max(values(RelativeChange(), net, divided).values()) < 1e-6
    x = torch.randn(2, 3, 32, 32)
    assert torch.allclose(dense(divided)(x), divided(x), atol=1e-6)


# -- in the verbs ------------------------------------------------------------------------------------------------------
def test_two_transformers_are_compared_by_weights() -> None:
    a = build("gpt2", 0)
    b, block = moved(a, 0.01), "transformer.h.1"
    atlas = hf_stitch.compare(a, b, metrics=[metric() for metric in METRICS.values()])
    assert not any("conv" in layer.lower() for layer in atlas.layers_a) and set(atlas.whole) == set(METRICS)
    for name, metric in METRICS.items():
        read = values(metric(), a, b)
        for layer, value in read.items():
            place = atlas.layers_a.index(layer)
            assert atlas[name][place, place] == value
        assert atlas.whole[name] == pytest.approx(np.mean([*read.values()]))
    off = atlas["update_rank"][~np.eye(len(atlas.layers_a), dtype=bool)]
    assert np.isnan(off).all()
    part = hf_stitch.compare(a, b, metrics=[WeightCosine()], layers_a=[block], layers_b=[block])
    assert part.layers_a and all(layer.startswith(f"{block}.") for layer in part.layers_a)


def test_many_transformers_are_compared_by_weights() -> None:
    nets = {"base": build("llama", 0)}
    nets |= {"near": moved(nets["base"], 0.01), "far": moved(nets["base"], 0.1)}
    cosine = hf_stitch.compare_all(nets, metrics=[WeightCosine()]).similarities()
    assert np.allclose(cosine, cosine.T) and cosine[0, 1] > cosine[0, 2]
    change = hf_stitch.compare_all(nets, metrics=[RelativeChange()]).similarities()
    assert change[0, 1] < change[0, 2] and change[0, 2] != change[2, 0] and not change.diagonal().any()
    rank = hf_stitch.compare_all(nets, metrics=[UpdateRank()]).similarities()
    assert not rank.diagonal().any() and np.allclose(rank, rank.T) and (rank[0, 1:] > 0.5).all()


def test_recordings_of_a_training_can_be_compared(tmp_path: Path) -> None:
    net, start = build("gpt2", 0), build("gpt2", 0)
    recorder = DynamicsRecorder(tmp_path, metric=WeightCosine())
    recorder.measure(net, step=0)
    net.load_state_dict(moved(net).state_dict())
    recorder.measure(net, step=1)
    found = Dynamics.of(tmp_path, WeightCosine())
    for layer, value in values(WeightCosine(), start, net).items():
        assert found.values[layer][0, 1] == value


def test_what_the_plugin_of_filter_atoms_recorded_is_comparable() -> None:
    conv = nn.Conv2d(2, 3, 3)
    before = Weights("0", {"weight": conv.weight.detach().double()}, json.dumps({"class": "Conv2d", "kernel": "3×3"}))
    now = WeightCosine().read(nn.Sequential(conv))["0"]
    assert WeightCosine().value(before, now) == WeightCosine().value(now, before) == pytest.approx(1)
