"""Retrieval of words in another space: Jaccard index, mean reciprocal rank and cosine (Moschella et al. 2023)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_stitch.metrics import paired_cosine

QUERIES = 512
"""Rows that are compared with all others at once."""
LOCAL = 10
"""Number of neighbours whose mean similarity CSLS subtracts, as in the paper."""


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
    x, y = unit_rows(source[searched], "source"), unit_rows(target[kept], "target")
    own = torch.searchsorted(kept, searched)
    local = _local(y, unit_rows(source[kept], "source")) if csls else None
    ranks, crossed = _search(x, y, own, most, local)
    _, within = _search(y[own], y, own, most, None)
    jaccard, neighbours, mrr = {}, {}, {}
    for each in counts:
        jaccard[each] = _jaccard(crossed[:, :each], within[:, :each])
        neighbours[each] = _jaccard(_without(crossed, own, each), _without(within, own, each))
        mrr[each] = torch.where(ranks <= each, 1 / ranks.double(), 0).mean().item()
    cosine = float(paired_cosine(source[searched], target[searched]))
    return RetrievalScores(jaccard, neighbours, mrr, cosine, len(searched), len(kept))


@torch.no_grad()
def nearest_words(source: Tensor, target: Tensor, k: int, *, csls: bool = False, among: Tensor | None = None) -> Tensor:
    """Find the k nearest target rows of every source row.

    Args:
        source: ``(n, d)``, floating point.
        target: ``(m, d)``.
        k: Number of neighbours.
        csls: As for :func:`retrieval_scores`.
        among: ``(l, d)``: all source vectors, from which CSLS takes the neighbours of target rows. ``None`` (default):
            ``source``.

    Returns:
        Tensor (n, k) int64: rows of the target, nearest first.
    """
    x, y = unit_rows(source, "source"), unit_rows(target, "target")
    local = _local(y, x if among is None else unit_rows(among, "source")) if csls else None
    return torch.cat([_similarities(part, y, local).topk(min(k, len(y))).indices for part in x.split(QUERIES)])


def unit_rows(rows: Tensor, what: str) -> Tensor:
    """Divide rows by their norms.

    Args:
        rows: ``(n, d)``, floating point.
        what: Name of the rows in the message.

    Returns:
        Tensor (n, d), float32 or wider.

    Raises:
        ValueError: A row is 0, or not finite.
    """
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


def _similarities(x: Tensor, y: Tensor, local: Tensor | None) -> Tensor:
    """Cosines, or CSLS but for what is the same for all y."""
    return x @ y.T if local is None else 2 * (x @ y.T) - local


def _local(y: Tensor, x: Tensor) -> Tensor:
    """Mean cosine of every row of y to its nearest rows of x."""
    return torch.cat([(part @ x.T).topk(min(LOCAL, len(x))).values.mean(1) for part in y.split(QUERIES)])


def _search(x: Tensor, y: Tensor, own: Tensor, k: int, local: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rank of the own row of y for every row of x, which those as close precede, and the k nearest rows of y."""
    ranks, found = [], []
    for part, places in zip(x.split(QUERIES), own.split(QUERIES), strict=True):
        close = _similarities(part, y, local)
        ranks.append((close >= close.gather(1, places[:, None])).sum(1))
        found.append(close.topk(k).indices)
    return torch.cat(ranks), torch.cat(found)


def _without(found: Tensor, own: Tensor, k: int) -> Tensor:
    """The k nearest other rows, of k + 1 or more."""
    last = torch.arange(found.shape[1]) + found.shape[1] * (found == own[:, None])
    return found.gather(1, last.argsort(1))[:, :k]


def _jaccard(a: Tensor, b: Tensor) -> float:
    shared = (a[:, :, None] == b[:, None]).sum((1, 2)).double()
    return (shared / (a.shape[1] + b.shape[1] - shared)).mean().item()
