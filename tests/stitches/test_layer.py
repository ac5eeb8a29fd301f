"""The stitching layer: forms in, forms out, the rows it is fitted on, and its baselines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from hf_stitch.representation import Representation, RepresentationSpec
from hf_stitch.stitches import IdentityStitch, LinearStitch, StitchingLayer
from hf_stitch.stitches.layer import paired_rows, part_widths
from hf_stitch.stitches.sequence import AttentionStitch

CNN, VIT, DEIT = (
    RepresentationSpec("bchw", 6, (4, 4)),
    RepresentationSpec("bnd", 5, (2, 3), 1),
    RepresentationSpec("bnd", 5, (2, 3), 2),
)
SWIN, TEXT, VECTOR = RepresentationSpec("bhwc", 4, (2, 2)), RepresentationSpec("bnd", 5), RepresentationSpec("bd", 7)


def sample(spec: RepresentationSpec, batch: int = 3, mask: torch.Tensor | None = None) -> Representation:
    """A random representation of a form; texts have six tokens."""
    positions = spec.grid[0] * spec.grid[1] if spec.grid else 6
    shape = {
        "bd": (spec.width,),
        "bnd": (spec.prefix_tokens + positions, spec.width),
        "bchw": (spec.width, *(spec.grid or ())),
        "bhwc": (*(spec.grid or ()), spec.width),
    }[spec.layout]
    grid = spec.grid if spec.layout == "bnd" else None
    return Representation(torch.randn(batch, *shape), spec.layout, mask, spec.prefix_tokens, grid)


def layer_of(source: RepresentationSpec, target: RepresentationSpec, pooling: str = "none") -> StitchingLayer:
    maps = {part: LinearStitch(*width) for part, width in part_widths(source, target, pooling).items()}
    return StitchingLayer(source, target, pooling, maps["body"], maps.get("prefix"))


JOINED = [
    *((source, target, "none") for source in (CNN, VIT, DEIT, SWIN) for target in (CNN, VIT, DEIT, SWIN)),
    *((source, target, "flatten") for source in (CNN, VIT, SWIN, VECTOR) for target in (CNN, DEIT, SWIN, VECTOR)),
    (TEXT, TEXT, "none"),
    (VECTOR, VECTOR, "none"),
]


@pytest.mark.parametrize(("source", "target", "pooling"), JOINED, ids=lambda value: str(value))
def test_output_has_the_target_form(source: RepresentationSpec, target: RepresentationSpec, pooling: str) -> None:
    assert layer_of(source, target, pooling)(sample(source)).spec == target


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("target", [CNN, VIT, SWIN, TEXT, VECTOR], ids=str)
def test_a_pooled_stitch_gives_one_position(pooling: str, target: RepresentationSpec) -> None:
    for source in (VIT, TEXT, VECTOR):
        out = layer_of(source, target, pooling)(sample(source))
        assert out.layout == target.layout
        assert out.rows("flatten").shape == (3, target.width)
        assert out.prefix_tokens == 0
        if target == TEXT:
            assert out.mask is not None and out.mask.shape == (3, 1) and bool(out.mask.all())


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_a_pooled_text_gives_one_position_of_an_image(pooling: str) -> None:
    mask = torch.tensor([[True] * 6, [False, False, *[True] * 4], [True, *[False] * 5]])
    out = layer_of(TEXT, VIT, pooling)(sample(TEXT, mask=mask))
    assert out.values.shape == (3, 1, 5) and out.mask is None


def test_every_position_is_mapped_by_the_same_map() -> None:
    layer = layer_of(CNN, SWIN)
    representation = sample(CNN)
    expected = layer.body(representation.resize((2, 2)).rows("none"))
    torch.testing.assert_close(layer(representation).rows("none"), expected)


def test_prefix_tokens_come_from_prefix_tokens_or_else_from_the_mean() -> None:
    layer, representation = layer_of(DEIT, DEIT), sample(DEIT)
    expected = layer.prefix(representation.values[:, :2].reshape(3, 10)).view(3, 2, 5)
    torch.testing.assert_close(layer(representation).prefix(), expected)
    layer, representation = layer_of(CNN, VIT), sample(CNN)
    torch.testing.assert_close(layer(representation).prefix()[:, 0], layer.prefix(representation.values.mean((2, 3))))


def test_the_mask_is_kept_and_padding_mapped() -> None:
    mask = torch.tensor([[True] * 6, [False, False, *[True] * 4], [True, *[False] * 5]])
    layer, representation = layer_of(TEXT, TEXT), sample(TEXT, mask=mask)
    out = layer(representation)
    assert out.mask is mask
    torch.testing.assert_close(out.values, layer.body(representation.values))


@pytest.mark.parametrize(("before", "after"), [(0, 0), (2, 2), (2, 0), (0, 1), (1, 2)])
def test_what_padding_holds_reaches_no_real_token(before: int, after: int) -> None:
    source, target = (RepresentationSpec("bnd", 5, prefix_tokens=count) for count in (before, after))
    body = AttentionStitch(5, 5, heads=2, width=4)
    torch.nn.init.normal_(body.write)
    layer = StitchingLayer(source, target, "none", body, LinearStitch(5 * max(before, 1), 5 * after) if after else None)
    tokens = torch.tensor([[True] * 6, [False, False, *[True] * 4], [True, *[False] * 5]])
    own, mask = (torch.cat([torch.ones(3, count, dtype=torch.bool), tokens], 1) for count in (before, after))
    representation = sample(source, mask=own)
    other = representation.replace(values=representation.values.masked_fill(~own[..., None], 1e3))
    assert torch.equal(layer(other).mask, mask)
    torch.testing.assert_close(layer(other).values[mask], layer(representation).values[mask])


@pytest.mark.parametrize("spec", [CNN, VIT, DEIT, SWIN, TEXT, VECTOR], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_identity_to_the_same_form_changes_no_bit(spec: RepresentationSpec, dtype: torch.dtype) -> None:
    representation = sample(spec)
    representation = representation.replace(values=representation.values.to(dtype))
    out = layer_of(spec, spec).identity()(representation)
    assert out.values.dtype == dtype
    assert torch.equal(out.values, representation.values)


def test_mean_only_ignores_what_comes_in() -> None:
    means = {"body": torch.arange(5.0), "prefix": torch.arange(10.0)}
    widths = part_widths(CNN, DEIT, "none")
    layer = StitchingLayer(CNN, DEIT, "none", LinearStitch(*widths["body"]), LinearStitch(*widths["prefix"]), means)
    out = layer.mean_only()(sample(CNN))
    assert torch.equal(out.rows("none"), torch.arange(5.0).expand(18, 5))
    assert torch.equal(out.prefix(), torch.arange(10.0).view(2, 5).expand(3, 2, 5))


# -- what it is fitted on ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target", "pooling"), JOINED, ids=lambda value: str(value))
def test_rows_have_the_widths_of_the_maps(source: RepresentationSpec, target: RepresentationSpec, pooling: str) -> None:
    pairs = paired_rows(sample(source), sample(target), pooling)
    assert {part: (x.shape[1], y.shape[1]) for part, (x, y) in pairs.items()} == part_widths(source, target, pooling)
    for x, y in pairs.values():
        assert len(x) == len(y)


@given(st.sampled_from([CNN, VIT, DEIT, SWIN]), st.sampled_from([CNN, VIT, DEIT, SWIN]))
def test_the_fitted_rows_are_those_that_the_layer_maps(source: RepresentationSpec, target: RepresentationSpec) -> None:
    """Where the target's rows are the map of the source's, the layer gives the target's representation."""
    layer, x = layer_of(source, target), sample(source)
    for part, (rows_x, rows_y) in paired_rows(x, layer(x), "none").items():
        torch.testing.assert_close(getattr(layer, part)(rows_x), rows_y)


