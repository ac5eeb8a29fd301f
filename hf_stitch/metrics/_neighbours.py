"""Nearest-neighbour metrics: whether the same samples are close to each other in both representations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hf_stitch.metrics._catalogue import built_in
from hf_stitch.metrics._rows import check_widths, directions, of_rows
from hf_stitch.metrics.base import FeaturesMetric, Invariances, MeanMetric, Operand
from hf_stitch.options import Count, checked
from hf_stitch.papers import HUH_2024, KLABUNDE_2023, MOSCHELLA_2023

Near = Literal["cosine", "euclidean"]

# Rows per chunk that is compared with all others.
_QUERIES = 512


class NeighboursMetric(FeaturesMetric):
    """A metric of the k nearest neighbours. Where there is a choice of distances, it decides the invariances."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if "distance" in self.options:
            self.invariances = kept_by(self.options["distance"])

    @checked
    def min_rows(self, side: Operand, width: int) -> int:
        """One more than k."""
        return 1 + int(self.options["k"])


class SharedNeighboursMetric(NeighboursMetric):
    """A metric of how many neighbours both sides share.

    Permuting samples numbers them anew, unless distances tie: the numbers of the samples decide between equal ones.
    """

    score: ClassVar[Callable[..., Tensor]]

    def _prepared(self, side: Operand, rows: Tensor) -> tuple[Tensor, Tensor, bool]:
        rows = rows.double()
        near, other = (
            nearest(self.name, side, some, self.options["k"], self.options["distance"]) for some in (rows, rows.flip(0))
        )
        return rows, near, not torch.equal(near.sort().values, (len(rows) - 1 - other).flip(0).sort().values)

    def _permuted(self, x: tuple[Tensor, Tensor, bool], y: tuple[Tensor, Tensor, bool], order: Tensor) -> float:
        if x[2] or y[2]:
            return super()._permuted(x[0], y[0], order)
        shared = _same(x[1], order.argsort()[y[1][order]]).double().sum((1, 2))
        return type(self).score(shared, self.options["k"]).item()


@of_rows
def mutual_knn(x: Tensor, y: Tensor, *, k: Count = 10, distance: Near = "cosine") -> Tensor:
    """Mean share of the k nearest neighbours of a sample that both representations have in common (Huh et al. 2024).

    The value is about ``k / (n - 1)`` for independent sides.

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        k: Number of neighbours, from 1 to n - 1. A row is not its own neighbour.
        distance: Distance that ranks the neighbours, ``"cosine"`` or ``"euclidean"``. Ties are broken arbitrarily.

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

    The Jaccard index of a sample is the number of shared neighbours divided by the size of the union.

    Args:
        x: Activations of shape ``(n, dx)``, floating point. Row i of ``x`` and of ``y`` must be the same sample.
        y: Activations of shape ``(n, dy)``, floating point.
        k: Number of neighbours, from 1 to n - 1. A row is not its own neighbour.
        distance: Distance that ranks the neighbours, ``"cosine"`` or ``"euclidean"``. Ties are broken arbitrarily.

    Example:
        >>> import torch
        >>> x = torch.randn(30, 8)
        >>> round(jaccard(x, 3 * x).item(), 6)
        1.0
    """
    return _jaccard(matches("jaccard", x, y, k, distance).sum((1, 2)), k)


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
    queries, found = directions("mrr", "x", x), directions("mrr", "y", y)
    ranks = []
    for rows in chunks(len(x), x.device):
        cosines = queries[rows] @ found.T
        ranks.append((cosines >= cosines.gather(1, rows[:, None])).sum(1))
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
    """Streaming ``paired_cosine``; it keeps only a sum."""

    papers = (MOSCHELLA_2023,)
    function = staticmethod(paired_cosine)
    values = staticmethod(_cosines)
    statistic = "features"
    differentiable = True
    equal_widths = True


def kept_by(distance: Near) -> Invariances:
    """Return the transformations that keep the neighbours."""
    kept: Invariances = ("orthogonal", "scaling", "permutation")
    return kept if distance == "cosine" else (*kept, "translation")


def _check_k(name: str, k: int, rows: int) -> None:
    if k >= rows:
        raise ValueError(
            f"{name}: k must be below the number of rows, got k={k} and {rows} rows; lower k or give more rows"
        )


def shared_neighbours(x: Tensor, y: Tensor, k: int, distance: Near) -> Tensor:
    """Return for every sample the share of its k nearest neighbours that both sides have in common."""
    return matches("mutual_knn", x, y, k, distance).sum((1, 2)) / k


def matches(name: str, x: Tensor, y: Tensor, k: int, distance: Near) -> Tensor:
    """``(n, k, k)``: 1 where neighbour a of row i on one side is its neighbour b on the other."""
    near_x, near_y = (nearest(name, side, rows, k, distance) for side, rows in (("x", x), ("y", y)))
    return _same(near_x, near_y).to(x)


def _same(near_x: Tensor, near_y: Tensor) -> Tensor:
    return near_x[:, :, None] == near_y[:, None, :]


def nearest(name: str, side: str, rows: Tensor, k: int, distance: Near) -> Tensor:
    """``(n, k)``: indices of the nearest other rows, nearest first."""
    _check_k(name, k, len(rows))
    rows = directions(name, side, rows, distance)
    found = []
    for some in chunks(len(rows), rows.device):
        if distance == "cosine":
            closeness = rows[some] @ rows.T
        else:
            closeness = -torch.cdist(rows[some], rows, compute_mode="donot_use_mm_for_euclid_dist")
        closeness.scatter_(1, some[:, None], -torch.inf)
        found.append(closeness.topk(k).indices)
    return torch.cat(found)


def chunks(rows: int, device: torch.device) -> Iterator[Tensor]:
    """Generate the numbers of the rows that are compared with all others at once."""
    yield from torch.arange(rows, device=device).split(_QUERIES)
