"""The metrics fulfil their contract, and have the values that their definitions give."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from atom_networks import pair, plain, weight_cosines
from hf_stitch_filter_atoms import (
    FilterAtomAngle,
    FilterAtoms,
    FilterGram,
    Grassmann,
    PatchCosine,
    PatchCovariance,
    atomize,
    channel_decorrelation,
)
from hf_stitch_testing import check_weight_metric
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from hf_stitch import registries
from hf_stitch.metrics import NotComparable, WeightMetric

METRICS = {
    "filter_atoms": FilterAtoms,
    "filter_atom_angle": FilterAtomAngle,
    "filter_gram": FilterGram,
    "grassmann": Grassmann,
    "patch_cosine": PatchCosine,
}


@pytest.fixture
def covariance(tmp_path) -> str:
    a, _ = pair()
    path = tmp_path / "patches.safetensors"
    PatchCovariance.of(a, [torch.randn(4, 3, 12, 12)]).save(path)
    return str(path)


def values(metric: str | WeightMetric, a: nn.Module, b: nn.Module, **options: str) -> dict[str, float]:
    built = registries.metrics.build(metric, **options) if isinstance(metric, str) else metric
    read = built.read(a), built.read(b)
    return {layer: built.value(read[0][layer], read[1][layer]) for layer in read[0]}


def apply_gauge(net: nn.Module, m: Tensor, layer: int = 0) -> nn.Module:
    moved = copy.deepcopy(net)
    with torch.no_grad():
        conv = moved[layer]
        conv.atoms.copy_((m @ conv.atoms.double().flatten(1)).view_as(conv.atoms))
        conv.coefficients.copy_(conv.coefficients.double() @ torch.linalg.inv(m))
    return moved


@pytest.mark.parametrize("name", METRICS)
def test_registered_by_name(name: str) -> None:
    assert registries.metrics.get(name) is METRICS[name]
    assert registries.metrics.entry(name).origin == "plugin hf-stitch-filter-atoms 0.1.0"


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("atoms", [6, None])
def test_fulfils_the_contract_of_metrics_of_weights(name: str, atoms: int | None, covariance: str) -> None:
    if name == "grassmann" and atoms is None:
        pytest.skip("all kernels")
    a, b = pair(atoms)
    check_weight_metric(name, a, b, **({"covariance": covariance} if name == "patch_cosine" else {}))
    if name.startswith("filter_atom"):
        check_weight_metric(name, a, b, gauge="orthonormal")
    if name == "filter_gram":
        check_weight_metric(name, plain(1), plain(2))


def test_values_of_the_definitions() -> None:
    a, b = pair(atoms=6)
    u, v = (net[0].atoms.detach().double().flatten(1) for net in (a, b))
    s = ((u * v).sum() / (u.norm() * v.norm())).item()
    assert values("filter_atoms", a, b)["0"] == pytest.approx(s)
    assert values("filter_atom_angle", a, b)["0"] == pytest.approx(math.acos(s))
    bases = [torch.linalg.qr(x.T).Q for x in (u, v)]
    assert values("grassmann", a, b)["0"] == pytest.approx(torch.linalg.svdvals(bases[0].T @ bases[1]).mean().item())
    grams = [net[0].weight.detach().double().flatten(2).flatten(0, 1) for net in (a, b)]
    x, y = (f.T @ f for f in grams)
    assert values("filter_gram", a, b)["0"] == pytest.approx(((x * y).sum() / (x.norm() * y.norm())).item())
    assert list(values("filter_atoms", a, b)) == ["0", "3"]


def test_orthonormal_atoms_have_at_most_the_grassmann_similarity() -> None:
    a, b = pair(atoms=6)
    with torch.no_grad():
        b[0].atoms.copy_(torch.linalg.qr(torch.randn(9, 6)).Q.T.view(6, 3, 3))
    assert values("filter_atoms", a, b)["0"] <= values("grassmann", a, b)["0"] + 1e-6


def test_the_orthonormal_gauge_is_the_cosine_of_weights() -> None:
    for atoms in (None, 4):
        a, b = pair(atoms)
        weights = weight_cosines(a, b)
        found = values("filter_atoms", a, b, gauge="orthonormal")
        assert found == pytest.approx({layer: weights[layer] for layer in found}, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31))
def test_which_metrics_gauges_change(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    m = torch.randn(6, 6, dtype=torch.float64, generator=generator) + 3 * torch.eye(6)
    if torch.linalg.cond(m) > 30:
        return
    a, b = pair(atoms=6)
    moved = apply_gauge(a, m), apply_gauge(b, m)
    with torch.no_grad():
        moved[1][0].coefficients.copy_(moved[0][0].coefficients)
    for name, options in (("grassmann", {}), ("filter_gram", {}), ("filter_atoms", {"gauge": "orthonormal"})):
        assert values(name, *moved, **options)["0"] == pytest.approx(values(name, a, b, **options)["0"], abs=1e-4)
    assert values("filter_atoms", *moved)["0"] != pytest.approx(values("filter_atoms", a, b)["0"], abs=1e-6)


def test_the_angle_is_a_pseudometric() -> None:
    a, _ = pair()
    twice = copy.deepcopy(a)
    with torch.no_grad():
        twice[0].atoms.mul_(2)
    assert values("filter_atom_angle", a, twice)["0"] == pytest.approx(0, abs=1e-12)
    torch.manual_seed(1)
    metric = registries.metrics.build("filter_atom_angle")
    nets = [copy.deepcopy(a) for _ in range(6)]
    with torch.no_grad():
        for i, net in enumerate(nets):
            net[0].atoms.add_(0.1 * i * torch.randn(9, 3, 3))
    read = [metric.read(net)["0"] for net in nets]
    d = [[metric.value(x, y) for y in read] for x in read]
    assert all(d[i][j] <= d[i][k] + d[k][j] + 1e-12 for i in range(6) for j in range(6) for k in range(6))
    opposite = copy.deepcopy(a)
    with torch.no_grad():
        opposite[0].atoms.neg_()
    assert values("filter_atom_angle", a, opposite)["0"] == pytest.approx(math.pi)


def test_unequal_numbers_of_channels() -> None:
    a, b = plain(0, width=8), plain(1, width=12)
    found = values("filter_gram", a, b)
    assert list(found) == ["0", "3"] and all(0 < value < 1 for value in found.values())
    twice = plain(2, width=16)
    with torch.no_grad():
        twice[0].weight.copy_(a[0].weight.repeat(2, 1, 1, 1).flip(0))
    assert values("filter_gram", a, twice)["0"] == pytest.approx(1)
    for net in (a, b):
        atomize(net)
    with pytest.raises(NotComparable, match=r"channels 3 -> 8 v. 3 -> 12"):
        values("filter_atoms", a, b)


def folded(net: nn.Module) -> nn.Module:
    fused = copy.deepcopy(net)
    fused[0] = nn.utils.fuse_conv_bn_eval(nn.Conv2d(3, 8, 3, padding=1, bias=False).eval(), fused[1])
    return fused


def without_bias() -> nn.Module:
    net = plain()
    net[0] = nn.Conv2d(3, 8, 3, padding=1, bias=False).eval()
    return net


def test_what_is_not_comparable() -> None:
    a, b = pair()
    c = plain(3)
    atomize(c)
    for name in ("filter_atoms", "filter_atom_angle"):
        with pytest.raises(NotComparable, match=r"layer '0': the atom coefficients differ.*share_coefficients"):
            values(name, a, c)
    with pytest.raises(NotComparable, match=r"9 atoms span all kernels of 9 entries.*atomize\(model, atoms=6\)"):
        values("grassmann", a, b)
    one, other, strided = without_bias(), folded(without_bias()), plain()
    strided[0] = nn.Conv2d(3, 8, 3, padding=1, stride=2)
    for net in (one, other, strided):
        atomize(net)
    with pytest.raises(NotComparable, match="only one has a bias; if batch normalization was folded"):
        values("filter_atoms", one, other)
    with pytest.raises(NotComparable, match=r"stride 1×1 v. 2×2"):
        values("filter_atoms", a, strided)
    few, _ = pair(atoms=4)
    with pytest.raises(NotComparable, match=r"atoms 9 v. 4"):
        values("filter_atoms", a, few)
    big = plain()
    big[0] = nn.Conv2d(3, 8, 5, padding=2)
    with pytest.raises(NotComparable, match=r"kernel 3×3 v. 5×5"):
        values("filter_gram", plain(), big)
    with torch.no_grad():
        b[0].atoms.zero_()
    for name in ("filter_atoms", "filter_atom_angle", "filter_gram"):
        with pytest.raises(NotComparable, match="layer '0': the weights of one network are zero"):
            values(name, a, b)
    flat, _ = pair(atoms=4)
    with torch.no_grad():
        flat[0].atoms[1] = flat[0].atoms[0]
    with pytest.raises(NotComparable, match="linearly dependent"):
        values("grassmann", flat, flat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_atoms_that_differ_by_rounding_are_dependent(dtype: torch.dtype) -> None:
    one, _ = pair(atoms=4)
    with torch.no_grad():
        one[0].atoms[3] = one[0].atoms[0] + 2 * one[0].atoms[1] - one[0].atoms[2]
    with pytest.raises(NotComparable, match="linearly dependent"):
        values("grassmann", one.to(dtype), one)
    assert values("grassmann", *(each.to(dtype) for each in pair(atoms=4)))


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_refused_with_the_network_that_has_them(number: float, covariance: str) -> None:
    a, b = pair(atoms=6)
    with torch.no_grad():
        b[0].atoms[2, 1, 1] = number
    read = {
        "filter_atoms": "atoms", "filter_atom_angle": "atoms", "filter_gram": "gram",
        "grassmann": "basis of the atoms", "patch_cosine": "outputs",
    }  # fmt: skip
    for name, tensor in read.items():
        options = {"covariance": covariance} if name == "patch_cosine" else {}
        with pytest.raises(NotComparable, match=f"layer '0': the {tensor} of the second network contains NaN or inf"):
            values(name, a, b, **options)
        with pytest.raises(NotComparable, match=f"the {tensor} of the first network contains NaN or infinity"):
            values(name, b, a, **options)
    with pytest.raises(NotComparable, match="of the second network contains NaN or infinity"):
        values("filter_atoms", a, b, gauge="orthonormal")
    a, b = pair()
    with torch.no_grad():
        b[0].coefficients[0, 0, 0] = number
    with pytest.raises(NotComparable, match="the gram of the second network contains NaN or infinity"):
        values("filter_atoms", a, b)


def test_grassmann_reads_an_orthonormal_basis() -> None:
    """The decomposition takes place once for each network, not for each pair."""
    basis = Grassmann().read(pair(atoms=6)[0])["0"].tensors["basis of the atoms"]
    assert basis.shape == (9, 6)
    torch.testing.assert_close(basis.T @ basis, torch.eye(6, dtype=torch.float64))


def test_dtypes() -> None:
    a, b = pair()
    found = values("filter_atoms", a, b)
    wide, half = copy.deepcopy(b).double(), copy.deepcopy(b).half()
    assert values("filter_atoms", a, wide) == found
    with pytest.raises(NotComparable, match=r"the dtypes differ \(torch.float32 v. torch.float16\).*narrower dtype"):
        values("filter_atoms", a, half)
    assert values("filter_atoms", copy.deepcopy(a).half(), half) == pytest.approx(found, abs=1e-3)


def test_networks_without_atoms_are_refused() -> None:
    for name in ("filter_atoms", "filter_atom_angle", "grassmann"):
        with pytest.raises(ValueError, match=r"call hf_stitch_filter_atoms.atomize first"):
            registries.metrics.build(name).read(plain())
    numbers = nn.Sequential(nn.Conv2d(2, 2, 1))
    with pytest.raises(ValueError, match="1×1"):
        registries.metrics.build("filter_gram").read(numbers)
    atomize(numbers)
    with pytest.raises(ValueError, match="1×1"):
        registries.metrics.build("filter_atoms").read(numbers)
    with pytest.raises(ValueError, match="must have a convolution"):
        registries.metrics.build("filter_gram").read(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="gauge must be one of 'trained', 'orthonormal'"):
        registries.metrics.build("filter_atoms", gauge="orthogonal")


def test_the_penalty_of_channels() -> None:
    z = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    rows = z.permute(0, 2, 3, 1).reshape(-1, 3)
    gram = rows.T @ rows
    wanted = sum(gram[i, j] ** 2 for i in range(3) for j in range(3) if i != j)
    assert channel_decorrelation(z).item() == pytest.approx(wanted.item())
    assert channel_decorrelation(rows).item() == pytest.approx(wanted.item())
    assert torch.autograd.gradcheck(channel_decorrelation, (z,))
    for shape in ((3,), (2, 5, 3), (2, 3, 4, 4, 4)):
        with pytest.raises(ValueError, match=r"must be \(n, channels\) or \(n, channels, height, width\)"):
            channel_decorrelation(torch.zeros(shape))
