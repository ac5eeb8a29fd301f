"""Moments: streamed, merged and reduced, against dense float64 NumPy."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file

from hf_stitch.statistics import Moments, moments as moments_module

PARTS = ("mean_x", "mean_y", "sxx", "syy", "sxy")


def rows(n: int, dx: int, dy: int, mean: float = 0.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Related rows in float64, their means ``mean`` standard deviations away."""
    draw = np.random.default_rng(seed).standard_normal((n, dx + dy))
    x = draw[:, :dx] + mean
    y = x[:, :1] - 0.5 * draw[:, dx:]
    return torch.from_numpy(x), torch.from_numpy(y)


def dense(x: torch.Tensor, y: torch.Tensor) -> dict[str, np.ndarray]:
    """The definition, in NumPy."""
    a, b = x.double().numpy(), y.double().numpy()
    mean_x, mean_y = a.mean(0), b.mean(0)
    a, b = a - mean_x, b - mean_y
    return {"mean_x": mean_x, "mean_y": mean_y, "sxx": a.T @ a, "syy": b.T @ b, "sxy": a.T @ b}


def assert_close(moments: Moments, expected: dict[str, np.ndarray], relative: float) -> None:
    for part in PARTS:
        got = getattr(moments, part).cpu().numpy()
        assert np.abs(got - expected[part]).max() <= relative * np.abs(expected[part]).max(), part


@pytest.mark.parametrize("mean", [0.0, 30.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_streamed_equals_dense_however_far_the_mean(mean: float, dtype: torch.dtype) -> None:
    x, y = (side.to(dtype) for side in rows(500, 7, 4, mean))
    moments = Moments(7, 4)
    for start in range(0, 500, 33):
        moments.update(x[start : start + 33], y[start : start + 33])
    assert moments.n == 500
    assert_close(moments, dense(x, y), 1e-10)
    assert all(getattr(moments, part).dtype == torch.float64 for part in PARTS)


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 120), max_size=8), seed=st.integers(0, 2**16), merging=st.permutations(range(9)))
def test_batching_merging_and_shuffling_change_nothing(cuts: list[int], seed: int, merging: list[int]) -> None:
    x, y = rows(120, 3, 5, mean=30.0)
    expected = dense(x, y)
    order = torch.randperm(120, generator=torch.Generator().manual_seed(seed))
    batches = [order[start:stop] for start, stop in pairwise([0, *sorted(cuts), 120])]
    streamed = Moments(3, 5)
    for batch in batches:
        streamed.update(x[batch], y[batch])
    merged = Moments(3, 5)
    for index in merging:
        if index < len(batches):
            merged.merge(Moments(3, 5).update(x[batches[index]], y[batches[index]]))
    for moments in (streamed, merged):
        assert moments.n == 120
        assert_close(moments, expected, 1e-10)


def test_large_batches_go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = rows(100, 4, 3, mean=10.0)
    monkeypatch.setattr(moments_module, "_BLOCK_ROWS", 32)
    widest = []
    gram = moments_module._gram
    monkeypatch.setattr(moments_module, "_gram", lambda chunk: widest.append(len(chunk)) or gram(chunk))
    assert_close(Moments(4, 3).update(x, y), dense(x, y), 1e-12)
    assert widest == [32, 32, 32, 4]


def test_input_is_neither_changed_nor_tracked() -> None:
    x, y = rows(50, 3, 2)
    x.requires_grad_()
    before = x.detach().clone()
    moments = Moments(3, 2).update(x, y)
    assert torch.equal(x, before)
    assert not moments.sxx.requires_grad


def test_empty_batches_and_empty_merges_count_for_nothing() -> None:
    x, y = rows(20, 3, 2)
    moments = Moments(3, 2).update(x[:0], y[:0])
    assert (moments.n, moments.sxx.abs().sum().item()) == (0, 0.0)
    moments.update(x, y)
    state = moments.state_dict()
    moments.update(x[:0], y[:0]).merge(Moments(3, 2))
    assert all(torch.equal(state[key], value) for key, value in moments.state_dict().items())


