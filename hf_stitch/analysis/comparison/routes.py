"""Which way leads to the values of a metric, and what it takes: chosen among those that give the same value."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch

from hf_stitch.analysis.comparison.layer_reader import Group, LayerReader
from hf_stitch.metrics import Metric
from hf_stitch.metrics._routes import Collected
from hf_stitch.metrics._routes import Route as MetricRoute
from hf_stitch.results import Result
from hf_stitch.statistics import Cost, LayerMoments, LayerRows, LayerStatistic, MinibatchGrams, Workload

if TYPE_CHECKING:
    import pandas
    from rich.table import Table


@dataclass(frozen=True)
class Route:
    """A way to the values of a metric, and what it takes.

    Attributes:
        metric: The metric.
        name: ``moments``, ``grams``, ``features`` or ``minibatches``.
        flops: Floating-point operations, most of them in float64.
        memory: Bytes of memory.
        disk: Bytes of rows kept in files.
        chosen: Whether it is taken.
    """

    metric: str
    name: str
    flops: float
    memory: int
    disk: int
    chosen: bool = False


@dataclass(frozen=True)
class ComparisonPlan(Result):
    """What a comparison will take: ``compare(…, plan=True)``.

    Attributes:
        routes: All routes, those that are taken marked.
        layers: How many layers either side has.
        n: Number of samples.
        forwards: Predicted seconds of the networks' forwards.
        speed: Floating-point operations in a second, as measured.
        available: Bytes of memory that a route may take.
    """

    routes: tuple[Route, ...]
    layers: tuple[int, int]
    n: int
    forwards: float
    speed: float
    available: int

    @property
    def seconds(self) -> float:
        """Of everything, as predicted."""
        return self.forwards + sum(route.flops for route in self.routes if route.chosen) / self.speed

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each route: ``metric``, ``name``, ``flops``, ``memory``, ``disk``, ``chosen``."""
        import pandas

        return pandas.DataFrame([asdict(route) for route in self.routes])

    def __rich__(self) -> Table:
        """The table that ``rich`` prints: a row for each route."""
        from rich.table import Table
        from rich.text import Text

        a, b = self.layers
        table = Table("metric", "route", title=f"{a} × {b} layers, {self.n} samples", title_justify="left")
        for column in ("memory", "files", "seconds"):
            table.add_column(column, justify="right")
        table.add_column("taken")
        for route in self.routes:
            figures = (_bytes(route.memory), _bytes(route.disk), f"{route.flops / self.speed:.2g}")
            row = [Text(route.metric), route.name, *figures, "yes" if route.chosen else ""]
            table.add_row(*row, style="bold" if route.chosen else "dim")
        table.add_row("", "forwards", "", "", f"{self.forwards:.2g}", "", end_section=True)
        table.caption = f"{self.seconds:.2g} seconds in all; a route may take {_bytes(self.available)} of memory"
        return table


STATISTICS: dict[Collected, type[LayerStatistic]] = {
    "moments": LayerMoments,
    "rows": LayerRows,
    "minibatches": MinibatchGrams,
}
"""What a pass can collect."""


def workload(group: Group, reader: LayerReader) -> Workload:
    """What is compared in a group, as far as costs depend on it."""
    x, y, distinct = (tuple(map(reader.width, keys)) for keys in (group.x, group.y, group.keys))
    return Workload(reader.count(group), x, y, group.same, distinct, reader.probe[group.x[0]].element_size())


def routes_of(scores: Mapping[str, Metric], reader: LayerReader, available: int) -> tuple[Route, ...]:
    """Every route to every metric; taken are those of the fewest operations that fit into memory.

    Metrics with one route come first: what they collect costs the others nothing.
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
    """What a route takes; if its statistic is collected anyway, only what follows the pass counts as operations."""
    total = Cost()
    for each in work:
        collecting = STATISTICS[way.collects].cost(each, **way.options)
        total += replace(collecting, flops=0.0) if collected else collecting
        total += way.cost(each)
    return Route(label, way.name, total.flops, total.memory, int(total.disk))


def taken_routes(routes: Sequence[Route], available: int) -> dict[str, str]:
    """By metric the route that is taken.

    Raises:
        ValueError: If a metric has none that fits into memory.
    """
    taken = {route.metric: route.name for route in routes if route.chosen}
    for metric in dict.fromkeys(route.metric for route in routes):
        if metric not in taken:
            needs = ", ".join(f"{route.name} {_bytes(route.memory)}" for route in routes if route.metric == metric)
            raise ValueError(
                f"no route to {metric} fits into memory: it may take {_bytes(available)}, and they take {needs}; name "
                "fewer layers, use pooling='mean', or a metric that is computed from minibatches"
            )
    return taken


def available_memory(device: torch.device) -> int:
    """Bytes that may be taken: half of what is free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    import psutil  # type: ignore[import-untyped]

    return int(psutil.virtual_memory().available) // 2


def speed() -> float:
    """Floating-point operations in a second, of a product in float64 on this machine."""
    size, times = 384, 4
    x = torch.ones(size, size, dtype=torch.float64) @ torch.ones(size, size, dtype=torch.float64)
    start = time.perf_counter()
    for _ in range(times):
        x = x @ x / size**3
    return 2 * size**3 * times / (time.perf_counter() - start)


def _bytes(count: float) -> str:
    """For example ``1.4 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
