"""Nearest-neighbour metrics: whether the same samples are close to each other in both representations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from hf_stitch.metrics._options import Count
from hf_stitch.metrics._pairwise import directions
from hf_stitch.metrics._rows import check_widths, of_rows
from hf_stitch.metrics.base import FeaturesMetric, Invariances, MeanMetric, Operand
from hf_stitch.papers import HUH_2024, KLABUNDE_2023, MOSCHELLA_2023

Near = Literal["cosine", "euclidean"]

# Rows per chunk that is compared with all others.
_QUERIES = 512

# Cosine distances below this may be rounding of 0.
_ROUNDING = 1e-14


class _OfNeighbours(FeaturesMetric):
    def min_rows(self, side: Operand, width: int) -> int:
        """One more than k."""
        return 1 + int(self.options["k"])


@of_rows
def mutual_knn(x: Tensor, y: Tensor, *, k: Count = 10, distance: Near = "cosine") -> Tensor:
    """Mean share of the k nearest neighbours of a sample that both representations have in common (Huh et al. 2024).

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        k: Number of neighbours, from 1 to n - 1. A row is not its own neighbour.
        distance: Distance that ranks the neighbours, ``"cosine"`` or ``"euclidean"``. Ties are broken arbitrarily.

    Returns:
        Similarity in [0, 1], about ``k / (n - 1)`` for independent sides; a float for arrays, a 0-d float64 tensor for
        tensors.

    Raises:
        ValueError: k is n or more, or a row is 0 (cosine distance).

    Example:
        >>> import torch
        >>> x = torch.randn(30, 8)
        >>> round(mutual_knn(x, 3 * x).item(), 6)
        1.0
    """
    return shared_neighbours(x, y, k, distance).mean()


class MutualKNN(_OfNeighbours):
    """Streaming ``mutual_knn``."""

    name = "mutual_knn"
    title = "mutual nearest neighbours"
    papers = (HUH_2024,)
    function = staticmethod(mutual_knn)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.invariances = _invariances(self.options["distance"])


@of_rows
def jaccard(x: Tensor, y: Tensor, *, k: Count = 10, distance: Near = "cosine") -> Tensor:
    """Mean Jaccard index of the sets of k nearest neighbours in both representations (Klabunde et al. 2023).

    The Jaccard index of a sample is the number of shared neighbours divided by the size of the union.

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        k: Number of neighbours, from 1 to n - 1. A row is not its own neighbour.
        distance: Distance that ranks the neighbours, ``"cosine"`` or ``"euclidean"``. Ties are broken arbitrarily.

    Returns:
        Similarity in [0, 1]; a float for arrays, a 0-d float64 tensor for tensors.

    Raises:
        ValueError: k is n or more, or a row is 0 (cosine distance).

    Example:
        >>> import torch
        >>> x = torch.randn(30, 8)
        >>> round(jaccard(x, 3 * x).item(), 6)
        1.0
    """
    shared = _shared("jaccard", x, y, k, distance).sum((1, 2))
    return (shared / (2 * k - shared)).mean()


class Jaccard(_OfNeighbours):
    """Streaming ``jaccard``."""

    name = "jaccard"
    title = "Jaccard similarity of nearest neighbours"
    papers = (KLABUNDE_2023,)
    function = staticmethod(jaccard)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.invariances = _invariances(self.options["distance"])


@of_rows
def rank_similarity(x: Tensor, y: Tensor, *, k: Count = 10, distance: Near = "cosine") -> Tensor:
    """Mean agreement of the ranks of the shared nearest neighbours (Wang et al. 2020).

    From "Towards understanding the instability of network embedding". The score of a sample is
    ``Σⱼ 2 / ((1 + |r - s|) (r + s))`` over its m shared neighbours j, where r and s are the ranks of j on the two
    sides, divided by the maximum ``Σ 1/i`` for i from 1 to m. It is 0 if no neighbour is shared.

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        k: Number of neighbours, from 1 to n - 1. A row is not its own neighbour.
        distance: Distance that ranks the neighbours, ``"cosine"`` or ``"euclidean"``. Ties are broken arbitrarily.

    Returns:
        Similarity in [0, 1]; a float for arrays, a 0-d float64 tensor for tensors.

    Raises:
        ValueError: k is n or more, or a row is 0 (cosine distance).

    Example:
        >>> import torch
        >>> x = torch.randn(30, 8)
        >>> round(rank_similarity(x, 3 * x).item(), 6)
        1.0
    """
    shared = _shared("rank_similarity", x, y, k, distance)
    ranks = torch.arange(1, k + 1, device=x.device, dtype=x.dtype)
    agreement = 2 / ((1 + (ranks[:, None] - ranks).abs()) * (ranks[:, None] + ranks))
    most = torch.cat([ranks.new_ones(1), (1 / ranks).cumsum(0)])  # no shared neighbour: 0 / 1
    return ((shared * agreement).sum((1, 2)) / most[shared.sum((1, 2)).long()]).mean()


class RankSimilarity(_OfNeighbours):
    """Streaming ``rank_similarity``."""

    name = "rank_similarity"
    title = "rank similarity of nearest neighbours"
    papers = (KLABUNDE_2023,)
    function = staticmethod(rank_similarity)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.invariances = _invariances(self.options["distance"])


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
        ValueError: k is n or more, a row is 0, or a row has the same direction as all its neighbours.

    Example:
        >>> import torch
        >>> x = torch.randn(30, 8)
        >>> round(second_order_cosine(x, 3 * x).item(), 6)
        1.0
    """
    name = "second_order_cosine"
    near_x, near_y = (_neighbours(name, side, rows, k, "cosine") for side, rows in (("x", x), ("y", y)))
    once = torch.cat([torch.ones_like(near_x), (near_y[:, :, None] != near_x[:, None]).all(2)], 1)
    union = torch.cat([near_x, near_y], 1)
    to_x, to_y = (once * _cosine_distances(directions(name, s, rows), union) for s, rows in (("x", x), ("y", y)))
    lengths = to_x.norm(dim=1) * to_y.norm(dim=1)
    near_zero = (to_x.norm(dim=1) <= _ROUNDING) | (to_y.norm(dim=1) <= _ROUNDING)
    if near_zero.any():
        row = int(near_zero.nonzero()[0])
        raise ValueError(f"{name}: row {row} has the same direction as all its neighbours; drop duplicates, or raise k")
    return ((to_x * to_y).sum(1) / lengths).mean()


