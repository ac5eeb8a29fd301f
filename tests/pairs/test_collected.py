"""What matchers read of a pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_stitch.pairs.collected import _rows_of_side
from hf_stitch.representation import Representation
from hf_stitch.stitches.layer import paired_rows


def _texts(width: int, prefix_tokens: int = 0) -> Representation:
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]]).bool()
    return Representation(torch.randn(3, 6, width), "bnd", mask=mask, prefix_tokens=prefix_tokens)


def _image(width: int, *grid: int, prefix_tokens: int = 0) -> Representation:
    values = torch.randn(3, prefix_tokens + grid[0] * grid[1], width)
    return Representation(values, "bnd", grid=(grid[0], grid[1]), prefix_tokens=prefix_tokens)


@pytest.mark.parametrize(
    ("x", "y", "poolings"),
    [
        (_texts(4), _texts(5), ["none", "mean", "cls", "last"]),
        (_texts(4, prefix_tokens=2), _texts(5, prefix_tokens=2), ["none", "mean", "cls", "last"]),
        (_image(4, 2, 2), _image(5, 4, 4, prefix_tokens=1), ["none", "flatten", "mean"]),
        (_image(4, 4, 4, prefix_tokens=2), _image(5, 2, 2), ["none", "flatten", "mean", "last"]),
    ],
    ids=["texts", "texts with a prefix", "enlarged", "shrunk"],
)
def test_the_rows_of_samples_without_partners_are_those_that_they_have_with_them(
    x: Representation, y: Representation, poolings: list[Any]
) -> None:
    for pooling in poolings:
        pairs = paired_rows(x, y, pooling)
        of_x, of_y = (_rows_of_side(side, y.spec, pooling, of_source=side is x) for side in (x, y))
        assert pairs.keys() == of_x.keys() == of_y.keys()
        assert all(torch.equal(u, of_x[part]) and torch.equal(v, of_y[part]) for part, (u, v) in pairs.items())
