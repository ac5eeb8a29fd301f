"""Which way leads to the values of a metric, and what it takes: chosen among those that give the same value."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch

from hf_stitch.analysis.comparison.watch import Watch
from hf_stitch.metrics import Metric, MomentsMetric
from hf_stitch.results import Result

if TYPE_CHECKING:
    import pandas
    from rich.table import Table


_PASSES = 400
"""Operations for which there would be time while the numbers of a Gram matrix are put in order, for each of them."""


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
class Plan(Result):
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


def routes_of(scores: Mapping[str, Metric], watch: Watch, available: int) -> tuple[Route, ...]:
    """Every route to every metric; taken are those of the fewest operations that fit into memory.

    Metrics with one route come first: what they collect costs the others nothing.
    """
    routes: dict[str, list[Route]] = {}
    collected: set[str] = set()
    for label, metric in sorted(scores.items(), key=lambda item: len(_ways(item[1]))):
        routes[label] = [_route(label, metric, way, watch, way in collected) for way in _ways(metric)]
        fitting = [route for route in routes[label] if route.memory <= available]
        if fitting:
            best = min(fitting, key=lambda route: route.flops)
            collected.add(best.name)
            routes[label] = [replace(route, chosen=route is best) for route in routes[label]]
    return tuple(route for label in scores for route in routes[label])


def _ways(metric: Metric) -> tuple[str, ...]:
    """The routes that give the value of a metric."""
    if metric.name == "linear_cka":
        return ("moments", "grams")
    if metric.name == "minibatch_cka":
        return ("minibatches",)
    return ("moments", "features") if isinstance(metric, MomentsMetric) else ("features",)


def _route(label: str, metric: Metric, way: str, watch: Watch, collected: bool) -> Route:
    """What a route takes; if its statistic is collected anyway, only what follows the pass counts as operations."""
    flops, memory, disk = 0.0, 0, 0
    for group in watch.groups:
        n, itemsize = watch.count(group), watch.probe[group.x[0]].element_size()
        x, y = ([watch.width(key) for key in keys] for keys in (group.x, group.y))
        both = sum(map(watch.width, group.keys))
        pairs = [(dx, dy) for dx in x for dy in y]
        once = 0.5 if group.same and metric.symmetric else 1.0
        match way:
            case "moments":
                products = sum(x) * sum(y) * (0.5 if group.same else 1.0)
                own = sum(watch.width(key) ** 2 for key in group.keys)
                flops += 0 if collected else 2 * n * (products + own)
                flops += 0 if metric.name == "linear_cka" else once * sum(20 * max(pair) ** 3 for pair in pairs)
                memory += 8 * (sum(x) * sum(y) + own)
            case "grams":
                flops += n**2 * (both + len(pairs) + _PASSES * len(group.keys))  # of a Gram matrix half is computed
                memory += 8 * n**2 * (len(group.keys) + 1)
                disk += n * both * itemsize
            case "minibatches":
                size = min(metric.options["batch_size"], n)
                flops += n * size * (both / (8 / itemsize) + len(pairs))
                memory += 2 * size * both * itemsize + 8 * size**2 * len(group.keys)
            case _:
                wide = [2 * n * (dx * min(n, dx) + dy * min(n, dy) + min(n, dx) * min(n, dy)) for dx, dy in pairs]
                square = not isinstance(metric, MomentsMetric)
                flops += once * sum(wide) + square * once * 4 * n**2 * sum(map(sum, pairs))
                memory = max(memory, 24 * n * max(map(sum, pairs)) + square * 24 * n**2)
                disk += n * both * itemsize
    return Route(label, way, flops, memory, disk)


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
                "fewer layers, use rows='mean', or minibatch_cka"
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
