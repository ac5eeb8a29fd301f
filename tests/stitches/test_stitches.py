"""The vector maps between two networks, and the conformance check that ours and a plugin's must pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file

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
    torch.testing.assert_close(stitch(x), torch.einsum("bni,oi->bno", x, stitch.weight) + stitch.bias)
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


def test_fitted_travels_beside_the_config() -> None:
    stitch = LinearStitch(3, 2)
    stitch.fitted = {"n": 10, "r2": 0.5}
    assert "fitted" not in stitch.config()
    twin = Stitch.from_dict(stitch.to_dict())
    assert twin.fitted == stitch.fitted
    twin.fitted["n"] = 11
    assert stitch.fitted["n"] == 10


def test_a_cast_stitch_describes_its_new_dtype() -> None:
    stitch = LowRankStitch(4, 3, rank=2).to(torch.bfloat16)
    assert stitch.config()["dtype"] == Stitch.from_dict(stitch.to_dict()).config()["dtype"] == "bfloat16"


class Scaled(Stitch):
    """Keeps an argument under another name."""

    def __init__(self, in_features: int, out_features: int, *, scale: float = 1.0) -> None:
        super().__init__(in_features, out_features)
        self._scale = scale

    def transform(self, x: torch.Tensor) -> torch.Tensor:
        return self._scale * x


SIZES = {"in_features": 3, "out_features": 3}
REFUSALS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: LinearStitch(0, 3), ValueError, "widths must be at least 1, got 0 -> 3"),
    (lambda: LinearStitch(3, 2, dtype="float31"), ValueError, "dtype must be .* torch.dtype .* got 'float31'"),
    (lambda: LinearStitch(3, 2, dtype=torch.int64), ValueError, "got torch.int64"),
    (lambda: LowRankStitch(3, 2, rank=3), ValueError, "rank must be from 1 to 2 for widths 3 -> 2, got 3"),
    (lambda: LowRankStitch(3, 2, rank=0), ValueError, "got 0"),
    (lambda: Stitch.from_dict({"in_features": 3}), ValueError, "requires the key 'name', one of: .*identity"),
    (lambda: Stitch.from_dict({"name": "linaer", **SIZES}), LookupError, "did you mean 'linear'"),
    (lambda: Stitch.from_dict({"name": "linear", **SIZES, "rank": 2}), TypeError, "rank"),
    (lambda: as_linear(PiecewiseStitch(3, 3, pieces=2)), ValueError, "PiecewiseStitch is not an affine map"),
    (
        lambda: Scaled(2, 2, scale=3.0).config(),
        AttributeError,
        "not have the attribute 'scale', an argument of its constructor",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSALS)
def test_what_is_no_stitch_is_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("record", "kept", "kind", "message"),
    [
        (IdentityStitch(3, 2).to_dict(), None, LinearStitch, "contains a IdentityStitch, not a LinearStitch"),
        (None, None, Stitch, "is not a stitch file; load a folder with Stitcher"),
        (LinearStitch(3, 2).to_dict(), None, Stitch, r"'weight': \(\(2, 2\).*metadata describes .*\(2, 3\)"),
        (LinearStitch(3, 2).to_dict(), 40, Stitch, "cannot be read: SafetensorError"),
    ],
)
def test_files_that_contain_no_such_stitch_are_refused(
    record: dict[str, Any] | None, kept: int | None, kind: type[Stitch], message: str, tmp_path: Path
) -> None:
    path, weights = tmp_path / "map.safetensors", {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    save_file(weights, path, {"stitch": json.dumps(record)} if record else None)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=message):
        kind.load(path)
