"""Why encoders can be exchanged by anchors, or cannot: how their vectors lie, and whether they lie alike."""

from collections.abc import Mapping

import experiment
import torch
from swapping import Encoded
from torch import Tensor

from hf_stitch.metrics import relative_cosine

ROWS = 800
"""Candidates for anchors that are looked at."""


def shapes(sides: Mapping[str, Encoded]) -> str:
    """How the vectors of each encoder lie.

    A mean nearly as long as the vectors makes all cosines 1, unless it is taken off; one direction with most of the
    variance makes them say little but that direction.
    """
    rows = []
    for name, side in sides.items():
        vectors = side.pool.double()
        centred = vectors - vectors.mean(0)
        variances = torch.linalg.svdvals(centred).square()
        shares = variances / variances.sum()
        length = vectors.mean(0).norm() / vectors.norm(dim=1).mean()
        rows.append((name, vectors.shape[1], f"{length:.4f}", f"{shares[0]:.2f}", f"{1 / shares.square().sum():.1f}"))
    header = (
        "encoder", "width", "length of the mean / of a vector", "variance in one direction", "participation ratio"
    )  # fmt: skip
    return experiment.markdown(rows, header)


def likeness(sides: Mapping[str, Encoded], first: str | None = None) -> str:
    """How alike encoders arrange the same candidates for anchors, by centred relative cosine; and others, for chance.

    Args:
        sides: By name.
        first: Only pairs with this encoder.
    """
    names = list(sides)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if first in (None, a)]
    rows = []
    for a, b in pairs:
        x, y = sides[a].pool[:ROWS], sides[b].pool[:ROWS]
        shuffled = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))]
        rows.append((a, b, *(f"{_alike(x, other):.3f}" for other in (y, shuffled))))
    return experiment.markdown(rows, ("encoder", "encoder", "relative cosine", "of others, for chance"))


def _alike(x: Tensor, y: Tensor) -> float:
    return relative_cosine(x, y, centred=True).item()
