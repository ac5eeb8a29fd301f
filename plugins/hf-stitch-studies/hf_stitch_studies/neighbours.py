"""Metrics of nearest neighbours that compare their ranks or their distances."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_stitch.metrics import of_rows
from hf_stitch.metrics._neighbours import Near, NeighboursMetric, chunks, nearest
from hf_stitch.metrics._rows import directions
from hf_stitch.metrics.base import Invariances
from hf_stitch.options import Count
from hf_stitch.papers import KLABUNDE_2023

_ROUNDING = 1e-14
"""Cosine distances below this may be rounding errors of 0."""


@of_rows
def rank_similarity(x: Tensor, y: Tensor, *, k: Count = 10, distance: Near = "cosine") -> Tensor:
    """Mean agreement of the ranks of the shared nearest neighbours (Wang et al. 2020).

    From "Towards understanding the instability of network embedding". The score of a sample is ``Σⱼ 2 / ((1 + |r - s|)
    (r + s))`` over its m shared neighbours j, where r and s are the ranks of j on the two sides, divided by the maximum
    ``Σ 1/i`` for i from 1 to m. It is 0 without shared neighbours.

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        k: Number of neighbours, from 1 to n - 1. A row is not its own neighbour.
        distance: Distance that ranks the neighbours, ``"cosine"`` or ``"euclidean"``.

    Returns:
        Similarity in [0, 1]; a float for arrays, a 0-d float64 tensor for tensors.

    Raises:
        ValueError: If k >= n, or a row is zero (cosine distance).

    Example:
        >>> import torch
        >>> x = torch.randn(30, 8)
        >>> round(rank_similarity(x, 3 * x).item(), 6)
        1.0
    """
    near_x, near_y = (nearest("rank_similarity", s, rows, k, distance, ranked=True) for s, rows in (("x", x), ("y", y)))
    shared = (near_x[:, :, None] == near_y[:, None, :]).to(x)
    ranks = torch.arange(1, k + 1, device=x.device, dtype=x.dtype)
    agreement = 2 / ((1 + (ranks[:, None] - ranks).abs()) * (ranks[:, None] + ranks))
    normalizers = torch.cat([ranks.new_ones(1), (1 / ranks).cumsum(0)])  # no shared neighbour: 0 / 1
    return ((shared * agreement).sum((1, 2)) / normalizers[shared.sum((1, 2)).long()]).mean()


class RankSimilarity(NeighboursMetric):
    """Streaming ``rank_similarity``."""

    name = "rank_similarity"
    title = "rank similarity of nearest neighbours"
    papers = (KLABUNDE_2023,)
    function = staticmethod(rank_similarity)


@of_rows
def second_order_cosine(x: Tensor, y: Tensor, *, k: Count = 10) -> Tensor:
    """Mean cosine between the vectors of cosine distances from a sample to its neighbours (Hamilton et al. 2016).

    For each sample, both vectors run over the union of its k nearest neighbours in ``x`` and in ``y``.

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        k: Number of neighbours per side, from 1 to n - 1.

    Returns:
        Similarity in [0, 1]; a float for arrays, a 0-d float64 tensor for tensors.

    Raises:
        ValueError: If k >= n, a row is zero, or a row has the same direction as all its neighbours.

    Example:
        >>> import torch
        >>> x = torch.randn(30, 8)
        >>> round(second_order_cosine(x, 3 * x).item(), 6)
        1.0
    """
    name = "second_order_cosine"
    near_x, near_y = (nearest(name, side, rows, k, "cosine") for side, rows in (("x", x), ("y", y)))
    first_seen = torch.cat([torch.ones_like(near_x), (near_y[:, :, None] != near_x[:, None]).all(2)], 1)
    union = torch.cat([near_x, near_y], 1)
    to_x, to_y = (first_seen * _cosine_distances(directions(name, s, rows), union) for s, rows in (("x", x), ("y", y)))
    lengths = to_x.norm(dim=1) * to_y.norm(dim=1)
    near_zero = (to_x.norm(dim=1) <= _ROUNDING) | (to_y.norm(dim=1) <= _ROUNDING)
    if near_zero.any():
        row = int(near_zero.nonzero()[0])
        raise ValueError(f"{name}: row {row} has the same direction as all its neighbours; drop duplicates or raise k")
    return ((to_x * to_y).sum(1) / lengths).mean()


class SecondOrderCosine(NeighboursMetric):
    """Streaming ``second_order_cosine``."""

    name = "second_order_cosine"
    title = "second-order cosine similarity"
    papers = (KLABUNDE_2023,)
    function = staticmethod(second_order_cosine)
    invariances: Invariances = ("orthogonal", "scaling", "permutation")


def _cosine_distances(directions: Tensor, neighbours: Tensor) -> Tensor:
    """Return the cosine distances from each row i to the rows ``neighbours[i]``, ``(n, m)``."""
    distances = (
        torch.linalg.vecdot(directions[i, None], directions[neighbours[i]])
        for i in chunks(len(neighbours), neighbours.device)
    )
    return 1 - torch.cat(list(distances))
