"""Retrieval of words in another space: Jaccard index, mean reciprocal rank and cosine (Moschella et al. 2023)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hf_stitch_embeddings import exact_search
from hf_stitch_embeddings.retrieval import csls_shift, recall_at
from torch import Tensor

from hf_stitch.metrics import paired_cosine


@dataclass(frozen=True)
class RetrievalScores:
    """How well words are found in the target space from their source vectors.

    Attributes:
        jaccard: k -> mean Jaccard index of two sets of words: the k nearest target vectors to the source vector of a
            word, and the k nearest to its target vector. The word itself is in the second set.
        neighbours: k -> the same of the k nearest *other* words.
        mrr: k -> mean reciprocal rank of the word itself, 0 beyond k.
        cosine: Mean cosine of the source vector and the target vector of a word.
        n: Number of words that were searched.
        among: Number of words among which they were searched.
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

    Both sides are in one space: relative to the same anchors, or the source mapped by a stitch. The metrics ``jaccard``
    of hf-stitch compares neighbours within each space instead, and needs no common one; ``mrr`` and ``paired_cosine``
    are the same as here, for all words.

    Args:
        source: ``(n, d)``, floating point.
        target: ``(n, d)``: the vectors of the same words in the other space.
        k: Numbers of neighbours.
        words: The n words. ``None`` (default): words are named by their places.
        exclude: Words (places, without ``words``) that are left out altogether, for example the anchors.
        queries: Places of the rows that are searched, int64. ``None`` (default): all.
        csls: Whether to rank by cross-domain similarity local scaling (Lample et al. 2018, eq. 3) instead of cosine:
            ``2 cos(x, y) - r(x) - r(y)``, with the mean cosines r to the 10 nearest vectors of the other side.

    Returns:
        The scores.

    Raises:
        ValueError: The shapes differ, a row is 0, k is as large as the number of words, or a word is unknown.

    Example:
        >>> x = torch.randn(50, 8)
        >>> scores = retrieval_scores(3 * x, x, exclude=[0, 1])
        >>> scores.mrr, scores.jaccard, scores.n
        ({5: 1.0, 10: 1.0}, {5: 1.0, 10: 1.0}, 48)
    """
    if source.shape != target.shape or source.ndim != 2 or not source.is_floating_point():
        raise ValueError(
            f"source and target must be floating-point of one shape (n, d), got {tuple(source.shape)} and "
            f"{tuple(target.shape)}"
        )
    kept = _kept(len(source), words, exclude)
    searched = kept if queries is None else kept[torch.isin(kept, queries)]
    counts = sorted({k} if isinstance(k, int) else set(k))
    most = counts[-1] + 1
    if counts[0] < 1 or most > len(kept) or not len(searched):
        raise ValueError(f"k must be from 1 to {len(kept) - 1}, one less than the number of words, got {k}")
    x, y = source[searched], unit_rows(target[kept], "target")
    own = torch.searchsorted(kept, searched)
    shift = csls_shift(y.numpy(), unit_rows(source[kept], "source").numpy()) if csls else None
    crossed, close = exact_search(unit_rows(x, "source"), y, most, shift=shift)
    within = exact_search(y[own], y, most)[0]
    it = own.numpy()[:, None]
    # as close ones precede the word itself; if it is not found, none is as close as infinity
    itself = np.where(crossed == it, close, np.inf).min(1, keepdims=True)
    ranks = np.where(np.isfinite(itself[:, 0]), (close >= itself).sum(1), np.inf)
    jaccard, neighbours, mrr = {}, {}, {}
    for each in counts:
        jaccard[each] = _jaccard(crossed[:, :each], within[:, :each])
        neighbours[each] = _jaccard(_without(crossed, it, each), _without(within, it, each))
        mrr[each] = float(np.where(ranks <= each, 1 / ranks, 0).mean())
    cosine = float(paired_cosine(x, target[searched]))
    return RetrievalScores(jaccard, neighbours, mrr, cosine, len(searched), len(kept))


@torch.no_grad()
def nearest_words(source: Tensor, target: Tensor, k: int, *, csls: bool = False, among: Tensor | None = None) -> Tensor:
    """Find the k nearest target rows of every source row; CSLS takes neighbours of target rows from ``among``."""
    x, y = unit_rows(source, "source"), unit_rows(target, "target")
    shift = csls_shift(y.numpy(), (x if among is None else unit_rows(among, "source")).numpy()) if csls else None
    return torch.from_numpy(exact_search(x, y, min(k, len(y)), shift=shift)[0])


def unit_rows(rows: Tensor, what: str) -> Tensor:
    """Divide rows by their norms."""
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    norms = rows.norm(dim=1, keepdim=True)
    bad = ~(norms > 0) | ~norms.isfinite()
    if bool(bad.any()):
        raise ValueError(f"{what}: row {int(bad[:, 0].nonzero()[0])} is 0, NaN or infinite and has no direction")
    return rows / norms


def _kept(n: int, words: Sequence[str] | None, exclude: Collection[str | int]) -> Tensor:
    names = range(n) if words is None else words
    if len(names) != n:
        raise ValueError(f"there are {len(names)} words and {n} rows")
    left_out = set(exclude)
    if unknown := left_out.difference(names):
        raise ValueError(
            f"{len(unknown)} words to exclude are not among the words, for example {next(iter(unknown))!r}"
        )
    return torch.tensor([place for place, name in enumerate(names) if name not in left_out], dtype=torch.int64)


def _without(found: np.ndarray, own: np.ndarray, k: int) -> np.ndarray:
    """The k nearest other rows, of k + 1 or more."""
    last = np.argsort(found == own, axis=1, kind="stable")
    return np.take_along_axis(found, last, 1)[:, :k]


def _jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Mean Jaccard index of two sets of k, from the share r of the one that is in the other: r / (2 - r)."""
    shared = recall_at(a, b)
    return float((shared / (2 - shared)).mean())
