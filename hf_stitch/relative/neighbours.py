"""Nearest-neighbour search over rows in chunks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from hf_stitch.options import checked
from hf_stitch.relative.similarities import Cosine, Euclidean, Similarity, computable

Near = Literal["cosine", "euclidean"]
BLOCK, CHUNK = 1024, 2048
"""Number of queries, and of in-memory rows, compared at a time, so that their similarities stay in the CPU cache."""
WORD = 8
"""Bytes of an integer, which is 0 if eight values of a mask are false."""


@torch.no_grad()
@checked
def nearest(
    queries: Tensor, rows: Tensor | Iterable[Tensor], k: int = 10, distance: Near = "cosine"
) -> tuple[Tensor, Tensor]:
    """Find the k nearest rows of each query, with all rows in memory or in chunks.

    With chunks, for example from :meth:`RelativeProjection.stream`, only the queries, one chunk and their similarities
    are in memory. If the rows are the queries, each pair is computed once.

    Args:
        queries: ``(m, d)``, floating point.
        rows: ``(n, d)``, or matrices ``(n₁, d)``, ``(n₂, d)``, …, read once. Pass the ``queries`` tensor again to
            find the neighbours of each row among all rows.
        k: Number of neighbours, at most the total number of rows. If a query is among the rows, it counts as its own
            neighbour.
        distance: ``"cosine"`` or ``"euclidean"``. Ties are broken arbitrarily.

    Returns:
        ``(m, k)`` cosines or distances, nearest first, and ``(m, k)`` int64 indices of the rows over all chunks.

    Example:
        >>> rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> nearest(torch.tensor([[2.0, 0.1]]), rows, k=2)[1]
        tensor([[0, 2]])
        >>> nearest(rows, rows, k=2)[1]
        tensor([[0, 2],
                [1, 2],
                [2, 0]])
    """
    if k < 1 or queries.ndim != 2:
        raise ValueError(f"nearest requires queries of shape (m, d) and k >= 1, got {tuple(queries.shape)} and k={k}")
    _check_finite("query", queries, 0)
    similarity = Cosine() if distance == "cosine" else Euclidean()
    neighbours = _Neighbours(len(queries), k, computable(queries), largest=distance == "cosine")
    if rows is queries:
        count = _search_queries(computable(queries), similarity, neighbours)
    else:
        count = _search_rows(computable(queries), rows, similarity, neighbours)
    if count < k:
        raise ValueError(f"k must be at most the number of rows, got k={k} and {count} rows; lower k or pass more rows")
    return neighbours.closeness, neighbours.indices


def _search_rows(
    queries: Tensor, rows: Tensor | Iterable[Tensor], similarity: Similarity, neighbours: _Neighbours
) -> int:
    """Compare all queries with all rows, and return the number of rows."""
    count = 0
    for chunk in rows.split(CHUNK) if isinstance(rows, Tensor) else rows:
        if chunk.shape[1:] != queries.shape[1:]:
            raise ValueError(f"rows and queries must have equal widths, got {chunk.shape[-1]} and {queries.shape[1]}")
        _check_finite("row", chunk, count)
        similarities = similarity.against(chunk.to(queries))
        for start in range(0, len(queries), BLOCK):
            neighbours.update(start, similarities(queries[start : start + BLOCK]), count)
        count += len(chunk)
    return count


def _search_queries(rows: Tensor, similarity: Similarity, neighbours: _Neighbours) -> int:
    """Compare all rows with each other, each pair of blocks once, and return the number of rows."""
    for first in range(0, len(rows), CHUNK):
        similarities = similarity.against(rows[first : first + CHUNK])
        for start in range(first, len(rows), BLOCK):
            values = similarities(rows[start : start + BLOCK])
            neighbours.update(start, values, first)
            if start >= first + CHUNK:  # within the chunk, both orders are compared
                neighbours.update(first, values.T, start)
    return len(rows)


class _Neighbours:
    """Nearest rows of each query among the rows compared so far."""

    def __init__(self, count: int, k: int, like: Tensor, *, largest: bool) -> None:
        self.k, self.largest = k, largest
        self.worst = -math.inf if largest else math.inf
        self.closeness = like.new_full((count, k), self.worst)
        self.indices = torch.zeros(count, k, dtype=torch.int64, device=like.device)

    def update(self, start: int, values: Tensor, offset: int) -> None:
        """Compare queries with more rows; most rows are farther than the current k-th neighbour, and are skipped."""
        queries = slice(start, start + len(values))
        closeness, neighbour_rows = self.closeness[queries], self.indices[queries]
        if bool((closeness[:, -1] == self.worst).any()):  # fewer than k so far
            best, indices = values.topk(min(self.k, values.shape[1]), dim=1, largest=self.largest)
            indices += offset
        else:
            bound = closeness[:, -1:]
            query, row = self._nearer(values, bound)
            if not len(query):
                return
            count = query.bincount(minlength=len(values))
            rank = torch.arange(len(query), device=query.device) - (count.cumsum(0) - count)[query]
            best = values.new_full((len(values), int(count.max())), self.worst)
            indices = torch.zeros_like(best, dtype=torch.int64)
            best[query, rank], indices[query, rank] = values[query, row], row + offset
        best, indices = torch.cat([closeness, best], 1), torch.cat([neighbour_rows, indices], 1)
        self.closeness[queries], order = best.topk(self.k, dim=1, largest=self.largest)
        self.indices[queries] = indices.gather(1, order)

    def _nearer(self, values: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
        """Return the query and row indices, ordered by query, of values nearer than the bound of the query."""
        if values.is_contiguous():
            return _true(values > bound if self.largest else values < bound)
        row, query = _true(values.T > bound.T if self.largest else values.T < bound.T)
        query, order = query.sort(stable=True)
        return query, row[order]


def _true(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return row and column indices of the true values of a sparse mask: ``nonzero``, eight values at a time."""
    flat = mask.flatten()
    whole_words = len(flat) // WORD * WORD
    words = flat[:whole_words].view(torch.int64).nonzero()[:, 0]
    word, byte = flat[:whole_words].view(-1, WORD)[words].nonzero(as_tuple=True)
    positions = torch.cat([words[word] * WORD + byte, whole_words + flat[whole_words:].nonzero()[:, 0]])
    return positions // mask.shape[1], positions % mask.shape[1]


def _check_finite(label: str, rows: Tensor, offset: int) -> None:
    is_finite = rows.isfinite().all(1)
    if not is_finite.all():
        index = offset + int(is_finite.logical_not().nonzero()[0])
        raise ValueError(f"{label} {index} contains NaN or infinity; drop it")
