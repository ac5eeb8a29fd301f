"""Why encoders can or cannot be swapped: the distribution of their vectors and their similarity."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import study
import torch
from relative_representations.swapping import Encoded

from hf_stitch.metrics import relative_cosine

ROWS = 800
"""Number of candidates for anchors that are compared."""


def shapes(sides: Mapping[str, Encoded]) -> list[dict[str, Any]]:
    """Describe the distribution of the vectors of each encoder.

    If the mean is nearly as long as the vectors, all cosines are close to 1 unless the vectors are centred. If one
    direction has most of the variance, cosines contain little else.

    Returns:
        For each encoder: its name and width, the norm of the mean over the mean norm of a vector, the largest share of
        variance in one direction, and the participation ratio.
    """
    rows = []
    for name, side in sides.items():
        vectors = side.pool.double()
        variances = torch.linalg.svdvals(vectors - vectors.mean(0)).square()
        shares = variances / variances.sum()
        figures = vectors.mean(0).norm() / vectors.norm(dim=1).mean(), shares[0], 1 / shares.square().sum()
        rows.append({"encoder": name, "width": vectors.shape[1], "shape": [round(float(each), 4) for each in figures]})
    return rows


def likeness(sides: Mapping[str, Encoded], first: str | None = None) -> list[dict[str, Any]]:
    """Compare pairs of encoders (those with a first one, or all) on the same candidates by centred relative cosine.

    Returns:
        For each pair: the names, the similarity, and a baseline with shuffled candidates.
    """
    rows = []
    for a, b in combinations(sides, 2):
        if first in (None, a):
            x, y = sides[a].pool[:ROWS], sides[b].pool[:ROWS]
            shuffled = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))]
            found = [round(relative_cosine(x, other).item(), 3) for other in (y, shuffled)]
            rows.append({"encoders": [a, b], "similarity": found[0], "shuffled": found[1]})
    return rows


def tables(shapes: Sequence[Mapping[str, Any]], likeness: Sequence[Mapping[str, Any]]) -> str:
    """Format shapes and similarities as two Markdown tables."""
    formed = [(row["encoder"], row["width"], *"{:.4f} {:.2f} {:.1f}".format(*row["shape"]).split()) for row in shapes]
    header = "encoder", "width", "norm of the mean / of a vector", "largest share of variance", "participation ratio"
    pairs = [(*row["encoders"], f"{row['similarity']:.3f}", f"{row['shuffled']:.3f}") for row in likeness]
    names = "encoder", "encoder", "centred relative cosine", "shuffled (chance)"
    return f"{study.markdown(header, formed)}\n\n{study.markdown(names, pairs)}"
