"""Gauges change the similarity of atoms, but no function; its bounds hold and are attained."""

from __future__ import annotations

import copy

import pytest
import torch
from atom_networks import pair, plain, relative
from hf_stitch_filter_atoms import atomize, gauge as gauges, gauge_bounds, set_gauge
from hf_stitch_filter_atoms.gauge import cosine, extremes
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from hf_stitch import registries
from hf_stitch.metrics import NotComparable

SEEDS = st.integers(0, 2**31)


def value(a: nn.Module, b: nn.Module, layer: str = "0", **options: str) -> float:
    metric = registries.metrics.build("filter_atoms", **options)
    return metric.value(metric.read(a)[layer], metric.read(b)[layer])


def random_gauge(size: int, condition: float, generator: torch.Generator) -> Tensor:
    """An M with singular values between 1 and the condition; half of them at the ends."""
    left, right = (torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator)).Q for _ in "lr")
    values = 1 + (condition - 1) * torch.rand(size, dtype=torch.float64, generator=generator)
    if torch.rand((), generator=generator) < 0.5:
        values = torch.where(values > (1 + condition) / 2, condition, 1.0).double()
    return (left * values) @ right


def random_atoms(seed: int, size: int, entries: int, relation: float) -> tuple[Tensor, Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    u, v = torch.randn(2, size, entries, dtype=torch.float64, generator=generator)
    return u, relation * u + (1 - abs(relation)) * v, generator


@pytest.mark.parametrize("atoms", [None, 4])
def test_functions_stay(atoms: int | None) -> None:
    a, b = pair(atoms)
    x = torch.randn(4, 3, 12, 12)
    wanted = a(x), b(x)
    for gauge in ("orthonormal_coefficients", a, b):
        set_gauge([a, b], gauge)
        assert relative(a(x), wanted[0]) < 1e-5 and relative(b(x), wanted[1]) < 1e-5
        for i in (0, 3, 5):
            assert torch.equal(a[i].coefficients, b[i].coefficients)
        kept = a[0].coefficients.flatten(0, 1) if isinstance(gauge, str) else gauge[0].atoms.flatten(1).T
        torch.testing.assert_close(kept.T @ kept, torch.eye(kept.shape[1]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("gauge", ["orthonormal_coefficients", "reference"])
def test_modules_that_networks_share_move_once(gauge: str) -> None:
    a, b = pair(atoms=4)
    x = torch.randn(4, 3, 12, 12)
    chosen = copy.deepcopy(b) if gauge == "reference" else gauge
    wanted = a(x), b(x)
    set_gauge([a, a], chosen)
    assert relative(a(x), wanted[0]) < 1e-5
    a, b = pair(atoms=4)
    b[0] = a[0]
    b[3].coefficients = a[3].coefficients  # one parameter
    wanted = a(x), b(x)
    set_gauge([a, b], copy.deepcopy(b) if gauge == "reference" else gauge)
    assert relative(a(x), wanted[0]) < 1e-5 and relative(b(x), wanted[1]) < 1e-5


def test_layers_that_share_parameters_have_no_gauges_of_their_own() -> None:
    net = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    atomize(net)
    net[1].coefficients = net[0].coefficients
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match="layers '0' and '1' must not share a parameter"):
        set_gauge([net], net)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_layer_of_few_filters_has_fewer_atoms_than_the_others() -> None:
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3))
    x = torch.randn(2, 1, 8, 8)
    copied = copy.deepcopy(net)
    atomize(copied)
    with pytest.raises(ValueError, match=r"layer '0': only 8 of 9.*atomize\(model, atoms=8, layers=\['0'\]\)"):
        set_gauge([copied], "orthonormal_coefficients")
    assert atomize(net, atoms=8, layers=["0"]).worst < 1e-6  # 8 filters span 8 dimensions
    atomize(net, layers=["1"])
    wanted = net(x)
    set_gauge([net], "orthonormal_coefficients")
    assert relative(net(x), wanted) < 1e-5


