"""Routes: alternative ways to compute the same value of a metric, and their costs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch

from hf_stitch.analysis.comparison.layer_reader import Group, LayerReader
from hf_stitch.metrics import ActivationMetric
from hf_stitch.metrics._routes import Collected
from hf_stitch.metrics._routes import Route as MetricRoute
from hf_stitch.results import Result
from hf_stitch.statistics import Cost, LayerMoments, LayerRows, LayerStatistic, MinibatchGrams, Workload

if TYPE_CHECKING:
    import pandas
    from rich.table import Table


@dataclass(frozen=True)
class Route:
    """One way to compute a metric, with its cost.

    Attributes:
        metric: Label of the metric.
        name: ``moments``, ``grams``, ``features`` or ``minibatches``.
        flops: Floating-point operations, most of them in float64.
        memory: Memory in bytes.
        disk: Size in bytes of the rows stored in files.
        chosen: Whether the comparison uses this route.
    """

    metric: str
    name: str
    flops: float
    memory: int
    disk: int
    chosen: bool = False


@dataclass(frozen=True)
class ComparisonPlan(Result):
    """Predicted cost of a comparison, returned by ``compare(…, plan=True)``.

    Attributes:
        routes: All routes; the chosen ones are marked.
        layers: Number of layers of a and of b.
        n: Number of samples.
        forwards: Predicted duration of the forward passes in seconds.
        speed: Measured floating-point operations per second.
        available: Memory in bytes that a route may use.
        testing: Floating-point operations of a permutation test, roughly; 0 without a test.

    Example:
        >>> route = Route("linear_cka", "moments", flops=2e9, memory=4000, disk=0, chosen=True)
        >>> plan = ComparisonPlan((route,), layers=(3, 3), n=1000, forwards=1.5, speed=1e9, available=8_000_000)
        >>> plan.seconds
        3.5
    """

    routes: tuple[Route, ...]
    layers: tuple[int, int]
    n: int
    forwards: float
    speed: float
    available: int
    testing: float = 0.0

    @property
    def seconds(self) -> float:
        """Predicted duration of the whole comparison in seconds."""
        return self.forwards + (sum(route.flops for route in self.routes if route.chosen) + self.testing) / self.speed

    def to_pandas(self) -> pandas.DataFrame:
        """Return the routes as a data frame.

        Returns:
            One row per route, with the columns ``metric``, ``name``, ``flops``, ``memory``, ``disk`` and ``chosen``.
        """
        import pandas

        return pandas.DataFrame([asdict(route) for route in self.routes])

    def __rich__(self) -> Table:
        """Return the table that ``rich`` prints, one row per route."""
        from rich.table import Table
        from rich.text import Text

        a, b = self.layers
        table = Table("metric", "route", title=f"{a} × {b} layers, {self.n} samples", title_justify="left")
        for column in ("memory", "files", "seconds"):
            table.add_column(column, justify="right")
        table.add_column("chosen")
        for route in self.routes:
            figures = (_bytes(route.memory), _bytes(route.disk), f"{route.flops / self.speed:.2g}")
            row = [Text(route.metric), route.name, *figures, "yes" if route.chosen else ""]
            table.add_row(*row, style="bold" if route.chosen else "dim")
        table.add_row("", "forwards", "", "", f"{self.forwards:.2g}", "", end_section=not self.testing)
        if self.testing:
            table.add_row("", "permutations", "", "", f"{self.testing / self.speed:.2g}", "", end_section=True)
        table.caption = f"{self.seconds:.2g} seconds in total; a route may use {_bytes(self.available)} of memory"
        return table


_GATHERING = 400
"""Floating-point operations in the time that it takes to move a number to a permuted place."""

STATISTICS: dict[Collected, type[LayerStatistic]] = {
    "moments": LayerMoments,
    "rows": LayerRows,
    "minibatches": MinibatchGrams,
}
"""Statistics that a pass can collect."""


def workload(group: Group, reader: LayerReader) -> Workload:
    """Return the sizes of a group of layers on which costs depend."""
    x, y, distinct = (tuple(map(reader.width, keys)) for keys in (group.x, group.y, group.keys))
    return Workload(reader.count(group), x, y, group.same, distinct, reader.probe[group.x[0]].element_size())


def routes_of(scores: Mapping[str, ActivationMetric], reader: LayerReader, available: int) -> tuple[Route, ...]:
    """Return all routes of all metrics, and choose for each metric the route with the fewest operations.

    Only routes that fit into memory are chosen. Metrics with a single route are processed first, because the statistics
    that they collect are free for the other metrics.

    Args:
        scores: Label -> metric.
        reader: Reader of the layers.
        available: Memory in bytes that a route may use.
    """
    routes: dict[str, list[Route]] = {}
    collected: set[tuple[str, str]] = set()
    work = [workload(group, reader) for group in reader.groups]
    for label, metric in sorted(scores.items(), key=lambda item: len(item[1].routes)):
        statistics = {way.name: (way.collects, repr(way.options)) for way in metric.routes}
        routes[label] = [_route(label, way, work, statistics[way.name] in collected) for way in metric.routes]
        fitting = [route for route in routes[label] if route.memory <= available]
        if fitting:
            best = min(fitting, key=lambda route: route.flops)
            collected.add(statistics[best.name])
            routes[label] = [replace(route, chosen=route is best) for route in routes[label]]
    return tuple(route for label in scores for route in routes[label])


def _route(label: str, way: MetricRoute, work: Sequence[Workload], collected: bool) -> Route:
    """Return a route with its cost; a statistic that is collected anyway adds no operations."""
    total = Cost()
    for each in work:
        collecting = STATISTICS[way.collects].cost(each, **way.options)
        total += replace(collecting, flops=0.0) if collected else collecting
        total += way.cost(each)
    return Route(label, way.name, total.flops, total.memory, int(total.disk))


def flops_of_permutation(scores: Mapping[str, ActivationMetric], routes: Sequence[Route], reader: LayerReader) -> float:
    """Return the operations of one permutation of a test of all metrics, roughly.

    Args:
        scores: Label -> metric.
        routes: All routes of these metrics.
        reader: Reader of the layers, with one row per sample.
    """
    (group,) = reader.groups
    x, y = len(group.x), len(group.y)
    total = 0.0
    for label, metric in scores.items():
        if type(metric).sample_matrix is ActivationMetric.sample_matrix:
            total += min(route.flops for route in routes if route.metric == label)
        else:  # each matrix of y is permuted, which takes as long as some products, and multiplied with those of x
            total += reader.n**2 * y * (_GATHERING + 2 * x)
    return total


def taken_routes(routes: Sequence[Route], available: int) -> dict[str, str]:
    """Return the name of the chosen route of each metric.

    Args:
        routes: All routes.
        available: Memory in bytes that a route may use, for the error message.

    Raises:
        ValueError: If no route of a metric fits into memory.
    """
    taken = {route.metric: route.name for route in routes if route.chosen}
    for metric in dict.fromkeys(route.metric for route in routes):
        if metric not in taken:
            needs = ", ".join(f"{route.name} {_bytes(route.memory)}" for route in routes if route.metric == metric)
            raise ValueError(
                f"no route of {metric} fits into memory: {_bytes(available)} are available, but they need {needs}; "
                "select fewer layers, use pooling='mean', or a metric that is computed from minibatches"
            )
    return taken


def available_memory(device: torch.device) -> int:
    """Return the memory in bytes that a route may use: half of the free memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    import psutil  # type: ignore[import-untyped]

    return int(psutil.virtual_memory().available) // 2


def speed() -> float:
    """Measure the floating-point operations per second of a float64 matrix product on the CPU."""
    size, times = 384, 4
    x = torch.ones(size, size, dtype=torch.float64) @ torch.ones(size, size, dtype=torch.float64)
    start = time.perf_counter()
    for _ in range(times):
        x = x @ x / size**3
    return 2 * size**3 * times / (time.perf_counter() - start)


def _bytes(count: float) -> str:
    """Format a number of bytes, e.g. ``1.4 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
