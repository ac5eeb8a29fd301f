"""Representations as matrices and in other shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn import functional

from hf_stitch.representation import POOLINGS, Representation, RepresentationSpec

LENGTHS = [5, 1, 3]


def ragged(padding: str, fill: float = 0.0, prefix: int = 0, dtype: torch.dtype = torch.float64) -> Representation:
    """Texts of LENGTHS tokens of width 4 whose token values do not depend on the side that is padded."""
    n = max(LENGTHS)
    values, mask = torch.full((3, n, 4), fill, dtype=dtype), torch.zeros(3, n, dtype=torch.bool)
    for sample, length in enumerate(LENGTHS):
        place = slice(0, length) if padding == "right" else slice(n - length, n)
        values[sample, place] = tokens(sample, length).to(dtype)
        mask[sample, place] = True
    return Representation(values, "bnd", mask=mask, prefix_tokens=prefix)


def tokens(sample: int, length: int) -> torch.Tensor:
    return torch.arange(length * 4, dtype=torch.float64).view(length, 4) + 100 * sample


EXPECTED = {
    "none": torch.cat([tokens(i, n) for i, n in enumerate(LENGTHS)]),
    "mean": torch.stack([tokens(i, n).mean(0) for i, n in enumerate(LENGTHS)]),
    "cls": torch.stack([tokens(i, n)[0] for i, n in enumerate(LENGTHS)]),
    "last": torch.stack([tokens(i, n)[-1] for i, n in enumerate(LENGTHS)]),
}


@pytest.mark.parametrize("pooling", EXPECTED)
@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("fill", [0.0, 1e30, float("nan"), float("inf")])
def test_rows_of_texts_are_of_real_tokens_only(pooling: str, padding: str, fill: float) -> None:
    representation = ragged(padding, fill)
    assert torch.equal(representation.rows(pooling), EXPECTED[pooling])
    owners = [i for i, n in enumerate(LENGTHS) for _ in range(n)] if pooling == "none" else [0, 1, 2]
    assert representation.row_samples(pooling).tolist() == owners


def test_prefix_tokens_are_left_out_unless_asked_for() -> None:
    values = torch.randn(2, 6, 3)
    r = Representation(values, "bnd", prefix_tokens=2, grid=(2, 2))
    assert torch.equal(r.rows("none"), values[:, 2:].reshape(8, 3))
    assert torch.equal(r.rows("none", prefix=True), values.reshape(12, 3))
    assert torch.equal(r.rows("flatten"), values[:, 2:].reshape(2, 12))
    assert torch.equal(r.rows("flatten", prefix=True), values.reshape(2, 18))
    assert torch.equal(r.rows("mean"), values[:, 2:].mean(1))
    assert torch.equal(r.rows("mean", prefix=True), values.mean(1))
    assert torch.equal(r.rows("cls"), values[:, 0])
    assert torch.equal(r.prefix(), values[:, :2])
    assert r.row_samples("none", prefix=True).tolist() == [0] * 6 + [1] * 6


def test_masked_prefix_tokens_do_not_count() -> None:
    mask = torch.tensor([[True, True, True], [True, True, False]])
    values = torch.randn(2, 3, 4)
    r = Representation(values, "bnd", mask=mask, prefix_tokens=1)
    assert torch.equal(r.rows("none"), torch.stack([values[0, 1], values[0, 2], values[1, 1]]))
    assert torch.equal(r.rows("mean")[1], values[1, 1])


@pytest.mark.parametrize("layout", ["bchw", "bhwc"])
def test_grids_have_a_row_for_each_position_in_reading_order(layout: str) -> None:
    grid = torch.arange(2 * 3 * 2 * 4.0).view(2, 3, 2, 4)  # b, h, w, d
    r = Representation(grid if layout == "bhwc" else grid.permute(0, 3, 1, 2), layout)
    assert r.spec == RepresentationSpec(layout, 4, (3, 2))
    assert torch.equal(r.rows("none"), grid.reshape(12, 4))
    assert torch.equal(r.rows("flatten"), grid.reshape(2, 24))
    assert torch.equal(r.rows("mean"), grid.mean((1, 2)))
    assert r.row_samples().tolist() == [0] * 6 + [1] * 6
    for pooling in ("cls", "last"):
        with pytest.raises(ValueError, match=f"'{pooling}' requires tokens"):
            r.rows(pooling)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_are_rows_under_every_policy(pooling: str) -> None:
    values = torch.randn(4, 3)
    r = Representation(values, "bd")
    assert torch.equal(r.rows(pooling), values)
    assert r.row_samples(pooling).tolist() == [0, 1, 2, 3]


def test_the_mean_of_many_float16_tokens_does_not_overflow() -> None:
    values = torch.full((1, 600, 2), 200.0, dtype=torch.float16)
    mask = torch.ones(1, 600, dtype=torch.bool)
    mask[0, -1] = False
    mean = Representation(values, "bnd", mask=mask).rows("mean")
    assert mean.dtype == torch.float16
    assert mean.tolist() == [[200.0, 200.0]]


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_a_sample_without_a_real_token_is_refused(pooling: str) -> None:
    r = ragged("right")
    assert r.mask is not None
    r.mask[1] = False
    with pytest.raises(ValueError, match="sample 1 of the batch is completely masked"):
        r.rows(pooling)
    assert len(r.rows("none")) == LENGTHS[0] + LENGTHS[2]


@given(
    st.sampled_from(["bchw", "bhwc", "bnd"]),
    st.sampled_from(["bchw", "bhwc", "bnd"]),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_another_layout_and_back_is_the_same(layout: str, other: str, grid: tuple[int, int]) -> None:
    values = torch.randn(2, *grid, 3)
    r = Representation(values, "bhwc", context={"x": 1}).to_layout(layout)
    moved = r.to_layout(other)
    assert (moved.layout, moved.grid, moved.context) == (other, grid, {"x": 1})
    assert torch.equal(moved.rows("none"), values.reshape(-1, 3))
    assert torch.equal(moved.to_layout(layout).values, r.values)


def test_prefix_tokens_have_no_place_in_a_grid() -> None:
    r = Representation(torch.randn(2, 7, 3), "bnd", prefix_tokens=1, grid=(2, 3))
    grid = r.to_layout("bchw")
    assert grid.values.shape == (2, 3, 2, 3)
    assert torch.equal(grid.rows(), r.rows())


@pytest.mark.parametrize("layout", ["bchw", "bhwc", "bnd"])
@pytest.mark.parametrize("size", [(2, 2), (6, 9), (4, 3)])
def test_resize_is_bilinear(layout: str, size: tuple[int, int]) -> None:
    grid = torch.randn(2, 5, 4, 3)
    resized = Representation(grid, "bchw").to_layout(layout).resize(size)
    expected = functional.interpolate(grid, size=size, mode="bilinear", align_corners=False)
    assert (resized.layout, resized.grid) == (layout, size)
    torch.testing.assert_close(resized.to_layout("bchw").values, expected)


def test_resize_to_its_own_size_changes_no_bit_and_keeps_prefix_tokens() -> None:
    r = Representation(torch.randn(2, 5, 3), "bnd", prefix_tokens=1, grid=(2, 2))
    assert r.resize((2, 2)) is r
    larger = r.resize((3, 3))
    assert larger.spec == RepresentationSpec("bnd", 3, (3, 3), 1)
    assert torch.equal(larger.prefix(), r.prefix())
    assert torch.equal(larger.rows(), Representation(r.rows().view(2, 4, 3), "bnd", grid=(2, 2)).resize((3, 3)).rows())


def zeros(*shape: int, layout: str = "bnd", **parts: Any) -> Representation:
    return Representation(torch.zeros(shape), layout, **parts)


REAL = torch.ones(2, 4).bool()
REFUSALS: list[tuple[Callable[[], Any], str]] = [
    (lambda: ragged("right").rows("tokens"), "one of 'none', 'flatten', 'mean', 'cls', 'last', got 'tokens'"),
    (lambda: ragged("right").rows("flatten"), "'flatten' requires texts of equal length"),
    (lambda: zeros(2, 4, 3, grid=(2, 2)).rows("cls"), "'cls' requires a representation with a prefix token"),
    (lambda: ragged("right").resize((2, 2)), "without a grid"),
    (lambda: ragged("right").to_layout("bchw"), "without a grid"),
    (lambda: zeros(2, 3, layout="bd").to_layout("bnd"), "vectors do not have positions"),
    (lambda: ragged("right").to_layout("bd"), "vectors do not have positions"),
    (lambda: zeros(2, 3, 4, 4, layout="nchw"), "layout must be one of 'bd', 'bnd', 'bchw', 'bhwc', got 'nchw'"),
    (lambda: zeros(2, 3), "layout bnd requires 3 axes, got shape"),
    (lambda: zeros(2, 3, layout="bd", prefix_tokens=1), "require the layout bnd, got bd"),
    (lambda: zeros(1, 2, 2, 2, layout="bchw", mask=torch.ones(1, 2).bool()), "require the layout bnd, got bchw"),
    (lambda: zeros(2, 3, 4, mask=REAL), "mask must be bool of the shape"),
    (lambda: zeros(2, 4, 4, mask=REAL.long()), "mask must be bool"),
    (lambda: zeros(2, 5, 4, prefix_tokens=1, grid=(2, 3)), "5 tokens do not match 1 prefix tokens and a grid of 2x3"),
    (lambda: zeros(2, 2, 4, prefix_tokens=3), "2 tokens do not match 3 prefix tokens"),
    (lambda: zeros(2, 4, 4, mask=REAL, grid=(2, 2)), "tokens with a grid cannot have a mask"),
    (lambda: RepresentationSpec("bchw", 3, (4, 4), prefix_tokens=1), "prefix tokens require the layout bnd"),
    (lambda: RepresentationSpec("hwc", 3), "layout must be one of"),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_what_does_not_fit_together_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_forms_go_through_json_and_read_well() -> None:
    spec = RepresentationSpec("bnd", 192, (14, 14), 1)
    assert RepresentationSpec(**json.loads(json.dumps(spec.to_dict()))) == spec
    assert [str(f) for f in (spec, RepresentationSpec("bd", 8), RepresentationSpec("bchw", 3, (4, 2)))] == [
        "bnd 192 14x14 +1",
        "bd 8",
        "bchw 3 4x2",
    ]


@given(st.integers(1, 6), st.integers(1, 7), st.randoms(use_true_random=False))
def test_the_mean_is_that_of_the_positions_of_a_sample(batch: int, length: int, random: object) -> None:
    mask = torch.tensor([[random.random() < 0.6 for _ in range(length)] for _ in range(batch)])
    mask[:, random.randrange(length)] = True
    r = Representation(torch.randn(batch, length, 3, dtype=torch.float64), "bnd", mask=mask)
    rows, owners = r.rows("none").numpy(), r.row_samples("none").numpy()
    by_hand = np.stack([rows[owners == sample].mean(0) for sample in range(batch)])
    np.testing.assert_allclose(r.rows("mean").numpy(), by_hand, rtol=1e-12, atol=1e-14)