def test_the_orthonormal_gauge_is_the_cosine_of_weights() -> None:
    a, b = pair(atoms=6)
    before = value(a, b), value(a, b, gauge="orthonormal")
    weights = torch.cosine_similarity(a[0].weight.flatten().double(), b[0].weight.flatten().double(), 0).item()
    assert before[1] == pytest.approx(weights, abs=1e-7) and before[0] != pytest.approx(weights, abs=1e-3)
    set_gauge([a, b], "orthonormal_coefficients")
    assert value(a, b) == pytest.approx(weights, abs=1e-6)
    assert value(a, b, gauge="orthonormal") == pytest.approx(weights, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.integers(1, 9), st.floats(1, 30), st.floats(-1, 1))
def test_no_gauge_is_outside_of_the_bounds(seed: int, size: int, condition: float, relation: float) -> None:
    u, v, generator = random_atoms(seed, size, 9, relation)
    least, greatest = (cosine(u, v, p) for p in extremes(u, v, condition))
    assert -1 - 1e-12 <= least <= greatest + 1e-12 <= 1 + 2e-12
    for _ in range(100):
        m = random_gauge(size, condition, generator)
        found = torch.cosine_similarity((m @ u).flatten(), (m @ v).flatten(), 0).item()
        assert least - 1e-8 <= found <= greatest + 1e-8


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.integers(1, 9), st.floats(1, 30), st.floats(-1, 1))
def test_the_bounds_are_attained_and_nothing_near_is_better(
    seed: int, size: int, condition: float, relation: float
) -> None:
    u, v, generator = random_atoms(seed, size, 9, relation)
    for sign, p in zip((-1, 1), extremes(u, v, condition), strict=True):
        values, vectors = torch.linalg.eigh(p)
        assert values[-1] <= values[0] * condition**2 * (1 + 1e-9)
        m = vectors * values.sqrt() @ vectors.T
        attained = torch.cosine_similarity((m @ u).flatten(), (m @ v).flatten(), 0).item()
        assert attained == pytest.approx(cosine(u, v, p), abs=1e-10)
        for step in (1e-3, 1e-2, 0.1, 0.5):
            for _ in range(15):
                turn = torch.linalg.matrix_exp(
                    step * (lambda r: r - r.T)(torch.randn(size, size, dtype=torch.float64, generator=generator))
                )
                ends = values * (1 + step * torch.randn(size, dtype=torch.float64, generator=generator))
                ends = ends.clamp(values[0].item(), values[0].item() * condition**2)
                near = turn @ (vectors * ends) @ vectors.T @ turn.T
                assert sign * cosine(u, v, near) <= sign * attained + 1e-9


