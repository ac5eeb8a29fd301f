"""Directions that are rounding in the dtype of the rows are told from those that vary."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_stitch.registry import registries
from hf_stitch.statistics import Moments
from hf_stitch.statistics.features import LayerRows
from hf_stitch.statistics.layer_moments import InterpolatedMoments, LayerMoments
from hf_stitch.statistics.spectrum import Spectrum, rounding

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WIDTHS = [4, 8, 32, 128, 384]


def normed(width: int, dtype: torch.dtype, n: int | None = None, decay: float = 0.0) -> Tensor:
    """Outputs of a LayerNorm with trained-looking weights, computed in a dtype: rank ``width - 1``."""
    n = n or 3 * width
    norm = torch.nn.LayerNorm(width).requires_grad_(False)
    norm.weight.add_(0.2 * torch.randn(width))
    norm.bias.add_(0.1 * torch.randn(width))
    scales = torch.arange(1, width + 1) ** -decay
    return norm.to(dtype)((torch.randn(n, width) * scales).to(dtype))


def moments_of(x: Tensor, y: Tensor | None = None) -> Moments:
    y = x if y is None else y
    return Moments(x.shape[1], y.shape[1]).update(x, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_direction_that_a_norm_removes_is_rounding(width: int, dtype: torch.dtype) -> None:
    assert Spectrum.of(moments_of(normed(width, dtype))).rank == width - 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_directions_that_vary_are_kept(width: int, dtype: torch.dtype) -> None:
    rows = torch.randn(3 * width, width)
    assert Spectrum.of(moments_of(rows.to(dtype))).rank == width
    # One feature a thousand times as large, as in trained language models: its rounding is not that of the others.
    rows[:, 0] *= 1000
    assert Spectrum.of(moments_of(rows.to(dtype))).rank == width


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_errors_are_relative_to_the_numbers_that_are_rounded(dtype: torch.dtype) -> None:
    """A mean far from zero makes larger errors, which the theory predicts: compare with those that are there."""
    exact = (10 + torch.randn(4000, 6, dtype=torch.float64)) * torch.tensor([0.01, 0.1, 1.0, 10.0, -50.0, 3.0])
    errors = (exact.to(dtype).double() - exact).square().sum(0)
    bound = rounding(moments_of(exact.to(dtype)), "x")
    assert bool((errors < bound).all())
    assert bool((errors * 1000 > bound).all())  # and not by orders of magnitude


def test_means_far_from_zero_leave_what_varies_by_more_than_their_rounding() -> None:
    """The distance of two bfloat16 numbers near 30 is an eighth of the standard deviation."""
    assert Spectrum.of(moments_of((30 + torch.randn(400, 8)).bfloat16())).rank == 8


@pytest.mark.parametrize("metric", ["svcca", "linear_regression", "cca", "shape_distance:alpha=0"])
def test_nothing_but_rounding_has_no_spectrum(metric: str) -> None:
    rows = (100 + 0.3 * torch.randn(50, 4, dtype=torch.float64)).to(torch.bfloat16)
    with pytest.raises(ValueError, match="x does not vary by more than rounding"):
        Spectrum.of(moments_of(rows))
    built = registries.metrics.build(metric)
    with pytest.raises(ValueError, match="x does not vary by more than rounding"):
        built.function(rows, torch.randn(50, 4), **built.options)


def test_an_uncertain_direction_counts_if_it_explains_something() -> None:
    """At 15 rounding errors, y decides; at 100 and at 1 it does not."""
    eps = torch.finfo(torch.float16).eps
    x = torch.randn(4000, 3)
    for size, useful, useless in ((100, 3, 3), (15, 3, 2), (0.1, 2, 2)):
        rows = x.clone()
        rows[:, 2] = rows[:, 0] + size * eps * rows[:, 2]
        for y, expected in ((x, useful), (x[:, :2], useless)):
            moments = moments_of(rows.half(), y)
            assert Spectrum.of(moments, sxy=moments.sxy).rank == expected, (size, expected)


def test_all_statistics_carry_the_coarsest_dtype_of_each_side() -> None:
    half, single, double = (torch.finfo(dtype).eps for dtype in (torch.float16, torch.float32, torch.float64))
    x, y = torch.randn(20, 4), torch.randn(20, 3, dtype=torch.float64)
    moments = moments_of(x, y)
    assert moments.eps.tolist() == [single, double]
    assert Moments(4, 3).merge(moments).eps.tolist() == [single, double]
    assert moments.update(x.half(), y).eps.tolist() == [half, double]
    assert moments.update(x, y).eps.tolist() == [half, double]
    assert Moments.from_state_dict(moments.state_dict()).eps.tolist() == [half, double]
    assert moments.about_origin().eps.tolist() == [half, double]
    assert moments.reset().eps.tolist() == [0, 0]

    layers = LayerMoments([x.mean(0).double()] * 2, [y.mean(0)]).update([x, x.half()], [y])
    assert layers.moments(1, 0).eps.tolist() == [half, double]
    assert layers.moments(0, 0).eps.tolist() == [single, double]

    small, large = torch.randn(2, 4, 5).half(), torch.randn(2, 16, 3)
    grids = InterpolatedMoments([torch.zeros(5)], [torch.zeros(3)], (2, 2), (4, 4)).update([small], [large])
    assert grids.moments(0, 0, moments_of(large.flatten(0, 1))).eps.tolist() == [half, single]


def test_rows_in_files_have_the_dtype_in_which_they_were_computed(tmp_path) -> None:  # type: ignore[no-untyped-def]
    x, y = torch.randn(6, 4).bfloat16(), torch.randn(6, 3)
    rows = LayerRows(tmp_path, [x], [y]).update([x], [y])
    assert torch.equal(rows.x(0), x) and torch.equal(rows.y(0), y)


def test_more_rows_do_not_change_the_rank() -> None:
    for n in (40, 400, 4000, 40000):
        assert Spectrum.of(moments_of(normed(32, torch.bfloat16, n))).rank == 31
    assert math.isclose(Spectrum.of(moments_of(normed(32, torch.float64))).rcond, math.sqrt(32 * 2.0**-52), rel_tol=1)