class SecondOrderCosine(_OfNeighbours):
    """Streaming ``second_order_cosine``."""

    name = "second_order_cosine"
    title = "second-order cosine similarity"
    papers = (KLABUNDE_2023,)
    function = staticmethod(second_order_cosine)
    invariances: Invariances = ("orthogonal", "scaling", "permutation")


@of_rows
def mrr(x: Tensor, y: Tensor, *, k: Count = 10) -> Tensor:
    """Mean reciprocal rank of row i of ``y`` among all rows of ``y``, ranked by cosine similarity to row i of ``x``.

    Ranks above k count as 0. Rows of ``y`` that are as close as row i rank before it, so that collapsed activations
    score 0 rather than 1. Moschella et al. (2023) use this metric for relative representations.

    Args:
        x: Queries of shape ``(n, d)``, floating point.
        y: Candidates of shape ``(n, d)``, in the same space: for example both relative to the same anchors, or ``x``
            stitched to ``y``.
        k: Largest rank that counts, from 1 to n - 1.

    Returns:
        Similarity in [0, 1]; a float for arrays, a 0-d float64 tensor for tensors.

    Raises:
        ValueError: The widths differ, k is n or more, or a row is 0.

    Example:
        >>> import torch
        >>> x = torch.randn(30, 8)
        >>> mrr(x, 3 * x).item()
        1.0
    """
    check_widths("mrr", x, y)
    _check_k("mrr", k, len(x))
    queries, found = directions("mrr", "x", x), directions("mrr", "y", y)
    ranks = []
    for rows in _chunks(len(x), x.device):
        cosines = queries[rows] @ found.T
        ranks.append((cosines >= cosines.gather(1, rows[:, None])).sum(1))
    rank = torch.cat(ranks).to(x)
    return torch.where(rank <= k, 1 / rank, 0).mean()