@pytest.mark.parametrize("relation", [-0.9, -0.3, 0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("condition", [1.5, 10.0])
def test_the_bounds_of_two_atoms_are_those_of_all_gauges(relation: float, condition: float) -> None:
    """Up to scale, a gauge of two atoms is an angle and a ratio of eigenvalues, which a grid covers."""
    angles = torch.linspace(0, torch.pi, 721, dtype=torch.float64)[:, None]
    ratios = torch.logspace(0, 2, 201, condition, dtype=torch.float64)[None]
    x, y, xy = angles.cos() ** 2, angles.sin() ** 2, angles.cos() * angles.sin()
    p = torch.stack([ratios * x + y, (ratios - 1) * xy, (ratios - 1) * xy, ratios * y + x], -1).view(721, 201, 2, 2)
    for seed in range(5):
        u, v, _ = random_atoms(seed, 2, 4, relation)
        products = [(p * (left @ right.T)).sum((-2, -1)) for left, right in ((u, v), (u, u), (v, v))]
        everywhere = products[0] / (products[1] * products[2]).sqrt()
        least, greatest = (cosine(u, v, each) for each in extremes(u, v, condition))
        assert least - 1e-12 <= everywhere.min() <= least + 2e-4
        assert greatest - 2e-4 <= everywhere.max() <= greatest + 1e-12


@pytest.mark.parametrize(("seed", "size", "relation"), [(15, 9, -0.3), (104, 9, 0.6), (105, 6, -0.9)])
def test_more_scales_do_not_improve_bounds_of_a_large_condition(
    seed: int, size: int, relation: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first draw has a hill that needs more than ten steps towards its top."""
    u, v, _ = random_atoms(seed, size, 9, relation)
    least, greatest = (cosine(u, v, p) for p in extremes(u, v, 1000.0))
    monkeypatch.setattr(gauges, "GRID", 99)
    finer = [cosine(u, v, p) for p in extremes(u, v, 1000.0)]
    assert [least, greatest] == pytest.approx(finer, abs=1e-9)


def test_the_least_positive_cosine_has_a_proof() -> None:
    """The least over P at one s is a lower bound of the least over P of the greatest over s."""
    for seed in range(5):
        u, v, _ = random_atoms(seed, 9, 9, 0.95)
        for condition in (3.0, 10.0, 30.0):
            p = extremes(u, v, condition)[0]
            a, b, c = u @ u.T, v @ v.T, (u @ v.T + v @ u.T) / 2
            s = gauges._best_scale(p[None], a, b)
            proof = gauges._optima_of_scales(s, a, b, c, condition**2, least=True)[0].item()
            assert proof > 0 and cosine(u, v, p) == pytest.approx(proof, abs=1e-8)


def test_bounds_of_networks() -> None:
    a, b = pair()
    bounds = gauge_bounds(a, b)
    assert list(bounds) == ["0", "3"]
    for layer, (least, greatest) in bounds.items():
        assert least < value(a, b, layer) < greatest
        one = gauge_bounds(a, b, condition=1)[layer]
        assert one == pytest.approx((value(a, b, layer),) * 2, abs=1e-12)
        wide = gauge_bounds(a, b, condition=100)[layer]
        assert wide[0] < least and greatest < wide[1]
    moved = copy.deepcopy(a), copy.deepcopy(b)
    p = extremes(*(net[0].atoms.detach().double().flatten(1) for net in (a, b)), 10.0)[0]
    m = torch.linalg.cholesky(p).T
    with torch.no_grad():
        for net in moved:
            net[0].atoms.copy_((m @ net[0].atoms.double().flatten(1)).view(9, 3, 3))
            net[0].coefficients.copy_(net[0].coefficients.double() @ torch.linalg.inv(m))
    assert value(*moved) == pytest.approx(bounds["0"][0], abs=1e-5)
    x = torch.randn(2, 3, 12, 12)
    assert relative(moved[1](x), b(x)) < 1e-4


def test_equal_and_opposite_atoms_have_one_value() -> None:
    a, b = pair(move=0)
    assert gauge_bounds(a, b)["0"] == pytest.approx((1, 1))
    with torch.no_grad():
        b[0].atoms.mul_(-3)
    assert gauge_bounds(a, b)["0"] == pytest.approx((-1, -1))


def test_what_has_no_gauge_is_refused() -> None:
    a, b = pair()
    c = plain(5)
    atomize(c)
    before = copy.deepcopy(a.state_dict())
    for call in (lambda: gauge_bounds(a, c), lambda: set_gauge([a, c], "orthonormal_coefficients"),
                 lambda: set_gauge([a], c)):  # fmt: skip
        with pytest.raises(NotComparable, match="layer '0': a common gauge requires equal coefficients"):
            call()
    for condition in (0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="condition must be a number of at least 1"):
            gauge_bounds(a, b, condition)
    with pytest.raises(ValueError, match="gauge must be"):
        set_gauge([a], "orthogonal")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="models must not be empty"):
        set_gauge([], "orthonormal_coefficients")
    with pytest.raises(ValueError, match="atomize first"):
        set_gauge([plain()], "orthonormal_coefficients")
    with torch.no_grad():
        b[3].atoms[1] = b[3].atoms[0]
    with pytest.raises(ValueError, match="layer '3': only 14 of 15 atoms of the reference"):
        set_gauge([a], b)
    with torch.no_grad():
        b[3].atoms.zero_()
    with pytest.raises(NotComparable, match="layer '3': all atoms of one network are zero"):
        gauge_bounds(a, b)
    few = nn.Sequential(nn.Conv2d(1, 2, 3))
    atomize(few)
    with pytest.raises(ValueError, match=r"layer '0': only 2 of 9 columns.*atomize\(model, atoms=2, layers=\['0'\]\)"):
        set_gauge([few], "orthonormal_coefficients")
    numbers = nn.Sequential(nn.Conv2d(2, 2, 1))
    atomize(numbers)
    with pytest.raises(ValueError, match="are 1×1"):
        gauge_bounds(numbers, numbers)
    assert all(torch.equal(value, before[name]) for name, value in a.state_dict().items())
