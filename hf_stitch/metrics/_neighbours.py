"""Nearest-neighbour metrics: whether the same samples are close to each other in both representations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from hf_stitch.metrics._catalogue import built_in
from hf_stitch.metrics._rows import check_widths, directions, of_rows
from hf_stitch.metrics.base import FeaturesMetric, Invariances, MeanMetric, Operand
from hf_stitch.options import Count, checked
from hf_stitch.papers import HUH_2024, KLABUNDE_2023, MOSCHELLA_2023
from hf_stitch.statistics.spectrum import EPS

Near = Literal["cosine", "euclidean"]

# Rows per chunk that is compared with all rows.
_QUERIES = 512

# Largest difference of tied cosines, or logs of distances. Copies of a float32 row that differ by rounding have cosines
# within 1e-13 of 1, and the position of a row in a matrix product changes cosines by 1e-15.
TIED = 1e-12


class NeighboursMetric(FeaturesMetric):
    """Metric of the k nearest neighbours. The option ``distance``, if any, determines the invariances."""

    counts_rows = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if "distance" in self.options:
            self.invariances = invariances_of(self.options["distance"])

    @checked
    def min_rows(self, side: Operand, width: int) -> int:
        """Return k + 1."""
        return 1 + int(self.options["k"])


class Neighbours(NamedTuple):
    """Neighbours of rows, ordered by row and index of the neighbour before a permutation."""

    of: Tensor
    which: Tensor
    shares: Tensor  # 1; less for rows that tie for fewer places
    rows: int

    def shared(self, second: Neighbours) -> Tensor:
        """Return ``(rows,)`` the number of neighbours of each row that are also neighbours in ``second``."""
        pairs, second_pairs = (side.of * side.rows + side.which for side in (self, second))
        index = torch.searchsorted(pairs, second_pairs).clamp_(max=len(pairs) - 1)
        overlap = torch.minimum(self.shares[index], second.shares) * (pairs[index] == second_pairs)
        return overlap.new_zeros(self.rows).index_add_(0, second.of, overlap)

    def permuted(self, order: Tensor) -> Neighbours:
        """Renumber the rows."""
        new_index = order.argsort()
        return self._replace(of=new_index[self.of], which=new_index[self.which])


class SharedNeighboursMetric(NeighboursMetric):
    """Metric of the number of shared neighbours. Permuting samples renumbers them."""

    score: ClassVar[Callable[..., Tensor]]

    def _prepared(self, side: Operand, rows: Tensor) -> Neighbours:
        return neighbours(self.name, side, rows.double(), self.options["k"], self.options["distance"])

    def _permuted(self, x: Neighbours, y: Neighbours, order: Tensor) -> float:
        return type(self).score(x.shared(y.permuted(order)), self.options["k"]).item()


@of_rows
def mutual_knn(x: Tensor, y: Tensor, *, k: Count = 10, distance: Near = "cosine") -> Tensor:
    """Mean share of the k nearest neighbours of a sample that both representations have in common (Huh et al. 2024).

    Rows that tie for the last places among the neighbours of a sample share these places; the sides have the smaller
    share of a neighbour in common. So the value does not depend on the order of the samples, and is 1 for equal sides.
    It is about ``k / (n - 1)`` for independent sides, and higher if both collapse to few points.

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        k: Number of neighbours, from 1 to n - 1. A row is not its own neighbour.
        distance: Distance that ranks the neighbours, ``"cosine"`` or ``"euclidean"``.

    Example:
        >>> import torch
        >>> x = torch.randn(30, 8)
        >>> round(mutual_knn(x, 3 * x).item(), 6)
        1.0
    """
    return shared_neighbours(x, y, k, distance).mean()


@built_in("mutual_knn")
class MutualKNN(SharedNeighboursMetric):
    """Streaming ``mutual_knn``."""

    papers = (HUH_2024,)
    function = staticmethod(mutual_knn)
    score = staticmethod(lambda shared, k: (shared / k).mean())


@of_rows
def jaccard(x: Tensor, y: Tensor, *, k: Count = 10, distance: Near = "cosine") -> Tensor:
    """Mean Jaccard index of the sets of k nearest neighbours in both representations (Klabunde et al. 2023).

    The Jaccard index of a sample is the number of shared neighbours divided by the size of the union. Ties count as in
    :func:`mutual_knn`.

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        k: Number of neighbours, from 1 to n - 1. A row is not its own neighbour.
        distance: Distance that ranks the neighbours, ``"cosine"`` or ``"euclidean"``.

    Example:
        >>> import torch
        >>> x = torch.randn(30, 8)
        >>> round(jaccard(x, 3 * x).item(), 6)
        1.0
    """
    return _jaccard(_shared("jaccard", x, y, k, distance), k)


def _jaccard(shared: Tensor, k: int) -> Tensor:
    return (shared / (2 * k - shared)).mean()


@built_in("jaccard")
class Jaccard(SharedNeighboursMetric):
    """Streaming ``jaccard``."""

    papers = (KLABUNDE_2023,)
    function = staticmethod(jaccard)
    score = staticmethod(_jaccard)


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

    Example:
        >>> import torch
        >>> x = torch.randn(30, 8)
        >>> mrr(x, 3 * x).item()
        1.0
    """
    check_widths("mrr", x, y)
    _check_k("mrr", k, len(x))
    queries, candidates = directions("mrr", "x", x), directions("mrr", "y", y)
    ranks = []
    for rows in chunks(len(x), x.device):
        cosines = queries[rows] @ candidates.T
        ranks.append((cosines >= cosines.gather(1, rows[:, None]) - TIED).sum(1))
    rank = torch.cat(ranks).to(x)
    return torch.where(rank <= k, 1 / rank, 0).mean()


