"""Routes: ways to compute a metric for all pairs of layers, with their statistics and costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from hf_stitch.statistics import Moments
from hf_stitch.statistics.features import LayerRows
from hf_stitch.statistics.grams import HSIC
from hf_stitch.statistics.layer_moments import LayerMoments

Collected = Literal["moments", "rows", "minibatches"]
"""Statistics that a pass over the data can collect: ``LayerMoments``, ``LayerRows`` or ``MinibatchGrams``."""

_PACKING = 100
"""Operations for each entry of a Gram matrix when it is packed."""


@dataclass(frozen=True)
class PairValues:
    """Values of a metric for all pairs of layers."""

    values: Tensor  # (layers of x, layers of y) float64; NaN where the metric is undefined
    undefined: Mapping[tuple[int, int], str]  # indices of the two layers of each undefined pair -> reason


@dataclass(frozen=True)
class Workload:
    """Sizes of a comparison that determine its costs."""

    n: int  # number of rows
    x: tuple[int, ...]  # width of each layer of the first side
    y: tuple[int, ...]  # width of each layer of the second side
    same: bool  # whether both sides are the same layers
    distinct: tuple[int, ...]  # width of each distinct layer of both sides
    itemsize: int  # bytes of a number in a row

    @property
    def bytes(self) -> int:
        """Bytes of the rows of all distinct layers."""
        return self.n * sum(self.distinct) * self.itemsize


@dataclass(frozen=True)
class Cost:
    """Cost of a computation in operations, memory and disk."""

    flops: float = 0.0  # floating-point operations, most of them in float64
    kept: float = 0.0  # bytes of memory that stay allocated
    transient: float = 0.0  # additional bytes of memory for a short time
    disk: float = 0.0  # bytes of rows in files

    @property
    def memory(self) -> int:
        """Peak bytes of memory."""
        return int(self.kept + self.transient)

    def __add__(self, other: Cost) -> Cost:
        """Return the cost of both computations in sequence."""
        transient = max(self.transient, other.transient)
        return Cost(self.flops + other.flops, self.kept + other.kept, transient, self.disk + other.disk)


@dataclass(frozen=True)
class Route:
    """Way to compute a metric for all pairs of layers. All routes of one metric give the same values."""

    name: str  # name of the route in results
    collects: Collected  # the statistic that is collected during the pass over the data
    values: Callable[[Any, Workload], PairValues]  # function of that statistic and the workload that returns the values
    after: Callable[[Workload], Cost] = lambda work: Cost()  # cost after the pass
    options: Mapping[str, Any] = field(default_factory=dict)  # options of the statistic (size of minibatches)

    @property
    def statistic(self) -> str:
        """Name of the statistic with its options; routes with the same one share it."""
        return "-".join([self.collects, *map(str, self.options.values())])

    def cost(self, work: Workload, collected: bool) -> Cost:
        """Return the total cost; a statistic that is already collected does not add operations."""
        collecting = self._collecting(work)
        return (replace(collecting, flops=0.0) if collected else collecting) + self.after(work)

    def _collecting(self, work: Workload) -> Cost:
        cross, diag = sum(work.x) * sum(work.y), sum(width**2 for width in work.distinct)
        match self.collects:
            case "moments":
                return Cost(flops=2 * work.n * (cross * (0.5 if work.same else 1.0) + diag), kept=8 * (cross + diag))
            case "rows":
                return Cost(disk=work.bytes)
            case "minibatches":
                size, widths = min(self.options["size"], work.n), sum(work.distinct)
                flops = work.n * size * (widths / (8 / work.itemsize) + len(work.x) * len(work.y))
                return Cost(flops=flops, kept=2 * size * widths * work.itemsize + 8 * size**2 * len(work.distinct))


class LayerError(ValueError):
    """Error in the arithmetic of a metric for a layer or a pair of layers."""

    def __init__(self, reason: str, **places: int) -> None:
        super().__init__(reason)
        self.places = places  # x, y or both -> place among the layers of the side


def from_moments(value: Callable[[Moments], float], symmetric: bool) -> Route:
    """Return the route from the moments of each pair of layers."""

    def values(moments: LayerMoments, work: Workload) -> PairValues:
        return _pairwise(lambda i, j: value(moments.moments(i, j)), work, symmetric)

    def cost(work: Workload) -> Cost:
        return Cost(flops=_share(work, symmetric) * sum(20 * max(dx, dy) ** 3 for dx in work.x for dy in work.y))

    return Route("moments", "moments", values, cost)


def from_rows(value: Callable[[Tensor, Tensor], Tensor], symmetric: bool, compares_samples: bool) -> Route:
    """Return the route from the rows of each pair of layers."""

    def values(rows: LayerRows, work: Workload) -> PairValues:
        return _pairwise(lambda i, j: value(rows.x(i), rows.y(j)).item(), work, symmetric)

    def cost(work: Workload) -> Cost:
        n, pairs = work.n, [(dx, dy) for dx in work.x for dy in work.y]
        flops = sum(2 * n * (dx * min(n, dx) + dy * min(n, dy) + min(n, dx) * min(n, dy)) for dx, dy in pairs)
        flops += compares_samples * 4 * n**2 * sum(map(sum, pairs))
        transient = 24 * n * max(map(sum, pairs)) + compares_samples * 24 * n**2
        return Cost(flops=_share(work, symmetric) * flops, transient=transient)

    return Route("features", "rows", values, cost)


def from_hsic(name: str, collects: Collected, hsic: Callable[[Any], HSIC], **declared: Any) -> Route:
    """Return the route of a kernel alignment: HSIC of all pairs, normalised by each layer's HSIC with itself."""
    return Route(name, collects, lambda statistic, work: _alignment(hsic(statistic)), **declared)


