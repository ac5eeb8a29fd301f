"""The vector maps between two networks, and the conformance check that ours and a plugin's must pass."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_stitch_testing import Part, check_stitch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

from hf_stitch.registry import UnknownNameError
from hf_stitch.relative.projection import RelativeProjection
from hf_stitch.stitches import (
    IdentityStitch,
    LinearStitch,
    LowRankStitch,
    MaskedStitch,
    PiecewiseStitch,
    ResidualMLPStitch,
    Stitch,
    as_linear,
)
from hf_stitch.stitches.linear import LowRankResidualStitch
from hf_stitch.stitches.sequence import AttentionStitch


def drawn(stitch: Stitch) -> Stitch:
    """Give random values to weights that are 0 at first."""
    with torch.no_grad():
        for parameter in stitch.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    return stitch


STITCHES = [
    IdentityStitch(4, 4),
    IdentityStitch(4, 6),
    IdentityStitch(6, 4),
    LinearStitch(4, 6),
    LinearStitch(6, 4, bias=False),
    LinearStitch(4, 6, dtype=torch.float64),
    drawn(AttentionStitch(4, 6, heads=2, width=4)),
    drawn(AttentionStitch(6, 4, heads=1, width=8, causal=True, dtype="float64")),
    LowRankStitch(4, 6, rank=2),
    LowRankStitch(6, 4, rank=4, bias=False, dtype="float64"),
    LowRankResidualStitch(4, 6, rank=2),
    LowRankResidualStitch(6, 4, rank=4, dtype="float64"),
    MaskedStitch.of(weight=torch.randn(6, 4), mask=torch.rand(6, 4) > 0.5, bias=torch.randn(6)),
    MaskedStitch(6, 4, bias=False, dtype="float64"),
    PiecewiseStitch(4, 6, pieces=3),
    PiecewiseStitch(6, 4, pieces=1, dtype="float64"),
    ResidualMLPStitch(4, 6, hidden=5),
    ResidualMLPStitch(6, 4, hidden=3, dtype="float64"),
]


@pytest.mark.parametrize("check", [part for stitch in STITCHES for part in check_stitch.parts(stitch)], ids=str)
def test_conforms(check: Part) -> None:
    check()


@given(st.integers(1, 8), st.integers(1, 8), st.sampled_from([torch.float16, torch.float32, torch.int64, torch.bool]))
def test_identity_keeps_every_bit(inside: int, outside: int, dtype: torch.dtype) -> None:
    x = torch.randint(-9, 9, (5, inside)).to(dtype)
    out = IdentityStitch(inside, outside)(x)
    kept = min(inside, outside)
    assert out.dtype == dtype
    assert torch.equal(out[:, :kept], x[:, :kept])
    assert not out[:, kept:].any()
    assert not list(IdentityStitch(inside, outside).parameters())


def test_identity_keeps_nan_infinity_and_negative_zero() -> None:
    x = torch.tensor([[float("nan"), -0.0, float("inf"), 1e-45]])
    for width in (2, 4, 6):
        out = IdentityStitch(4, width)(x)[:, :4]
        assert torch.equal(out.view(torch.int32), x[:, : out.shape[1]].contiguous().view(torch.int32))


def test_linear_is_the_affine_map_of_its_weights() -> None:
    stitch = LinearStitch(3, 2, dtype=torch.float64)
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    expected = torch.einsum("bni,oi->bno", x, stitch.weight) + stitch.bias
    torch.testing.assert_close(stitch(x), expected)
    assert stitch.matrix() is stitch.weight


def test_low_rank_is_a_linear_stitch_of_that_rank() -> None:
    thin = LowRankStitch(7, 5, rank=2, dtype=torch.float64)
    full = LinearStitch(7, 5, dtype=torch.float64)
    full.load_state_dict({"weight": thin.matrix().detach(), "bias": thin.bias.detach()})
    x = torch.randn(11, 7, dtype=torch.float64)
    torch.testing.assert_close(thin(x), full(x))
    assert torch.linalg.matrix_rank(thin.matrix()) == 2


@pytest.mark.parametrize("stitch", [stitch for stitch in STITCHES if stitch.affine], ids=str)
def test_matrix_is_the_map_without_its_bias(stitch: IdentityStitch | LinearStitch | LowRankStitch) -> None:
    dtype = next((parameter.dtype for parameter in stitch.parameters()), torch.float32)
    origin = stitch(torch.zeros(1, stitch.in_features, dtype=dtype))
    images = stitch(torch.eye(stitch.in_features, dtype=dtype)) - origin
    torch.testing.assert_close(stitch.matrix(), images.T, rtol=1e-4, atol=1e-6)


def test_masked_weights_take_no_part_get_no_gradient_and_stay() -> None:
    weight = torch.tensor([[1.0, float("nan")], [2.0, 3.0]])
    stitch = MaskedStitch.of(weight=weight, mask=torch.tensor([[True, False], [True, True]]), bias=torch.zeros(2))
    x = torch.tensor([[10.0, 100.0]])
    assert stitch(x).tolist() == [[10.0, 320.0]]
    stitch(x).sum().backward()
    assert stitch.weight.grad.tolist() == [[10.0, 0.0], [10.0, 100.0]]
    torch.optim.SGD(stitch.parameters(), 0.1).step()
    assert stitch.weight[0, 1].isnan()
    assert stitch(x).isfinite().all()
    assert stitch.half().mask.dtype == torch.bool


@pytest.mark.parametrize("stitch", [stitch for stitch in STITCHES if stitch.affine], ids=str)
def test_every_affine_stitch_is_one_weight_and_one_bias(stitch: Stitch) -> None:
    linear = as_linear(stitch)
    x = torch.randn(5, stitch.in_features, dtype=linear.weight.dtype)
    torch.testing.assert_close(linear(x), stitch(x))
    assert all(a.data_ptr() != b.data_ptr() for a in linear.parameters() for b in stitch.parameters())


def test_what_is_no_affine_map_has_no_weight() -> None:
    with pytest.raises(ValueError, match="PiecewiseStitch is not an affine map"):
        as_linear(PiecewiseStitch(3, 3, pieces=2))


def test_fitted_travels_beside_the_config() -> None:
    stitch = LinearStitch(3, 2)
    stitch.fitted = {"n": 10, "r2": 0.5}
    assert "fitted" not in stitch.config()
    twin = Stitch.from_dict(stitch.to_dict())
    assert twin.fitted == stitch.fitted
    twin.fitted["n"] = 11
    assert stitch.fitted["n"] == 10


def test_a_cast_stitch_describes_its_new_dtype(tmp_path: Any) -> None:
    stitch = LowRankStitch(4, 3, rank=2).to(torch.bfloat16)
    assert stitch.config()["dtype"] == "bfloat16"
    save_file(stitch.state_dict(), tmp_path / "stitch.safetensors")
    twin = Stitch.from_dict(stitch.to_dict())
    twin.load_state_dict(load_file(tmp_path / "stitch.safetensors"), strict=True)
    x = torch.randn(5, 4, dtype=torch.bfloat16)
    assert torch.equal(twin(x), stitch(x))


def test_exports() -> None:
    stitch = LinearStitch(4, 3)
    x = torch.randn(2, 5, 4)
    assert torch.equal(torch.export.export(stitch, (x,)).module()(x), stitch(x))


@pytest.mark.parametrize("stitch", STITCHES, ids=str)
@pytest.mark.parametrize("shape", [(2, 5), (5, 2, 1), ()])
def test_a_wrong_width_is_refused(stitch: Stitch, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"maps {stitch.in_features} features to {stitch.out_features}, got an input"):
        stitch(torch.zeros(shape))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LinearStitch(0, 3), "widths >= 1, got 0 -> 3"),
        (lambda: LinearStitch(3, 2, dtype="float31"), "dtype must be a floating-point torch.dtype .* got 'float31'"),
        (lambda: LinearStitch(3, 2, dtype=torch.int64), "got torch.int64"),
        (lambda: LowRankStitch(3, 2, rank=3), "rank must be from 1 to 2 for widths 3 -> 2, got 3"),
        (lambda: LowRankStitch(3, 2, rank=0), "got 0"),
        (lambda: Stitch.from_dict({"in_features": 3}), "needs the key 'name', one of: .*identity"),
    ],
)
def test_a_wrong_config_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'linear'"):
        Stitch.from_dict({"name": "linaer", "in_features": 3, "out_features": 3})
    with pytest.raises(TypeError, match="rank"):
        Stitch.from_dict({"name": "linear", "in_features": 3, "out_features": 3, "rank": 2})


@pytest.mark.parametrize(
    "stitch", [*STITCHES, RelativeProjection.of(torch.randn(5, 4))], ids=lambda s: f"{type(s).__name__}-{s.in_features}"
)
def test_any_stitch_is_saved_by_itself(stitch: Stitch, tmp_path: Path) -> None:
    stitch = copy.deepcopy(stitch)
    stitch.fitted = {"r2": 0.5, "n": 7}
    path = tmp_path / "new" / "map.safetensors"
    stitch.save(path)
    again = Stitch.load(path)
    assert type(again) is type(stitch) and again.to_dict() == stitch.to_dict() and not again.training
    dtype = next((value.dtype for value in stitch.state_dict().values() if value.is_floating_point()), torch.float32)
    x = torch.randn(5, stitch.in_features, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(again(x), stitch.eval()(x))
    other = IdentityStitch if isinstance(stitch, LinearStitch) else LinearStitch
    if not isinstance(stitch, other):
        with pytest.raises(ValueError, match=f"contains a {type(stitch).__name__}, not a {other.__name__}"):
            other.load(path)


def test_files_that_contain_no_stitch_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "map.safetensors"
    save_file({"weight": torch.ones(2, 2)}, path)
    with pytest.raises(ValueError, match="contains no stitch; load a folder with Stitcher"):
        Stitch.load(path)
    record = LinearStitch(3, 2).to_dict()
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, path, {"stitch": json.dumps(record)})
    with pytest.raises(ValueError, match=r"'weight': \(\(2, 2\).*record describes .*\(2, 3\)"):
        Stitch.load(path)
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"cannot be read: SafetensorError"):
        Stitch.load(path)
    with pytest.raises(FileNotFoundError):
        Stitch.load(tmp_path / "none.safetensors")


def test_an_argument_under_another_name_is_told_before_it_is_lost() -> None:
    class Scaled(Stitch):
        def __init__(self, in_features: int, out_features: int, *, scale: float = 1.0) -> None:
            super().__init__(in_features, out_features)
            self._scale = scale

        def transform(self, x: torch.Tensor) -> torch.Tensor:
            return self._scale * x

    with pytest.raises(
        AttributeError, match="Scaled has no attribute 'scale', although its constructor takes it: keep"
    ):
        Scaled(2, 2, scale=3.0).config()
