"""Nearest-neighbour search over rows that are read in chunks."""

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
"""Queries that are compared at a time, and rows if all are in memory, so that their similarities stay in the cache."""
WORD = 8
"""Bytes of an integer, which is 0 if eight values of a mask are false."""


@torch.no_grad()
@checked
def nearest(
    queries: Tensor, rows: Tensor | Iterable[Tensor], k: int = 10, distance: Near = "cosine"
) -> tuple[Tensor, Tensor]:
    """Find the k nearest rows of each query, in memory or reading the rows in chunks.

    Of rows in chunks, only the queries, one chunk and their similarities are in memory. The chunks may come from
    :meth:`RelativeProjection.stream`. If the rows are the queries, each similarity is computed once for both.

    Args:
        queries: ``(m, d)``, floating point.
        rows: ``(n, d)``, or matrices ``(n₁, d)``, ``(n₂, d)``, …, read once; pass the same tensor as ``queries`` for
            the neighbours of each row among all.
        k: Number of neighbours, at most the total number of rows. A query that is among the rows is its own neighbour.
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
        raise ValueError(f"nearest needs queries of shape (m, d) and k >= 1, got {tuple(queries.shape)} and k={k}")
    _check_finite("query", queries, 0)
    similarity = Cosine() if distance == "cosine" else Euclidean()
    found = _Found(len(queries), k, computable(queries), largest=distance == "cosine")
    if rows is queries:
        seen = _among_themselves(computable(queries), similarity, found)
    else:
        seen = _among_others(computable(queries), rows, similarity, found)
    if seen < k:
        raise ValueError(f"k must be at most the number of rows, got k={k} and {seen} rows; lower k or give more rows")
    return found.closeness, found.places


def _among_others(queries: Tensor, rows: Tensor | Iterable[Tensor], similarity: Similarity, found: _Found) -> int:
    """Compare all queries with all rows, and return the number of rows."""
    seen = 0
    for some in rows.split(CHUNK) if isinstance(rows, Tensor) else rows:
        if some.shape[1:] != queries.shape[1:]:
            raise ValueError(
                f"rows and queries must be equally wide, got widths {some.shape[-1]} and {queries.shape[1]}"
            )
        _check_finite("row", some, seen)
        compared = similarity.against(some.to(queries))
        for start in range(0, len(queries), BLOCK):
            found.update(start, compared(queries[start : start + BLOCK]), seen)
        seen += len(some)
    return seen


def _among_themselves(rows: Tensor, similarity: Similarity, found: _Found) -> int:
    """Compare all rows with each other, each pair of blocks once, and return the number of rows."""
    for first in range(0, len(rows), CHUNK):
        compared = similarity.against(rows[first : first + CHUNK])
        for start in range(first, len(rows), BLOCK):
            values = compared(rows[start : start + BLOCK])
            found.update(start, values, first)
            if start >= first + CHUNK:  # within the chunk, both orders are compared
                found.update(first, values.T, start)
    return len(rows)


class _Found:
    """The nearest rows so far."""

    def __init__(self, count: int, k: int, like: Tensor, *, largest: bool) -> None:
        self.k, self.largest = k, largest
        self.worst = -math.inf if largest else math.inf
        self.closeness = like.new_full((count, k), self.worst)
        self.places = torch.zeros(count, k, dtype=torch.int64, device=like.device)

    def update(self, start: int, values: Tensor, first: int) -> None:
        """Compare queries with further rows.

        Most are further than the k-th so far, and are skipped.
        """
        part = slice(start, start + len(values))
        closeness, places = self.closeness[part], self.places[part]
        if bool((closeness[:, -1] == self.worst).any()):  # fewer than k so far
            best, here = values.topk(min(self.k, values.shape[1]), dim=1, largest=self.largest)
            here += first
        else:
            bound = closeness[:, -1:]
            query, row = self._nearer(values, bound)
            if not len(query):
                return
            count = query.bincount(minlength=len(values))
            place = torch.arange(len(query), device=query.device) - (count.cumsum(0) - count)[query]
            best = values.new_full((len(values), int(count.max())), self.worst)
            here = torch.zeros_like(best, dtype=torch.int64)
            best[query, place], here[query, place] = values[query, row], row + first
        best, here = torch.cat([closeness, best], 1), torch.cat([places, here], 1)
        self.closeness[part], order = best.topk(self.k, dim=1, largest=self.largest)
        self.places[part] = here.gather(1, order)

    def _nearer(self, values: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries and rows, ordered by query, of values that are nearer than a bound of the query."""
        if values.is_contiguous():
            return _true(values > bound if self.largest else values < bound)
        row, query = _true(values.T > bound.T if self.largest else values.T < bound.T)
        query, order = query.sort(stable=True)
        return query, row[order]


def _true(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows and columns of the few true values of a mask, as ``nonzero`` does, but eight at a time."""
    flat = mask.flatten()
    whole = len(flat) // WORD * WORD
    words = flat[:whole].view(torch.int64).nonzero()[:, 0]
    word, inside = flat[:whole].view(-1, WORD)[words].nonzero(as_tuple=True)
    places = torch.cat([words[word] * WORD + inside, whole + flat[whole:].nonzero()[:, 0]])
    return places // mask.shape[1], places % mask.shape[1]


def _check_finite(what: str, rows: Tensor, before: int) -> None:
    finite = rows.isfinite().all(1)
    if not finite.all():
        place = before + int(finite.logical_not().nonzero()[0])
        raise ValueError(f"{what} {place} contains NaN or infinity; drop it")
