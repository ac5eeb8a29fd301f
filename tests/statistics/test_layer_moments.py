"""Moments of enlarged positions: those of positions that are enlarged first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hf_stitch.statistics.layer_moments import InterpolatedMoments, LayerMoments

GRIDS = [((1, 1), (3, 2)), ((2, 3), (5, 7)), ((4, 4), (8, 8)), ((7, 7), (8, 8)), ((5, 4), (5, 9)), ((8, 8), (32, 32))]


def enlarged(values: Tensor, small: tuple[int, int], large: tuple[int, int]) -> Tensor:
    grid = values.double().unflatten(1, small).permute(0, 3, 1, 2)
    return functional.interpolate(grid, size=large, mode="bilinear").permute(0, 2, 3, 1).flatten(0, 2)


def drawn(small: tuple[int, int], large: tuple[int, int], n: int) -> tuple[list[Tensor], list[Tensor]]:
    g = torch.Generator().manual_seed(0)
    x = [torch.randn(n, small[0] * small[1], width, generator=g) * 2 + 30 for width in (3, 1)]
    y = [torch.randn(n, large[0] * large[1], width, generator=g) - 500 for width in (2, 4)]
    return x, y


@pytest.mark.parametrize(("small", "large"), GRIDS)
def test_moments_are_those_of_enlarged_rows(small: tuple[int, int], large: tuple[int, int]) -> None:
    x, y = drawn(small, large, 9)
    origins = [[layer.double().flatten(0, 1).mean(0) + 0.1 for layer in side] for side in (x, y)]
    found = InterpolatedMoments(*origins, small, large)
    for start in (0, 4):
        end = start + 4 if start == 0 else 9
        found.update([layer[start:end] for layer in x], [layer[start:end] for layer in y])
    rows = [enlarged(layer, small, large) for layer in x], [layer.flatten(0, 1) for layer in y]
    expected = LayerMoments(*origins).update(*rows)
    again = InterpolatedMoments.from_state_dict(found.state_dict())
    for i in range(2):
        for j in range(2):
            for kept in (found, again):
                one = kept.moments(i, j, expected.moments(0, j))
                assert one.n == expected.n
                torch.testing.assert_close(one.mean, expected.moments(i, j).mean, rtol=1e-12, atol=1e-12)
                scatter = expected.moments(i, j).scatter
                size = scatter.abs().max()
                torch.testing.assert_close(one.scatter / size, scatter / size, rtol=0, atol=1e-12)


def test_moments_do_not_depend_on_batches_and_merge() -> None:
    small, large = (2, 2), (6, 5)
    x, y = drawn(small, large, 300)
    origins = [[layer.double().flatten(0, 1).mean(0) for layer in side] for side in (x, y)]
    whole = InterpolatedMoments(*origins, small, large).update(x, y)
    own = LayerMoments(origins[1]).update([layer.flatten(0, 1) for layer in y])
    parts = InterpolatedMoments(*origins, small, large)
    for batch in range(0, 300, 7):
        parts.update([layer[batch : batch + 7] for layer in x], [layer[batch : batch + 7] for layer in y])
    assert torch.equal(parts.moments(0, 1, own.moments(1, 1)).scatter, whole.moments(0, 1, own.moments(1, 1)).scatter)
    halves = [
        InterpolatedMoments(*origins, small, large).update([v[part] for v in x], [v[part] for v in y])
        for part in (slice(100), slice(100, None))
    ]
    both = [kept.moments(1, 0, own.moments(0, 0)).scatter for kept in (halves[0].merge(halves[1]), whole)]
    torch.testing.assert_close(*both, rtol=1e-10, atol=1e-8)
    with pytest.raises(ValueError, match="at least as high and wide"):
        InterpolatedMoments([torch.zeros(2)], [torch.zeros(3)], (4, 4), (8, 3))
