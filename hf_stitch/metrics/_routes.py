"""Routes: how a metric is computed for all pairs of layers, from which statistic, and at what cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from hf_stitch.statistics import HSIC, Cost, LayerMoments, LayerRows, Moments, Workload

Collected = Literal["moments", "rows", "minibatches"]
"""Statistics that a pass over the data can collect: ``LayerMoments``, ``LayerRows`` or ``MinibatchGrams``."""


@dataclass(frozen=True)
class Route:
    """A way to compute a metric for all pairs of layers. All routes of one metric give the same values.

    Attributes:
        name: Name of the route in results.
        collects: The statistic that is collected during the pass over the data.
        values: Function of that statistic and the workload that returns the values, ``(layers of x, layers of y)``
            float64. It raises :class:`LayerError` or :class:`PairError` where they are undefined.
        cost: Cost after the pass, in addition to the cost of collecting.
        options: Options of the statistic (``size`` of minibatches).
    """

    name: str
    collects: Collected
    values: Callable[[Any, Workload], Tensor]
    cost: Callable[[Workload], Cost]
    options: Mapping[str, Any] = field(default_factory=dict)


class LayerError(ValueError):
    """A metric is undefined for a layer.

    Attributes:
        side: ``x`` or ``y``.
        place: Index of the layer on its side.
    """

    def __init__(self, side: str, place: int, why: str) -> None:
        super().__init__(why)
        self.side, self.place = side, place


class PairError(ValueError):
    """A metric is undefined for a pair of layers.

    Attributes:
        places: Indices of the two layers on their sides.
    """

    def __init__(self, places: tuple[int, int], why: str) -> None:
        super().__init__(why)
        self.places = places


def from_moments(value: Callable[[Moments], float], symmetric: bool) -> Route:
    """The route from the moments of each pair of layers.

    Args:
        value: Function from the moments of a pair to the value.
        symmetric: Whether a pair and the reversed pair have the same value.
    """

    def values(moments: LayerMoments, work: Workload) -> Tensor:
        return _pairwise(lambda i, j: value(moments.moments(i, j)), work, symmetric)

    def cost(work: Workload) -> Cost:
        return Cost(flops=_share(work, symmetric) * sum(20 * max(dx, dy) ** 3 for dx in work.x for dy in work.y))

    return Route("moments", "moments", values, cost)


def from_rows(value: Callable[[Tensor, Tensor], Tensor], symmetric: bool, compares_samples: bool) -> Route:
    """The route from the rows of each pair of layers.

    Args:
        value: The function of the metric.
        symmetric: Whether a pair and the reversed pair have the same value.
        compares_samples: Whether the function compares every row with every other, which needs n² numbers at a time.
    """

    def values(rows: LayerRows, work: Workload) -> Tensor:
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
    """The route of a kernel alignment: HSIC of all pairs, normalised by the HSIC of each layer with itself.

    Args:
        name: Name of the route.
        collects: The statistic.
        hsic: Function from the statistic to the HSIC of all pairs.
        cost: Cost after the pass.
        options: Options of the statistic.
    """
    return Route(name, collects, lambda statistic, work: _alignment(hsic(statistic)), cost, options or {})


def _share(work: Workload, symmetric: bool) -> float:
    """The share of the pairs that is computed."""
    return 0.5 if work.same and symmetric else 1.0


def _pairwise(value: Callable[[int, int], float], work: Workload, symmetric: bool) -> Tensor:
    found = torch.empty(len(work.x), len(work.y), dtype=torch.float64)
    for i in range(len(work.x)):
        for j in range(len(work.y)):
            if work.same and symmetric and j < i:
                found[i, j] = found[j, i]
                continue
            try:
                found[i, j] = value(i, j)
            except (ValueError, ArithmeticError) as error:
                raise PairError((i, j), str(error)) from error
    return found


def _alignment(hsic: HSIC) -> Tensor:
    for side, own in (("x", hsic.xx), ("y", hsic.yy)):
        wrong = ~((own > 0) & own.isfinite())
        if bool(wrong.any()):
            place = int(wrong.nonzero()[0])
            why = "is the layer dead, or are there too few samples?"
            if not bool(own[place].isfinite()):
                why = "products of its rows overflow their dtype; run the network in a wider one"
            raise LayerError(side, place, f"HSIC with itself is {own[place].item():.1e}; {why}")
    return (hsic.xy / torch.outer(hsic.xx.sqrt(), hsic.yy.sqrt())).cpu()