def of_grams(work: Workload) -> Cost:
    """Return the cost of the Gram matrices of all rows, and of HSIC of all pairs."""
    n, pairs = work.n, len(work.x) * len(work.y)
    flops = n**2 * (sum(work.distinct) + pairs + _PACKING * len(work.distinct))  # half of a Gram matrix is computed
    return Cost(flops=flops, kept=8 * n**2 * (len(work.distinct) + 1))


def _share(work: Workload, symmetric: bool) -> float:
    """Return the share of the pairs that is computed."""
    return 0.5 if work.same and symmetric else 1.0


def _pairwise(value: Callable[[int, int], float], work: Workload, symmetric: bool) -> PairValues:
    values = torch.full((len(work.x), len(work.y)), torch.nan, dtype=torch.float64)
    undefined: dict[tuple[int, int], str] = {}
    for i in range(len(work.x)):
        for j in range(len(work.y)):
            if work.same and symmetric and j < i:
                values[i, j] = values[j, i]
                if (j, i) in undefined:
                    undefined[i, j] = undefined[j, i]
                continue
            try:
                values[i, j] = value(i, j)
            except ValueError as error:
                undefined[i, j] = str(error)
            except ArithmeticError as error:
                raise LayerError(str(error), x=i, y=j) from error
    return PairValues(values, undefined)


def _alignment(hsic: HSIC) -> PairValues:
    undefined: dict[tuple[int, int], str] = {}
    shape = hsic.xy.shape
    for side, squares in (("x", hsic.xx), ("y", hsic.yy)):
        for layer, value in enumerate(squares.tolist()):
            if not math.isfinite(value):
                reason = "products of its rows overflow their dtype; run the network in a wider dtype"
                raise LayerError(f"HSIC with itself is {value:.1e}; {reason}", **{side: layer})
            if value <= 0:
                reason = "is the layer dead, or are there too few samples?"
                reason = f"HSIC of {side} with itself is {value:.1e}; {reason}"
                pairs = [(layer, j) if side == "x" else (j, layer) for j in range(shape[side == "x"])]
                undefined |= dict.fromkeys(pairs, reason)
    values = (hsic.xy / torch.outer(hsic.xx.sqrt(), hsic.yy.sqrt())).cpu()
    for pair in undefined:
        values[pair] = torch.nan
    return PairValues(values, undefined)
