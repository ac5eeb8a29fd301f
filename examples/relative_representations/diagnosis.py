"""Why encoders can or cannot be swapped: the distribution of their vectors and their similarity."""

from collections.abc import Mapping

import experiment
import torch
from swapping import Encoded
from torch import Tensor

from hf_stitch.metrics import relative_cosine

ROWS = 800
"""Number of candidates for anchors that are compared."""


def shapes(sides: Mapping[str, Encoded]) -> str:
    """Describe the distribution of the vectors of each encoder.

    If the mean is nearly as long as the vectors, all cosines are close to 1 unless the vectors are centred. If one
    direction has most of the variance, cosines contain little else.

    Returns:
        A Markdown table.
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
        "encoder", "width", "norm of the mean / of a vector", "largest share of variance", "participation ratio"
    )  # fmt: skip
    return experiment.markdown(rows, header)


def likeness(sides: Mapping[str, Encoded], first: str | None = None) -> str:
    """Compare encoders on the same candidates for anchors by centred relative cosine.

    Args:
        sides: Name -> vectors of the encoder.
        first: Restrict to pairs with this encoder. ``None``: all pairs.

    Returns:
        A Markdown table with a baseline of shuffled candidates.
    """
    names = list(sides)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if first in (None, a)]
    rows = []
    for a, b in pairs:
        x, y = sides[a].pool[:ROWS], sides[b].pool[:ROWS]
        shuffled = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))]
        rows.append((a, b, *(f"{_similarity(x, other):.3f}" for other in (y, shuffled))))
    return experiment.markdown(rows, ("encoder", "encoder", "relative cosine", "shuffled (chance)"))


def _similarity(x: Tensor, y: Tensor) -> float:
    return relative_cosine(x, y).item()
