"""Scores of word retrieval across spaces: Jaccard index, mean reciprocal rank and cosine (Moschella et al. 2023)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hf_stitch_embeddings import exact_search
from hf_stitch_embeddings.retrieval import csls_shift
from torch import Tensor

from hf_stitch.metrics import paired_cosine


@dataclass(frozen=True)
class RetrievalScores:
    """Scores of the retrieval of words in the target space by their source vectors.

    Attributes:
        jaccard: k -> mean Jaccard index of two sets of words: the k nearest target vectors to the source vector of a
            word, and the k nearest to its target vector. The second set includes the word.
        neighbours: k -> mean Jaccard index of the k nearest *other* words.
        mrr: k -> mean reciprocal rank of the query word, 0 beyond k.
        cosine: Mean cosine of the source vector and the target vector of a word.
        n: Number of query words.
        among: Number of searched words.
    """

    jaccard: dict[int, float]
    neighbours: dict[int, float]
    mrr: dict[int, float]
    cosine: float
    n: int
    among: int


@torch.no_grad()
def retrieval_scores(
    source: Tensor,
    target: Tensor,
    k: int | Sequence[int] = (5, 10),
    *,
    words: Sequence[str] | None = None,
    exclude: Collection[str | int] = (),
    queries: Tensor | None = None,
    csls: bool = False,
) -> RetrievalScores:
    """Search every word in the target space by its source vector (Moschella et al. 2023, section 4).

    Both sides must be in one space: relative to the same anchors, or with the source mapped by a stitch. The metric
    ``jaccard`` of hf-stitch instead compares neighbours within each space, without a common space. Over all words,
    ``mrr`` and ``paired_cosine`` of hf-stitch equal the scores here.

    Args:
        source: ``(n, d)`` source vectors, floating point.
        target: ``(n, d)`` target vectors of the same words.
        k: Numbers of neighbours.
        words: The n words. ``None`` (default): words are identified by index.
        exclude: Words (indices without ``words``) to ignore completely, for example the anchors.
        queries: Indices of the query rows, int64. ``None`` (default): all.
        csls: Whether to rank by cross-domain similarity local scaling (Lample et al. 2018, eq. 3) instead of cosine:
            ``2 cos(x, y) - r(x) - r(y)``, with the mean cosines r to the 10 nearest vectors of the opposite side.

    Returns:
        The scores.

    Raises:
        ValueError: If the shapes differ, a row is 0, k is not below the number of words, or a word is unknown.

    Example:
        >>> x = torch.randn(50, 8)
        >>> scores = retrieval_scores(3 * x, x, exclude=[0, 1])
        >>> scores.mrr, scores.jaccard, scores.n
        ({5: 1.0, 10: 1.0}, {5: 1.0, 10: 1.0}, 48)
    """
    if source.shape != target.shape or source.ndim != 2 or not source.is_floating_point():
        raise ValueError(
            f"source and target must be floating point with the same shape (n, d), got {tuple(source.shape)} and "
            f"{tuple(target.shape)}"
        )
    remaining = _remaining(len(source), words, exclude)
    query_indices = remaining if queries is None else remaining[torch.isin(remaining, queries)]
    counts = sorted({k} if isinstance(k, int) else set(k))
    depth = counts[-1] + 1
    if counts[0] < 1 or depth > len(remaining) or not len(query_indices):
        raise ValueError(f"k must be from 1 to {len(remaining) - 1} (the number of words minus 1), got {k}")
    x, y = source[query_indices], unit_rows(target[remaining], "target")
    positions = torch.searchsorted(remaining, query_indices)
    shift = csls_shift(y.numpy(), unit_rows(source[remaining], "source").numpy()) if csls else None
    from_source, similarities = exact_search(unit_rows(x, "source"), y, depth, shift=shift)
    from_target = exact_search(y[positions], y, depth)[0]
    query_words = positions.numpy()[:, None]
    # tied words precede the query word; infinity marks words that are not retrieved
    own_similarity = np.where(from_source == query_words, similarities, np.inf).min(1, keepdims=True)
    ranks = np.where(np.isfinite(own_similarity[:, 0]), (similarities >= own_similarity).sum(1), np.inf)
    jaccard, neighbours, mrr = {}, {}, {}
    for size in counts:
        jaccard[size] = _jaccard(from_source[:, :size], from_target[:, :size])
        neighbours[size] = _jaccard(*(_drop_query(rows, query_words, size) for rows in (from_source, from_target)))
        mrr[size] = float(np.where(ranks <= size, 1 / ranks, 0).mean())
    cosine = float(paired_cosine(x, target[query_indices]))
    return RetrievalScores(jaccard, neighbours, mrr, cosine, len(query_indices), len(remaining))


@torch.no_grad()
def nearest_words(source: Tensor, target: Tensor, k: int, *, csls: bool = False, among: Tensor | None = None) -> Tensor:
    """Return the k nearest target rows of each source row; CSLS uses neighbours of target rows in ``among``."""
    x, y = unit_rows(source, "source"), unit_rows(target, "target")
    shift = csls_shift(y.numpy(), (x if among is None else unit_rows(among, "source")).numpy()) if csls else None
    return torch.from_numpy(exact_search(x, y, min(k, len(y)), shift=shift)[0])


def unit_rows(rows: Tensor, name: str) -> Tensor:
    """Divide rows by their norms."""
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    norms = rows.norm(dim=1, keepdim=True)
    bad = ~(norms > 0) | ~norms.isfinite()
    if bool(bad.any()):
        raise ValueError(f"rows of {name} must be finite and non-zero; check row {int(bad[:, 0].nonzero()[0])}")
    return rows / norms


def _remaining(n: int, words: Sequence[str] | None, exclude: Collection[str | int]) -> Tensor:
    names = range(n) if words is None else words
    if len(names) != n:
        raise ValueError(f"words must have one word per row ({n}), got {len(names)}")
    excluded = set(exclude)
    if unknown := excluded.difference(names):
        raise ValueError(
            f"exclude must contain known words, got {len(unknown)} unknown ones, for example {next(iter(unknown))!r}"
        )
    return torch.tensor([index for index, name in enumerate(names) if name not in excluded], dtype=torch.int64)


def _drop_query(nearest: np.ndarray, query_words: np.ndarray, k: int) -> np.ndarray:
    """Return the k nearest rows other than the query word, from k + 1 or more rows."""
    order = np.argsort(nearest == query_words, axis=1, kind="stable")
    return np.take_along_axis(nearest, order, 1)[:, :k]


def _jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Return the mean Jaccard index r / (2 - r) of two sets of k, from the shared proportion r."""
    shared = np.array([len(set(x) & set(y)) / len(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)])
    return float((shared / (2 - shared)).mean())
