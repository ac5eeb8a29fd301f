"""The vector maps between two networks, and the conformance check that ours and a plugin's must pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file, save_file

from hf_stitch.registry import UnknownNameError
from hf_stitch.stitches import (
    IdentityStitch,
    LinearStitch,
    LowRankStitch,
    MaskedStitch,
    PiecewiseStitch,
    Stitch,
    as_linear,
)


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


def test_a_file_of_another_stitch_is_refused(tmp_path: Path) -> None:
    IdentityStitch(3, 2).save(tmp_path / "map.safetensors")
    with pytest.raises(ValueError, match="contains a IdentityStitch, not a LinearStitch"):
        LinearStitch.load(tmp_path / "map.safetensors")


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
