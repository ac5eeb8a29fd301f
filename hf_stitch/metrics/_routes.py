"""Routes: how a metric is computed for all pairs of layers, from which statistic, and at what cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from hf_stitch.statistics import HSIC, Cost, LayerMoments, LayerRows, Moments, Workload

Collected = Literal["moments", "rows", "minibatches"]
"""Statistics that a pass over the data can collect: ``LayerMoments``, ``LayerRows`` or ``MinibatchGrams``."""


@dataclass(frozen=True)
class PairValues:
    """Values of a metric for all pairs of layers."""

    values: Tensor  # (layers of x, layers of y) float64; NaN where the metric is undefined
    undefined: Mapping[tuple[int, int], str]  # indices of the two layers of each such pair -> why


@dataclass(frozen=True)
class Route:
    """A way to compute a metric for all pairs of layers. All routes of one metric give the same values."""

    name: str  # name of the route in results
    collects: Collected  # the statistic that is collected during the pass over the data
    values: Callable[[Any, Workload], PairValues]  # function of that statistic and the workload that returns the values
    cost: Callable[[Workload], Cost]  # cost after the pass, in addition to the cost of collecting
    options: Mapping[str, Any] = field(default_factory=dict)  # options of the statistic (size of minibatches)


class LayerError(ValueError):
    """The arithmetic of a metric fails for a layer."""

    def __init__(self, side: str, place: int, why: str) -> None:
        super().__init__(why)
        self.side, self.place = side, place


class PairError(ValueError):
    """The arithmetic of a metric fails for a pair of layers."""

    def __init__(self, places: tuple[int, int], why: str) -> None:
        super().__init__(why)
        self.places = places


def from_moments(value: Callable[[Moments], float], symmetric: bool) -> Route:
    """The route from the moments of each pair of layers."""

    def values(moments: LayerMoments, work: Workload) -> PairValues:
        return _pairwise(lambda i, j: value(moments.moments(i, j)), work, symmetric)

    def cost(work: Workload) -> Cost:
        return Cost(flops=_share(work, symmetric) * sum(20 * max(dx, dy) ** 3 for dx in work.x for dy in work.y))

    return Route("moments", "moments", values, cost)


def from_rows(value: Callable[[Tensor, Tensor], Tensor], symmetric: bool, compares_samples: bool) -> Route:
    """The route from the rows of each pair of layers."""

    def values(rows: LayerRows, work: Workload) -> PairValues:
        return _pairwise(lambda i, j: value(rows.x(i), rows.y(j)).item(), work, symmetric)

    def cost(work: Workload) -> Cost:
        n, pairs = work.n, [(dx, dy) for dx in work.x for dy in work.y]
        flops = sum(2 * n * (dx * min(n, dx) + dy * min(n, dy) + min(n, dx) * min(n, dy)) for dx, dy in pairs)
        flops += compares_samples * 4 * n**2 * sum(map(sum, pairs))
        transient = 24 * n * max(map(sum, pairs)) + compares_samples * 24 * n**2
        return Cost(flops=_share(work, symmetric) * flops, transient=transient)

    return Route("features", "rows", values, cost)


def from_hsic(
    name: str,
    collects: Collected,
    hsic: Callable[[Any], HSIC],
    cost: Callable[[Workload], Cost],
    options: Mapping[str, Any] | None = None,
) -> Route:
    """The route of a kernel alignment: HSIC of all pairs, normalised by the HSIC of each layer with itself."""
    return Route(name, collects, lambda statistic, work: _alignment(hsic(statistic)), cost, options or {})


def _share(work: Workload, symmetric: bool) -> float:
    """The share of the pairs that is computed."""
    return 0.5 if work.same and symmetric else 1.0


def _pairwise(value: Callable[[int, int], float], work: Workload, symmetric: bool) -> PairValues:
    found = torch.full((len(work.x), len(work.y)), torch.nan, dtype=torch.float64)
    undefined: dict[tuple[int, int], str] = {}
    for i in range(len(work.x)):
        for j in range(len(work.y)):
            if work.same and symmetric and j < i:
                found[i, j] = found[j, i]
                if (j, i) in undefined:
                    undefined[i, j] = undefined[j, i]
                continue
            try:
                found[i, j] = value(i, j)
            except ValueError as error:
                undefined[i, j] = str(error)
            except ArithmeticError as error:
                raise PairError((i, j), str(error)) from error
    return PairValues(found, undefined)


def _alignment(hsic: HSIC) -> PairValues:
    undefined: dict[tuple[int, int], str] = {}
    shape = hsic.xy.shape
    for side, own in (("x", hsic.xx), ("y", hsic.yy)):
        for place, value in enumerate(own.tolist()):
            if not math.isfinite(value):
                why = "products of its rows overflow their dtype; run the network in a wider one"
                raise LayerError(side, place, f"HSIC with itself is {value:.1e}; {why}")
            if value <= 0:
                why = "is the layer dead, or are there too few samples?"
                why = f"HSIC of {side} with itself is {value:.1e}; {why}"
                pairs = [(place, j) if side == "x" else (j, place) for j in range(shape[side == "x"])]
                undefined |= dict.fromkeys(pairs, why)
    values = (hsic.xy / torch.outer(hsic.xx.sqrt(), hsic.yy.sqrt())).cpu()
    for pair in undefined:
        values[pair] = torch.nan
    return PairValues(values, undefined)