class MRR(_OfNeighbours):
    """Streaming ``mrr``."""

    name = "mrr"
    title = "mean reciprocal rank"
    papers = (MOSCHELLA_2023,)
    function = staticmethod(mrr)
    symmetric = False
    invariances: Invariances = ("scaling",)
    equal_widths = True


@of_rows
def paired_cosine(x: Tensor, y: Tensor) -> Tensor:
    """Mean cosine similarity between row i of ``x`` and row i of ``y`` (Moschella et al. 2023).

    Args:
        x: Activations of shape ``(n, d)``, floating point.
        y: Activations of shape ``(n, d)``, in the same space as ``x``.

    Returns:
        Similarity in [-1, 1]; a float for arrays, a 0-d float64 tensor for tensors.

    Raises:
        ValueError: The widths differ, or a row is 0.

    Example:
        >>> import torch
        >>> x = torch.randn(30, 8)
        >>> round(paired_cosine(x, -x).item(), 6)
        -1.0
    """
    return _cosines(x, y).mean()


def _cosines(x: Tensor, y: Tensor) -> Tensor:
    check_widths("paired_cosine", x, y)
    return (directions("paired_cosine", "x", x) * directions("paired_cosine", "y", y)).sum(1)


class PairedCosine(MeanMetric):
    """Streaming ``paired_cosine``; it keeps only a sum."""

    name = "paired_cosine"
    title = "cosine of paired rows"
    papers = (MOSCHELLA_2023,)
    function = staticmethod(paired_cosine)
    values = staticmethod(_cosines)
    statistic = "features"
    range = (-1.0, 1.0)
    invariances: Invariances = ("scaling",)
    differentiable = True
    equal_widths = True


def _invariances(distance: Near) -> Invariances:
    kept: Invariances = ("orthogonal", "scaling", "permutation")
    return kept if distance == "cosine" else (*kept, "translation")


def _check_k(name: str, k: int, rows: int) -> None:
    if k >= rows:
        raise ValueError(
            f"{name}: k must be below the number of rows, got k={k} and {rows} rows; lower k or give more rows"
        )


def shared_neighbours(x: Tensor, y: Tensor, k: int, distance: Near) -> Tensor:
    """Return for every sample the share of its k nearest neighbours that both sides have in common."""
    return _shared("mutual_knn", x, y, k, distance).sum((1, 2)) / k


def _shared(name: str, x: Tensor, y: Tensor, k: int, distance: Near) -> Tensor:
    """``(n, k, k)``: 1 where neighbour a of row i on one side is its neighbour b on the other."""
    near_x, near_y = (_neighbours(name, side, rows, k, distance) for side, rows in (("x", x), ("y", y)))
    return (near_x[:, :, None] == near_y[:, None, :]).to(x)


def _neighbours(name: str, side: str, rows: Tensor, k: int, distance: Near) -> Tensor:
    """``(n, k)``: indices of the nearest other rows, nearest first."""
    _check_k(name, k, len(rows))
    rows = directions(name, side, rows, distance)
    found = []
    for some in _chunks(len(rows), rows.device):
        if distance == "cosine":
            closeness = rows[some] @ rows.T
        else:
            closeness = -torch.cdist(rows[some], rows, compute_mode="donot_use_mm_for_euclid_dist")
        closeness.scatter_(1, some[:, None], -torch.inf)
        found.append(closeness.topk(k).indices)
    return torch.cat(found)


def _cosine_distances(directions: Tensor, others: Tensor) -> Tensor:
    """``(n, m)``: distances from row i to the rows ``others[i]``."""
    some = (
        torch.linalg.vecdot(directions[i, None], directions[others[i]]) for i in _chunks(len(others), others.device)
    )
    return 1 - torch.cat(list(some))


def _chunks(rows: int, device: torch.device) -> Iterator[Tensor]:
    yield from torch.arange(rows, device=device).split(_QUERIES)
