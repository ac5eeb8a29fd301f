"""Do the same samples lie near each other?"""

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

# Rows compared with all others at a time.
_QUERIES = 512

# A cosine distance below this may be that of equal directions.
_ROUNDING = 1e-14


class _OfNeighbours(FeaturesMetric):
    def min_rows(self, side: Operand, width: int) -> int:
        """More than a row has neighbours."""
        return 1 + int(self.options["k"])


@of_rows
def mutual_knn(x: Tensor, y: Tensor, *, k: Count = 10, distance: Near = "cosine") -> Tensor:
    """Mean share of its k nearest neighbours that a row has on both sides (Huh et al. 2024).

    Args:
        x: ``(n, dx)``.
        y: ``(n, dy)``.
        k: Number of neighbours, below n; the row itself is none.
        distance: What makes a neighbour near. Which of equally near rows counts is arbitrary.

    Returns:
        In [0, 1]; of independent sides about ``k / (n - 1)``.

    Raises:
        ValueError: k is not below n, or a row is 0 (cosine).

    Example:
        >>> import torch
        >>> x = torch.randn(30, 8)
        >>> round(mutual_knn(x, 3 * x).item(), 6)
        1.0
    """
    return _shared("mutual_knn", x, y, k, distance).sum((1, 2)).mean() / k


class MutualKNN(_OfNeighbours):
    """Streams ``mutual_knn``."""

    name = "mutual_knn"
    title = "mutual nearest neighbours"
    papers = (HUH_2024,)
    function = staticmethod(mutual_knn)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.invariances = _invariances(self.options["distance"])


@of_rows
def jaccard(x: Tensor, y: Tensor, *, k: Count = 10, distance: Near = "cosine") -> Tensor:
    """Mean Jaccard index of the sets of k nearest neighbours on both sides: shared over all.

    Args:
        x: ``(n, dx)``.
        y: ``(n, dy)``.
        k: As in ``mutual_knn``.
        distance: As in ``mutual_knn``.

    Returns:
        In [0, 1].

    Raises:
        ValueError: k is not below n, or a row is 0 (cosine).

    Example:
        >>> import torch
        >>> x = torch.randn(30, 8)
        >>> round(jaccard(x, 3 * x).item(), 6)
        1.0
    """
    shared = _shared("jaccard", x, y, k, distance).sum((1, 2))
    return (shared / (2 * k - shared)).mean()


class Jaccard(_OfNeighbours):
    """Streams ``jaccard``."""

    name = "jaccard"
    title = "Jaccard similarity of nearest neighbours"
    papers = (KLABUNDE_2023,)
    function = staticmethod(jaccard)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.invariances = _invariances(self.options["distance"])


@of_rows
def rank_similarity(x: Tensor, y: Tensor, *, k: Count = 10, distance: Near = "cosine") -> Tensor:
    """How alike the ranks of the shared neighbours are.

    (Wang et al. 2020, "Towards understanding the instability of network embedding".)
    Of row i, ``Σⱼ 2 / ((1 + |r - s|) (r + s))`` over the neighbours j shared, of ranks r and s, over the most that many
    can reach, ``Σ 1/m`` for m from 1 to their number; 0 if none is shared. Averaged over the rows.

    Args:
        x: ``(n, dx)``.
        y: ``(n, dy)``.
        k: As in ``mutual_knn``.
        distance: As in ``mutual_knn``.

    Returns:
        In [0, 1].

    Raises:
        ValueError: k is not below n, or a row is 0 (cosine).

    Example:
        >>> import torch
        >>> x = torch.randn(30, 8)
        >>> round(rank_similarity(x, 3 * x).item(), 6)
        1.0
    """
    shared = _shared("rank_similarity", x, y, k, distance)
    ranks = torch.arange(1, k + 1, device=x.device, dtype=x.dtype)
    alike = 2 / ((1 + (ranks[:, None] - ranks).abs()) * (ranks[:, None] + ranks))
    most = torch.cat([ranks.new_ones(1), (1 / ranks).cumsum(0)])  # of no neighbours any number will do: 0 / 1
    return ((shared * alike).sum((1, 2)) / most[shared.sum((1, 2)).long()]).mean()


class RankSimilarity(_OfNeighbours):
    """Streams ``rank_similarity``."""

    name = "rank_similarity"
    title = "rank similarity of nearest neighbours"
    papers = (KLABUNDE_2023,)
    function = staticmethod(rank_similarity)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.invariances = _invariances(self.options["distance"])


@of_rows
def second_order_cosine(x: Tensor, y: Tensor, *, k: Count = 10) -> Tensor:
    """Mean cosine of a row's cosine distances to its neighbours on either side (Hamilton et al. 2016).

    Of row i, the vectors on both sides of its cosine distances to the union of its k nearest neighbours on both.

    Args:
        x: ``(n, dx)``.
        y: ``(n, dy)``.
        k: As in ``mutual_knn``.

    Returns:
        In [0, 1].

    Raises:
        ValueError: k is not below n, a row is 0, or a row has the direction of all its neighbours.

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
        raise ValueError(f"{name}: row {row} has the direction of all its neighbours; leave out duplicates, or raise k")
    return ((to_x * to_y).sum(1) / lengths).mean()


class SecondOrderCosine(_OfNeighbours):
    """Streams ``second_order_cosine``."""

    name = "second_order_cosine"
    title = "second-order cosine similarity"
    papers = (KLABUNDE_2023,)
    function = staticmethod(second_order_cosine)
    invariances: Invariances = ("orthogonal", "scaling", "permutation")


@of_rows
def mrr(x: Tensor, y: Tensor, *, k: Count = 10) -> Tensor:
    """Mean reciprocal rank of row i of y among all rows of y by their cosine with row i of x; 0 beyond rank k.

    Rows as near as the right one rank before it, so that a collapsed side finds nothing.

    Args:
        x: ``(n, d)``, the queries.
        y: ``(n, d)``, in the same space (both relative to the same anchors, or x stitched to y).
        k: Below n.

    Returns:
        In [0, 1].

    Raises:
        ValueError: The widths differ, k is not below n, or a row is 0.

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
    """Streams ``mrr``."""

    name = "mrr"
    title = "mean reciprocal rank"
    papers = (MOSCHELLA_2023,)
    function = staticmethod(mrr)
    symmetric = False
    invariances: Invariances = ("scaling",)
    equal_widths = True


@of_rows
def paired_cosine(x: Tensor, y: Tensor) -> Tensor:
    """Mean cosine of row i of x and row i of y.

    Args:
        x: ``(n, d)``.
        y: ``(n, d)``, in the same space.

    Returns:
        In [-1, 1].

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
    """Streams ``paired_cosine``."""

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


def _shared(name: str, x: Tensor, y: Tensor, k: int, distance: Near) -> Tensor:
    """``(n, k, k)``: 1 where neighbour a of row i on one side is neighbour b on the other."""
    near_x, near_y = (_neighbours(name, side, rows, k, distance) for side, rows in (("x", x), ("y", y)))
    return (near_x[:, :, None] == near_y[:, None, :]).to(x)


def _neighbours(name: str, side: str, rows: Tensor, k: int, distance: Near) -> Tensor:
    """``(n, k)``: the indices of the nearest other rows, the nearest first."""
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
    """``(n, m)``: of row i from the rows ``others[i]``."""
    some = (
        torch.linalg.vecdot(directions[i, None], directions[others[i]]) for i in _chunks(len(others), others.device)
    )
    return 1 - torch.cat(list(some))


def _chunks(rows: int, device: torch.device) -> Iterator[Tensor]:
    yield from torch.arange(rows, device=device).split(_QUERIES)