def test_masked_positions_are_not_fitted_on() -> None:
    mask = torch.tensor([[True] * 6, [False, False, *[True] * 4]])
    x, y = sample(TEXT, 2, mask), sample(TEXT, 2, mask)
    (rows_x, rows_y) = paired_rows(x, y, "none")["body"]
    assert torch.equal(rows_x, x.values[mask])
    assert torch.equal(rows_y, y.values[mask])


@pytest.mark.parametrize("unmasked", ["source", "target"])
def test_a_mask_of_one_side_alone_holds_for_both(unmasked: str) -> None:
    mask = torch.tensor([[True] * 6, [True, *[False] * 5]])
    x = sample(TEXT, 2, None if unmasked == "source" else mask)
    y = sample(TEXT, 2, None if unmasked == "target" else mask)
    (rows_x, rows_y) = paired_rows(x, y, "none")["body"]
    assert torch.equal(rows_x, x.values[mask])
    assert torch.equal(rows_y, y.values[mask])


@pytest.mark.parametrize("other", [[[True] * 6] * 2, [[True] * 6, [*[False] * 5, True]]], ids=["longer", "other side"])
def test_tokens_that_do_not_correspond_are_refused(other: list[list[bool]]) -> None:
    mask, other = torch.tensor([[True] * 6, [True, *[False] * 5]]), torch.tensor(other)
    with pytest.raises(ValueError, match="split or pad texts differently; use pooling='mean', 'cls' or 'last'"):
        paired_rows(sample(TEXT, 2, mask), sample(TEXT, 2, other), "none")


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "pooling", "message"),
    [
        (CNN, TEXT, "none", "only one of them is a grid; use 'mean'"),
        (TEXT, VIT, "none", "only one of them is a grid; use 'mean'"),
        (CNN, VECTOR, "none", "one of them is a vector; use 'mean' or 'flatten'"),
        (VECTOR, TEXT, "none", "one of them is a vector"),
        (TEXT, TEXT, "flatten", "texts vary in length; use 'none' or 'mean'"),
        (TEXT, VECTOR, "flatten", "texts vary in length"),
        (VECTOR, TEXT, "flatten", "texts vary in length"),
    ],
)
def test_forms_that_a_policy_cannot_join_are_refused(
    source: RepresentationSpec, target: RepresentationSpec, pooling: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        StitchingLayer(source, target, pooling, IdentityStitch(source.width, target.width))
    with pytest.raises(ValueError, match=message):
        paired_rows(sample(source), sample(target), pooling)


MISNAMED = {**layer_of(CNN, SWIN).to_dict(), "body": {**LinearStitch(6, 4).to_dict(), "name": "liner"}}
REFUSALS: list[tuple[Callable[[], Any], str]] = [
    (lambda: paired_rows(sample(CNN, 2), sample(VIT, 3), "none"), "must have the same samples, got 2 and 3"),
    (
        lambda: paired_rows(sample(TEXT), Representation(torch.randn(3, 8, 5), "bnd"), "none"),
        "requires the same tokens on both sides, got 6 and 8",
    ),
    (
        lambda: StitchingLayer(CNN, SWIN, "none", LinearStitch(6, 5)),
        "the body of a stitch from bchw 6 4x4 to bhwc 4 2x2 .* must map 6 -> 4, got 6 -> 5",
    ),
    (lambda: StitchingLayer(CNN, VIT, "none", LinearStitch(6, 5)), "the prefix of .* must map 6 -> 5, got none"),
    (
        lambda: StitchingLayer(CNN, SWIN, "none", LinearStitch(6, 4), LinearStitch(6, 5)),
        "the prefix of .* must map none, got 6 -> 5",
    ),
    (lambda: layer_of(CNN, VIT)(sample(SWIN)), "a representation of spec bchw 6 4x4, got bhwc 4 2x2"),
    (lambda: layer_of(CNN, VIT)(sample(RepresentationSpec("bchw", 7, (4, 4)))), "spec bchw 6 4x4, got bchw 7 4x4"),
    (lambda: StitchingLayer.from_dict(MISNAMED), "did you mean 'linear'"),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_what_does_not_fit_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
