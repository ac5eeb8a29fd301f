"""Nearest-neighbour search over rows that are read in chunks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from hf_stitch.relative.similarities import Cosine, Euclidean, computable

Near = Literal["cosine", "euclidean"]
BLOCK, GROUP = 1024, 32
"""Queries that are compared at a time, so that their similarities stay in the cache; rows whose best is found first."""


@torch.no_grad()
def nearest(queries: Tensor, chunks: Iterable[Tensor], k: int = 10, distance: Near = "cosine") -> tuple[Tensor, Tensor]:
    """Find the k nearest rows of each query, reading the rows in chunks.

    Only the queries, one chunk and their similarities are in memory. The chunks may come from
    :meth:`RelativeProjection.stream`.

    Args:
        queries: ``(m, d)``, floating point.
        chunks: Matrices ``(n₁, d)``, ``(n₂, d)``, …, read once.
        k: Number of neighbours, at most the total number of rows. A query that is among the rows is its own neighbour.
        distance: ``"cosine"`` or ``"euclidean"``. Ties are broken arbitrarily.

    Returns:
        ``(m, k)`` cosines or distances, nearest first, and ``(m, k)`` int64 indices of the rows over all chunks.

    Raises:
        ValueError: There are fewer than k rows, or a row or query is 0 (cosine) or contains NaN or infinity.

    Example:
        >>> rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> nearest(torch.tensor([[2.0, 0.1]]), rows.split(2), k=2)[1]
        tensor([[0, 2]])
    """
    if k < 1 or queries.ndim != 2:
        raise ValueError(f"nearest needs queries of shape (m, d) and k >= 1, got {tuple(queries.shape)} and k={k}")
    if distance not in ("cosine", "euclidean"):
        raise ValueError(f"distance must be 'cosine' or 'euclidean', got {distance!r}")
    _check_finite("query", queries, 0)
    queries, largest = computable(queries), distance == "cosine"
    similarity = Cosine() if largest else Euclidean()
    closeness = queries.new_empty(len(queries), 0)
    places = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    seen = 0
    for rows in chunks:
        _check_finite("row", rows, seen)
        rows = rows.to(queries)
        best = [_best(similarity(some, rows), min(k, len(rows)), largest) for some in queries.split(BLOCK)]
        found, here = (torch.cat(part) for part in zip(*best, strict=True))
        closeness, places = torch.cat([closeness, found], 1), torch.cat([places, seen + here], 1)
        closeness, order = closeness.topk(min(k, closeness.shape[1]), dim=1, largest=largest)
        places, seen = places.gather(1, order), seen + len(rows)
    if seen < k:
        raise ValueError(f"k must be at most the number of rows, got k={k} and {seen} rows; lower k or give more rows")
    return closeness, places


def _best(values: Tensor, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """Return the k best values of each row and their columns, as ``topk`` does, but faster.

    The best of each group of columns is found first: the k best values lie in the k groups with the best bests, because
    every other group has k values before its own.
    """
    rows, columns = values.shape
    groups = columns // GROUP
    if groups < 4 * k:
        return values.topk(k, dim=1, largest=largest)
    grouped = values[:, : groups * GROUP].view(rows, groups, GROUP)
    chosen = (grouped.amax(2) if largest else grouped.amin(2)).topk(k, dim=1, largest=largest).indices
    inside = (chosen[:, :, None] * GROUP + torch.arange(GROUP, device=values.device)).flatten(1)
    rest = torch.arange(groups * GROUP, columns, device=values.device).expand(rows, -1)
    candidates = torch.cat([inside, rest], 1)
    found, order = values.gather(1, candidates).topk(k, dim=1, largest=largest)
    return found, candidates.gather(1, order)


def _check_finite(what: str, rows: Tensor, before: int) -> None:
    finite = rows.isfinite().all(1)
    if not finite.all():
        place = before + int(finite.logical_not().nonzero()[0])
        raise ValueError(f"{what} {place} contains NaN or infinity; drop it")