def test_merge_leaves_the_other_as_it_was() -> None:
    x, y = rows(20, 3, 2)
    other = Moments(3, 2).update(x[:8], y[:8])
    state = other.state_dict()
    Moments(3, 2).merge(other).update(x[8:], y[8:])
    assert all(torch.equal(state[key], value) for key, value in other.state_dict().items())


def test_about_origin_is_the_raw_second_moments() -> None:
    x, y = rows(40, 3, 2, mean=4.0)
    moments = Moments(3, 2).update(x, y)
    raw = moments.about_origin()
    assert raw.n == 40
    assert raw.mean_x.abs().sum() == raw.mean_y.abs().sum() == 0
    for got, expected in ((raw.sxx, x.T @ x), (raw.syy, y.T @ y), (raw.sxy, x.T @ y)):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    assert_close(moments, dense(x, y), 1e-12)


@pytest.mark.parametrize("side", ["x_rows", "y_rows"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e200])
def test_a_bad_row_is_named_and_nothing_is_taken(monkeypatch: pytest.MonkeyPatch, side: str, value: float) -> None:
    monkeypatch.setattr(moments_module, "_BLOCK_ROWS", 8)
    batch = dict(zip(("x_rows", "y_rows"), rows(30, 3, 2), strict=True))
    batch[side][21, 1] = value
    moments = Moments(3, 2)
    with pytest.raises(ValueError, match=rf"{side}: row 21 of 30 contains NaN, infinity or"):
        moments.update(**batch)
    assert moments.n == 0
    assert moments.sxx.abs().sum() == 0


def test_state_survives_safetensors_and_goes_on(tmp_path: Path) -> None:
    x, y = rows(40, 3, 2, mean=9.0)
    moments = Moments(3, 2).update(x[:25], y[:25])
    save_file(moments.state_dict(), tmp_path / "moments.safetensors")
    loaded = Moments.from_state_dict(load_file(tmp_path / "moments.safetensors"))
    moments.update(x[25:], y[25:])
    loaded.update(x[25:], y[25:])
    assert loaded.n == 40
    assert all(torch.equal(getattr(loaded, part), getattr(moments, part)) for part in PARTS)


def test_one_process_reduces_to_itself() -> None:
    moments = Moments(3, 2).update(*rows(20, 3, 2))
    state = moments.state_dict()
    assert moments.all_reduce(SimpleNamespace(num_processes=1)) is moments
    assert all(torch.equal(state[key], value) for key, value in moments.state_dict().items())


STATE = Moments(3, 2).state_dict()
ROWS, OTHER = torch.zeros(4, 3), torch.zeros(4, 2)
REFUSALS: list[tuple[Callable[[], Any], str]] = [
    (lambda: Moments(3, 2).update(OTHER, OTHER), r"x_rows must have shape \(n, 3\), got \(4, 2\)"),
    (lambda: Moments(3, 2).update(ROWS, torch.zeros(2, 2, 2)), r"y_rows must have shape \(n, 2\), got \(2, 2, 2\)"),
    (lambda: Moments(3, 2).update(ROWS, torch.zeros(5, 2)), "got 4 and 5 rows"),
    (lambda: Moments(3, 2).update(ROWS.long(), OTHER), "x_rows .* got torch.int64"),
    (lambda: Moments(3, 2).update(ROWS, OTHER + 0j), "y_rows .* got torch.complex64"),
    (lambda: Moments(3, 2).update([[0.0] * 3] * 4, OTHER), "x_rows must be a numpy array or a torch tensor, got list"),
    (lambda: Moments(0, 2), "got dx=0 and dy=2"),
    (lambda: Moments(3, 2).merge(Moments(2, 3)), r"equal widths to merge, got \[3, 2\] and \[2, 3\]"),
    (lambda: Moments.from_state_dict(STATE | {"scatter": torch.zeros(2, 3).double()}), r"scatter .* got .* \(2, 3\)"),
    (lambda: Moments.from_state_dict(STATE | {"scatter": torch.zeros(5, 5)}), "scatter .* got torch.float32"),
    (lambda: Moments.from_state_dict(STATE | {"mean": STATE["mean"] * torch.nan}), "mean .* with NaN or infinity"),
    (lambda: Moments.from_state_dict(STATE | {"extra": torch.zeros(1)}), "got .*'extra'"),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_what_is_wrong_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()
