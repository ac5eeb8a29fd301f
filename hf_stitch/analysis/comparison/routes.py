"""Routes: alternative ways to compute the same value of a metric, and their costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hf_stitch.analysis.comparison.layer_reader import Group, LayerReader
from hf_stitch.analysis.planning import Plan
from hf_stitch.metrics import ActivationMetric
from hf_stitch.metrics._routes import Cost, Workload
from hf_stitch.resources import sized

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class RouteCost:
    """What one way to compute a metric costs."""

    metric: str  # label of the metric
    name: str  # moments, grams, features or minibatches
    flops: float  # floating-point operations, most of them in float64
    memory: int  # memory in bytes
    disk: int  # size in bytes of the rows stored in files
    chosen: bool = False  # whether the comparison uses this route


@dataclass(frozen=True)
class ComparisonPlan(Plan):
    """Predicted cost of a comparison, from ``hf_stitch.plan(hf_stitch.compare, …)``.

    Attributes:
        routes: All routes; the chosen ones are marked. Their seconds are those of ``speed``.

    Example:
        >>> route = RouteCost("linear_cka", "moments", flops=2e9, memory=4000, disk=0, chosen=True)
        >>> plan = ComparisonPlan("3 × 3 layers", {"forwards": 1.5}, {}, {}, 10**9, 10**9, routes=(route,), speed=1e9)
        >>> plan.seconds
        1.5
    """

    routes: tuple[RouteCost, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether memory and disk suffice, and each metric has a route that fits into its share of the memory."""
        chosen = {route.metric for route in self.routes if route.chosen}
        return super().fits and all(route.metric in chosen for route in self.routes)

    def __rich__(self) -> RenderableType:
        """Return the table that ``rich`` prints, and one of all routes."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table("metric", "route", title="routes", title_justify="left")
        for column in ("memory", "files", "seconds"):
            table.add_column(column, justify="right")
        table.add_column("chosen")
        for route in self.routes:
            figures = (sized(route.memory), sized(route.disk), f"{route.flops / self.speed:.2g}")
            row = [Text(route.metric), route.name, *figures, "yes" if route.chosen else ""]
            table.add_row(*row, style="bold" if route.chosen else "dim")
        table.caption = f"a route may use {sized(self.free_memory // 2)} of memory"
        return Group(super().__rich__(), table)


_GATHERING = 400
"""Floating-point operations in the time that it takes to move a number to a permuted place."""


def workload(group: Group, reader: LayerReader) -> Workload:
    """Return the sizes of a group of layers on which costs depend."""
    x, y, distinct = (tuple(map(reader.width, keys)) for keys in (group.x, group.y, group.keys))
    return Workload(reader.count(group), x, y, group.same, distinct, reader.probe[group.x[0]].element_size())


def routes_of(scores: Mapping[str, ActivationMetric], reader: LayerReader, available: int) -> tuple[RouteCost, ...]:
    """Return all routes of all metrics, and choose for each metric the route with the fewest operations.

    Only routes that fit into memory are chosen. Metrics with a single route are processed first, because the statistics
    that they collect are free for the other metrics.
    """
    routes: dict[str, list[RouteCost]] = {}
    collected: set[str] = set()
    work = [workload(group, reader) for group in reader.groups]
    for label, metric in sorted(scores.items(), key=lambda item: len(item[1].routes)):
        routes[label] = []
        for way in metric.routes:
            cost = sum((way.cost(each, way.statistic in collected) for each in work), Cost())
            routes[label].append(RouteCost(label, way.name, cost.flops, cost.memory, int(cost.disk)))
        fitting = [route for route in routes[label] if route.memory <= available]
        if fitting:
            best = min(fitting, key=lambda route: route.flops)
            collected |= {way.statistic for way in metric.routes if way.name == best.name}
            routes[label] = [replace(route, chosen=route is best) for route in routes[label]]
    return tuple(route for label in scores for route in routes[label])


def flops_of_permutation(
    scores: Mapping[str, ActivationMetric], routes: Sequence[RouteCost], reader: LayerReader
) -> float:
    """Return the operations of one permutation of a test of all metrics, roughly."""
    (group,) = reader.groups
    x, y = len(group.x), len(group.y)
    total = 0.0
    for label, metric in scores.items():
        if type(metric).sample_matrix is ActivationMetric.sample_matrix:
            total += min(route.flops for route in routes if route.metric == label)
        else:  # each matrix of y is permuted, which takes as long as some products, and multiplied with those of x
            total += reader.n**2 * y * (_GATHERING + 2 * x)
    return total


def taken_routes(routes: Sequence[RouteCost], available: int) -> dict[str, str]:
    """Return the name of the chosen route of each metric."""
    taken = {route.metric: route.name for route in routes if route.chosen}
    for metric in dict.fromkeys(route.metric for route in routes):
        if metric not in taken:
            needs = ", ".join(f"{route.name} {sized(route.memory)}" for route in routes if route.metric == metric)
            raise ValueError(
                f"no route of {metric} fits into memory: {sized(available)} are available, but they need {needs}; "
                "select fewer layers, use rows='mean', or a metric that is computed from minibatches"
            )
    return taken