@built_in("mrr")
class MRR(NeighboursMetric):
    """Streaming ``mrr``."""

    papers = (MOSCHELLA_2023,)
    function = staticmethod(mrr)
    symmetric = False
    equal_widths = True


@of_rows
def paired_cosine(x: Tensor, y: Tensor) -> Tensor:
    """Mean cosine similarity between row i of ``x`` and row i of ``y``, in [-1, 1] (Moschella et al. 2023).

    Args:
        x: Activations of shape ``(n, d)``, floating point.
        y: Activations of shape ``(n, d)``, in the same space as ``x``.

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


@built_in("paired_cosine")
class PairedCosine(MeanMetric):
    """Streaming ``paired_cosine``; it stores only a sum."""

    papers = (MOSCHELLA_2023,)
    function = staticmethod(paired_cosine)
    values = staticmethod(_cosines)
    statistic = "features"
    differentiable = True
    equal_widths = True


def invariances_of(distance: Near) -> Invariances:
    """Return the transformations that preserve the neighbours."""
    invariances: Invariances = ("orthogonal", "scaling", "permutation")
    return invariances if distance == "cosine" else (*invariances, "translation")


def _check_k(name: str, k: int, rows: int) -> None:
    if k >= rows:
        raise ValueError(
            f"{name}: k must be below the number of rows, got k={k} and {rows} rows; decrease k or pass more rows"
        )


def shared_neighbours(x: Tensor, y: Tensor, k: int, distance: Near) -> Tensor:
    """Return for every sample the share of its k nearest neighbours that both sides have in common."""
    return _shared("mutual_knn", x, y, k, distance) / k


def _shared(name: str, x: Tensor, y: Tensor, k: int, distance: Near) -> Tensor:
    return neighbours(name, "x", x, k, distance).shared(neighbours(name, "y", y, k, distance))


def neighbours(name: str, side: str, rows: Tensor, k: int, distance: Near) -> Neighbours:
    """Find the k nearest neighbours of each row; rows that tie for the last places share them."""
    pairs, shares = [], []
    for row_ids, closeness in _closeness(name, side, rows, k, distance):
        best, indices = closeness.topk(k + 1)
        tied = best[:, k - 1] - best[:, k] <= TIED
        pairs.append((row_ids[~tied, None] * len(rows) + indices[~tied, :k]).flatten())
        shares.append(torch.ones_like(pairs[-1], dtype=rows.dtype))
        if tied.any():
            difference = closeness[tied] - best[tied, k - 1, None]
            nearer, is_level = difference > TIED, difference.abs() <= TIED
            open_places = (k - nearer.sum(1, keepdim=True)).to(rows)  # integers would divide in float32
            share = nearer + is_level * open_places / is_level.sum(1, keepdim=True)
            row, neighbour = share.nonzero(as_tuple=True)
            pairs.append(row_ids[tied][row] * len(rows) + neighbour)
            shares.append(share[row, neighbour])
    pair_ids, order = torch.cat(pairs).sort()
    return Neighbours(pair_ids // len(rows), pair_ids % len(rows), torch.cat(shares)[order], len(rows))


def nearest(name: str, side: str, rows: Tensor, k: int, distance: Near, *, ranked: bool = False) -> Tensor:
    """Return ``(n, k)`` indices of the nearest rows in order; raise an error for ties at the last place (or any)."""
    indices = []
    for row_ids, closeness in _closeness(name, side, rows, k, distance):
        best, neighbour_indices = closeness.topk(k + 1)
        tied = (best[:, :-1] - best[:, 1:] <= TIED)[:, 0 if ranked else k - 1 :].any(1)
        if tied.any():
            raise ValueError(
                f"{name}: several rows of {side} are equally near to row {int(row_ids[tied][0])}, so its {k} nearest "
                "rows are undefined; drop duplicates on both sides, or change k"
            )
        indices.append(neighbour_indices[:, :k])
    return torch.cat(indices)


def _closeness(name: str, side: str, rows: Tensor, k: int, distance: Near) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield indices of a chunk of rows and their closeness to all rows (cosines, or minus logs of distances)."""
    _check_k(name, k, len(rows))
    rows = directions(name, side, rows, distance)
    if alike(rows, distance):
        problem = "equal" if distance == "euclidean" else "equal, or have one direction"
        raise ValueError(
            f"{name}: all {len(rows)} rows of {side} are {problem}, so the value is undefined; is the layer dead?"
        )
    for row_ids in chunks(len(rows), rows.device):
        if distance == "cosine":
            closeness = rows[row_ids] @ rows.T
        else:
            closeness = torch.cdist(rows[row_ids], rows, compute_mode="donot_use_mm_for_euclid_dist")
            closeness = closeness.clamp_min_(torch.finfo(rows.dtype).tiny).log_().neg_()
        yield row_ids, closeness.scatter_(1, row_ids[:, None], -torch.inf)


def alike(rows: Tensor, distance: Near = "cosine") -> bool:
    """Return whether all rows are equal up to rounding; rows for cosines have length 1."""
    mean = rows.mean(0)
    rounding = TIED**0.5 if distance == "cosine" else 8 * EPS * mean.norm()
    return bool((rows - mean).norm(dim=1).max() <= rounding)


def chunks(rows: int, device: torch.device) -> Iterator[Tensor]:
    """Yield the indices of the rows in each chunk."""
    yield from torch.arange(rows, device=device).split(_QUERIES)
