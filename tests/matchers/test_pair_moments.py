"""Moments of all pairs of layers: those of rows that are resized first, also if images have several sizes."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_stitch.pairs.moments import PairMoments
from hf_stitch.representation import Representation
from hf_stitch.statistics.layer_moments import InterpolatedMoments, LayerMoments
from hf_stitch.stitches.layer import paired_rows

X = {"wide": (12, 8), "near": (5, 2), "narrow": (2, 8)}
"""Layer of the source -> width, and by what its grid is smaller than the image's."""
Y = {"first": (4, 1), "second": (3, 1), "deep": (6, 4)}
SIZES = ((16, 16), (16, 16), (24, 8), (16, 16))
"""Height and width of the images of each batch."""


def batches() -> list[tuple[dict[str, Representation], dict[str, Representation]]]:
    g = torch.Generator().manual_seed(0)

    def drawn(layers: dict[str, tuple[int, int]], size: tuple[int, int]) -> dict[str, Representation]:
        return {
            name: Representation(
                torch.randn(5, width, size[0] // by, size[1] // by, generator=g, dtype=torch.float64) + 3, "bchw"
            )
            for name, (width, by) in layers.items()
        }

    return [(drawn(X, size), drawn(Y, size)) for size in SIZES]


def expected(a: str, b: str) -> tuple[Tensor, Tensor]:
    rows = [paired_rows(x[a], y[b], "none")["body"] for x, y in batches()]
    of_x, of_y = (torch.cat(side) for side in zip(*rows, strict=True))
    moments = LayerMoments([of_x.mean(0)], [of_y.mean(0)]).update([of_x], [of_y]).moments(0, 0)
    return moments.mean, moments.scatter


def test_moments_are_those_of_resized_rows_for_all_sizes_of_images_and_after_a_restart() -> None:
    pairs = [(a, b) for b in Y for a in X]
    whole, interrupted = PairMoments(pairs), PairMoments(pairs)
    for number, (x, y) in enumerate(batches()):
        whole.update(x, y)
        if number == 3:
            state = {name: tensor.clone() for name, tensor in interrupted.state_dict().items()}
            interrupted = PairMoments(pairs)
            interrupted.load_state_dict(state)
        interrupted.update(x, y)
    for a, b in pairs:
        mean, scatter = expected(a, b)
        found = whole.of(a, b)["body"]
        torch.testing.assert_close(found.mean, mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.scatter, scatter, rtol=1e-10, atol=1e-10)
        assert torch.equal(interrupted.of(a, b)["body"].scatter, found.scatter)
        assert torch.equal(whole.of(a, b)["body"].scatter, found.scatter)  # asking again changes nothing
    kinds = [type(kept) for group in whole._groups for part, kept in group.sums.items() if part in group.enlarged]
    assert kinds == [InterpolatedMoments] * 6  # two grids into the first layers and one into the deep one, of two sizes
