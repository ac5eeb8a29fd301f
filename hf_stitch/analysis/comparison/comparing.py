"""Comparison of layers: choice of the cheapest route to each metric, cost, pass over the data, and atlas."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_stitch.analysis.comparison.asking import Asked
from hf_stitch.analysis.comparison.atlas import LayerSize, SimilarityAtlas, pair_name
from hf_stitch.analysis.comparison.collecting import Collector, run_pass
from hf_stitch.analysis.comparison.layers import Group, LayerReader
from hf_stitch.analysis.comparison.sides import Side, networks_of, shares_of
from hf_stitch.analysis.planning import NETWORKS, Plan, bytes_of_weights, speed
from hf_stitch.metrics import ActivationMetric
from hf_stitch.metrics._routes import Cost
from hf_stitch.printing import SILENT, see, warn
from hf_stitch.provenance import versions
from hf_stitch.reference import shareable
from hf_stitch.resources import free_disk, free_memory, sized
from hf_stitch.running import Processes, Run
from hf_stitch.storage.checkpoint import Checkpoint

if TYPE_CHECKING:
    from rich.console import RenderableType

_GATHERING = 400
"""Floating-point operations in the time of moving a number to a permuted place."""
Array = NDArray[np.float64]
Then = Callable[[Sequence[Tensor], Mapping[str, Array]], None]
"""Receives the rows of each layer of a, (n, d), and the values of each metric, (layers of a, layers of b)."""
_SHOWN = 3
"""Number of layers listed in an error message."""
LEAST = 3
"""Smallest number of samples: two samples differ in a single direction, so that all pairs of layers look alike."""
BY_CHANCE, CHEAP = 0.9, 1024
"""A similarity that independent rows must not exceed, and the widest of these rows."""


@dataclass(frozen=True)
class RouteCost:
    """Cost of one route to a metric."""

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
        routes: All routes; the chosen ones are marked. Their seconds assume ``speed``.

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
        """Return the table that ``rich`` prints, and a table of all routes."""
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


def routes_of(metrics: Mapping[str, ActivationMetric], reader: LayerReader, available: int) -> tuple[RouteCost, ...]:
    """Return all routes of all metrics, and choose for each metric the route with the fewest operations.

    Only routes that fit into memory are chosen. Metrics with a single route are processed first, because their
    statistics are free for the remaining metrics.
    """
    routes: dict[str, list[RouteCost]] = {}
    collected: set[str] = set()
    workloads = [reader.workload(group) for group in reader.groups]
    for label, metric in sorted(metrics.items(), key=lambda item: len(item[1].routes)):
        routes[label] = []
        for route in metric.routes:
            cost = sum((route.cost(workload, route.statistic in collected) for workload in workloads), Cost())
            routes[label].append(RouteCost(label, route.name, cost.flops, cost.memory, int(cost.disk)))
        fitting = [candidate for candidate in routes[label] if candidate.memory <= available]
        if fitting:
            best = min(fitting, key=lambda candidate: candidate.flops)
            collected |= {route.statistic for route in metric.routes if route.name == best.name}
            routes[label] = [replace(candidate, chosen=candidate is best) for candidate in routes[label]]
    return tuple(candidate for label in metrics for candidate in routes[label])


def flops_of_permutation(
    metrics: Mapping[str, ActivationMetric], routes: Sequence[RouteCost], reader: LayerReader
) -> float:
    """Estimate the operations of one permutation in a test of all metrics."""
    (group,) = reader.groups
    x, y = len(group.x), len(group.y)
    total = 0.0
    for label, metric in metrics.items():
        if type(metric).sample_matrix is ActivationMetric.sample_matrix:
            total += min(route.flops for route in routes if route.metric == label)
        else:  # each matrix of y is permuted (as slow as several products) and multiplied with the matrices of x
            total += reader.n**2 * y * (_GATHERING + 2 * x)
    return total


def chosen_routes(routes: Sequence[RouteCost], available: int) -> dict[str, str]:
    """Return the name of the chosen route of each metric."""
    by_metric = {route.metric: route.name for route in routes if route.chosen}
    for metric in dict.fromkeys(route.metric for route in routes):
        if metric not in by_metric:
            needs = ", ".join(f"{route.name} {sized(route.memory)}" for route in routes if route.metric == metric)
            raise ValueError(
                f"{metric} does not fit into memory: {sized(available)} are available, but its routes need {needs}; "
                "select fewer layers, or use rows='mean' or a metric from minibatches"
            )
    return by_metric


class Comparison:
    """Comparison of all layers of two sides: planned from two samples, then run over all samples."""

    @torch.no_grad()
    def __init__(
        self,
        sides: Sequence[Side],
        asked: Asked,
        run: Run,
        layers_a: Iterable[str] | None = None,
        layers_b: Iterable[str] | None = None,
    ) -> None:
        self._sides, self._metrics = sides, asked.activations
        self._run, self._processes = run, run.processes
        ordered = any("permutation" not in metric.invariances for metric in self._metrics.values())
        self._reader = LayerReader(sides, layers_a, layers_b, asked.rows, ordered)
        _check(self._metrics, self._reader, self._processes)
        self._available = free_memory(self._reader.device) // 2
        self._routes = routes_of(self._metrics, self._reader, self._available)

    @torch.no_grad()
    def plan(self, permutations: int = 0, resampled: bool = False) -> ComparisonPlan:
        """Return the predicted cost of the comparison, after two batches.

        If all routes of a metric exceed the memory, the plan contains the route with the least memory and does not fit.
        """
        reader, rate = self._reader, speed()
        routes_by_metric = [[route for route in self._routes if route.metric == label] for label in self._metrics]
        cheapest = [min(routes, key=lambda route: (not route.chosen, route.memory)) for routes in routes_by_metric]
        stages = {
            "forwards": reader.seconds_per_sample(self._run.batch_size) * reader.n / self._processes.count,
            "statistics and values": sum(route.flops for route in cheapest) / rate,
        }
        if permutations:
            stages["permutations"] = permutations * flops_of_permutation(self._metrics, self._routes, reader) / rate
        memory, disk = (  # metrics share the statistics of a route
            {name: max(size for route_name, size in sizes if route_name == name) for name, size in sizes if size}
            for sizes in ([(r.name, r.memory) for r in cheapest], [(f"rows of {r.name}", r.disk) for r in cheapest])
        )
        if (permutations or resampled) and not disk:  # or else a route has collected the rows
            disk["rows of the test"] = sum(reader.workload(group).bytes for group in reader.groups)
        networks = [network for side in self._sides for network in networks_of(side).values()]
        job = f"compare, {len(reader.layers_a)} × {len(reader.layers_b)} layers, {reader.n} samples"
        return ComparisonPlan(
            job, stages, {NETWORKS: bytes_of_weights(*networks), **memory}, disk, 2 * self._available,
            free_disk(Path(tempfile.gettempdir())), self._processes.count,
            "the resamples are not included" if resampled else "", routes=self._routes, speed=rate,
        )  # fmt: skip

    @torch.no_grad()
    def run(
        self, *, recipe: Mapping[str, Any] | None = None, permutations: int = 0, then: Then | None = None
    ) -> SimilarityAtlas:
        """Read the samples once and compute all values."""
        reader, processes = self._reader, self._processes
        folder = self._run.checkpoint_dir
        recipe = self._recipe(recipe or {})
        if permutations:
            recipe |= {"permutations": permutations, "seed": self._run.seed}
            self._print_cost(permutations)
        processes.check_same(recipe)
        keep_rows = permutations > 0 or then is not None
        with ExitStack() as stack:
            state_folder = Path(folder or stack.enter_context(tempfile.TemporaryDirectory()))
            checkpoint = Checkpoint(state_folder, processes.rank, lasting=folder is not None)
            route_names = processes.agree(
                checkpoint.begin(recipe, lambda: chosen_routes(self._routes, self._available))
            )
            start, stop = processes.part(reader.n)
            collectors = [
                Collector(group, reader, self._metrics, route_names, checkpoint.rows / str(i), stop - start, keep_rows)
                for i, group in enumerate(reader.groups)
            ]
            run_pass(reader, collectors, checkpoint, self._run)
            for collector in collectors:
                collector.all_reduce(processes.accelerator)
            values, undefined = self._values(collectors)
            tests = {}
            if permutations:
                (collector,) = collectors  # rows of whole samples form one group
                tests = {
                    label: collector.test(label, ~np.isnan(matrix), permutations, self._run, self._available)
                    for label, matrix in values.items()
                }
            if then is not None:
                then(collectors[0].rows_of_a(), values)
        distances = tuple(label for label, metric in self._metrics.items() if not metric.higher_is_better)
        ranges = {label: metric.range for label, metric in self._metrics.items()}
        return SimilarityAtlas(
            values, reader.layers_a, reader.layers_b, reader.n, reader.row_kind, route_names, distances, recipe,
            ranges, tests, undefined, sizes=self._sizes(),
        )  # fmt: skip

    def _print_cost(self, permutations: int) -> None:
        """Print the predicted duration of a long test."""
        seconds = permutations * flops_of_permutation(self._metrics, self._routes, self._reader) / speed()
        if seconds >= SILENT and self._run.shown("permuting"):
            pairs = f"{len(self._reader.layers_a)} × {len(self._reader.layers_b)} pairs of layers"
            print(
                f"{permutations} permutations of {pairs} take about {seconds / 60:.2g} minutes after the samples are "
                "read; use fewer layers, metrics or permutations to save time", file=sys.stderr, flush=True
            )  # fmt: skip

    def _values(self, collectors: Sequence[Collector]) -> tuple[dict[str, Array], dict[str, str]]:
        """Compute all metrics for all pairs of layers; return the values and the reasons for undefined pairs."""
        layers_a, layers_b = self._reader.layers_a, self._reader.layers_b
        values = {label: np.full((len(layers_a), len(layers_b)), np.nan) for label in self._metrics}
        undefined: dict[str, str] = {}
        for label, matrix in values.items():
            undefined |= {
                pair_name(label, layers_a[i], layers_b[j]): reason for (i, j), reason in self._reader.undefined.items()
            }
            for collector in collectors:
                matrix[collector.group.pairs], reasons = collector.values(label)
                reasons = self._mark_chance_level(label, collector.group, matrix) | reasons
                undefined |= {pair_name(label, layers_a[i], layers_b[j]): reason for (i, j), reason in reasons.items()}
            if np.isnan(matrix).all():
                reason = undefined[pair_name(label, layers_a[0], layers_b[0])]
                raise ValueError(
                    f"{label} is undefined for all pairs of layers; layer {layers_a[0]!r} of a and layer "
                    f"{layers_b[0]!r} of b: {reason}"
                )
        return values, undefined

    def _mark_chance_level(self, label: str, group: Group, matrix: Array) -> dict[tuple[int, int], str]:
        """Mark pairs of layers with a similarity that independent rows of the same widths reach too."""
        metric, reader = self._metrics[label], self._reader
        biased = metric.higher_is_better and metric.range[1] == 1 and not metric.independent_rows
        if not reader.per_sample or not biased:
            return {}
        reasons = {}
        for i, j in product(group.places_a, group.places_b):
            key_a, key_b = group.x[group.of_a[i]], group.y[group.of_b[group.places_b.index(j)]]
            widths = (reader.width(key_a), reader.width(key_b))
            if reader.n < 2 * max(widths) and (value := _chance(metric, reader.n, *widths)) > BY_CHANCE:
                matrix[i, j] = np.nan
                reasons[i, j] = (
                    f"independent rows score {value:.2f} on {reader.n} samples of {widths[0]} and {widths[1]} "
                    "features, so the value is not evidence; pass more samples, or use linear_cka:debiased=True"
                )
        return reasons

    def _sizes(self) -> dict[str, dict[str, LayerSize]]:
        reader = self._reader
        widths = {name: {layer: spec.width for layer, spec in specs.items()} for name, specs in reader.specs.items()}
        for group in reader.groups:
            for place, matrix in zip(group.places_a, group.of_a, strict=True):
                widths["a"][reader.layers_a[place]] = reader.width(group.x[matrix])
            for place, matrix in zip(group.places_b, group.of_b, strict=True):
                widths["b"][reader.layers_b[place]] = reader.width(group.y[matrix])
        shares = {"a": shares_of(self._sides[0]), "b": shares_of(self._sides[-1])}
        return {
            name: {layer: LayerSize(width, shares[name].get(layer)) for layer, width in layers.items()}
            for name, layers in widths.items()
        }

    def _recipe(self, more: Mapping[str, Any]) -> dict[str, Any]:
        record = {
            "a": self._sides[0].describe(), "b": self._sides[-1].describe(), "layers_a": self._reader.layers_a,
            "layers_b": self._reader.layers_b, "rows": self._reader.row_kind, **more,
            "batch_size": self._run.batch_size, "processes": self._processes.count,
            "metrics": {label: {"name": m.name, "options": m.options} for label, m in self._metrics.items()},
            "versions": versions(("metrics", m.name) for m in self._metrics.values()),
        }  # fmt: skip
        return shareable(record)


@cache
def _chance(metric: ActivationMetric, n: int, *widths: int) -> float:
    """Return the value of a metric on independent normal rows, with capped widths; NaN if it is undefined."""
    random = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, min(width, CHEAP), generator=random, dtype=torch.float64) for width in widths)
    try:
        return float(metric.function(x, y, **metric.options))
    except ValueError:
        return float("nan")


def _check(metrics: Mapping[str, ActivationMetric], reader: LayerReader, processes: Processes) -> None:
    """Raise the errors that can be detected before the data is read."""
    start, stop = processes.part(reader.n)
    a, b = ({reader.width(key) for group in reader.groups for key in getattr(group, side)} for side in "xy")
    if reader.n < LEAST:
        raise ValueError(f"a comparison requires at least {LEAST} samples, got {reader.n}; pass more samples")
    for label, metric in metrics.items():
        least = metric.min_rows("x", 1)
        if metric.minibatched and reader.per_sample and stop - start < least:
            raise ValueError(
                f"{label} requires at least {least} samples in each process, but {processes.count} processes share "
                f"{reader.n}; use fewer processes"
            )
        if not reader.per_sample and metric.independent_rows:
            warn(
                f"{label} assumes independent rows, but the positions of one sample depend on each other: two "
                "unrelated networks can score .7. Use rows='mean' or 'flat'"
            )
        if reader.per_sample:
            _check_count(label, metric, reader)
        if metric.equal_widths and not a & b:
            raise ValueError(
                f"{label} requires layers of equal width, got the widths {sorted(a)} of a and {sorted(b)} of b; select "
                "other layers"
            )


def _check_count(label: str, metric: ActivationMetric, reader: LayerReader) -> None:
    """Raise an error if all layers of a side are too wide for this number of samples."""
    least = max(metric.min_rows("x", 1), metric.min_rows("y", 1))
    if reader.n < least:
        raise ValueError(f"{label} requires at least {least} samples, got {reader.n}; pass more samples")
    (group,) = reader.groups  # rows of whole samples form one group, because they do not have positions
    for name, layers, keys, places, min_rows in (
        ("a", reader.layers_a, group.x, group.of_a, partial(metric.min_rows, "x")),
        ("b", reader.layers_b, group.y, group.of_b, partial(metric.min_rows, "y")),
    ):
        widths = [reader.width(keys[place]) for place in places]
        if reader.n >= min(map(min_rows, widths)):
            continue
        few: dict[str, list[str]] = {}
        for layer, width in zip(layers, widths, strict=True):
            few.setdefault(f"{min_rows(width)} samples for layers of {name} with {width} features", []).append(layer)
        requirements = []
        for requirement, names in few.items():
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            requirements.append(f"{requirement} ({', '.join(map(repr, names[:_SHOWN]))}{more})")
        raise ValueError(
            f"{label} requires at least {', '.join(requirements)}, got {reader.n}; pass more samples or use "
            "other layers" + see("too-few-samples")
        )
