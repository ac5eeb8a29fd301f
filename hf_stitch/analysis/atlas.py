"""How alike is every layer of one network to every layer of another: :func:`compare`, in one pass over the data."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..adapters import Adapter, load
from ..data import Samples, check_same_order
from ..metrics import Metric, MomentsMetric, build_metric
from ..models.stitching import check_meet, versions
from ..representation import ROWS_POLICIES, RowsPolicy
from ..statistics import HSIC, Grams, LayerMoments, MinibatchGrams
from .activations import Activations, Group, Key, Network, Reader, Side, Watch

if TYPE_CHECKING:
    import pandas
    from accelerate import Accelerator
    from matplotlib.figure import Figure
    from rich.table import Table

Array = NDArray[np.float64]
T = TypeVar("T")

SAVING = 0.05
"""Share of the time that saving the state of a comparison may take."""


# -- what comes out ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class SimilarityAtlas:
    """What :func:`compare` found: for every metric a value for each pair of layers.

    Attributes:
        values: By metric ``(layers of a, layers of b)``, float64.
        layers_a: What the rows are called.
        layers_b: What the columns are called.
        n: Number of samples.
        rows: The rows policy.
        routes: By metric, what it was computed from: ``moments``, ``grams``, ``features`` or ``minibatches``.
        distances: Those of the metrics of which less is more alike.
        recipe: What it takes to do it again: both sides with hashes, data, metrics with options, batch size, versions.
    """

    values: Mapping[str, Array]
    layers_a: tuple[str, ...]
    layers_b: tuple[str, ...]
    n: int
    rows: RowsPolicy
    routes: Mapping[str, str]
    distances: tuple[str, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, metric: str) -> Array:
        """The values of a metric: ``atlas["linear_cka"]``.

        Raises:
            KeyError: If the atlas has no such metric.
        """
        if metric not in self.values:
            raise KeyError(f"the atlas has no metric {metric!r}; it has {', '.join(self.values)}")
        return self.values[metric]

    def best_matches(self, metric: str | None = None, axis: Literal["a", "b"] = "a") -> dict[str, str]:
        """For each layer of one side the layer of the other that is most alike, by a metric (default: the first).

        Args:
            metric: One of the metrics of the atlas.
            axis: The side whose layers are looked up.

        Example:
            >>> atlas = SimilarityAtlas({"cka": np.eye(2)}, ("a0", "a1"), ("b0", "b1"), 9, "mean", {"cka": "moments"})
            >>> atlas.best_matches()
            {'a0': 'b0', 'a1': 'b1'}
        """
        if axis not in ("a", "b"):
            raise ValueError(f"axis must be 'a' or 'b', got {axis!r}")
        best = self._best(metric or next(iter(self.values)), axis)
        own, other = (self.layers_a, self.layers_b) if axis == "a" else (self.layers_b, self.layers_a)
        return {layer: other[place] for layer, place in zip(own, best, strict=True)}

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each metric and pair of layers: ``metric``, ``layer_a``, ``layer_b``, ``value``."""
        import pandas

        return pandas.DataFrame(
            [
                {"metric": metric, "layer_a": a, "layer_b": b, "value": float(values[i, j])}
                for metric, values in self.values.items()
                for i, a in enumerate(self.layers_a)
                for j, b in enumerate(self.layers_b)
            ]
        )

    def plot(self, metric: str | None = None) -> Figure:
        """The values of a metric (default: the first) as a heat map; for each layer of a the best match is framed."""
        from ..plots import heatmap

        name = metric or next(iter(self.values))
        marked = np.zeros(self[name].shape, bool)
        marked[np.arange(len(self.layers_a)), self._best(name, "a")] = True
        title = f"{self.n} samples, rows: {self.rows}"
        return heatmap(self[name], self.layers_a, self.layers_b, title=title, label=name, marked=marked)

    def save(self, folder: str | Path) -> None:
        """Write ``atlas.json`` and ``values.npz`` into a folder; of several processes, the first one does."""
        if _Processes.of(None).rank:
            return
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        record = {
            "metrics": list(self.values), "layers_a": self.layers_a, "layers_b": self.layers_b, "n": self.n,
            "rows": self.rows, "routes": dict(self.routes), "distances": self.distances, "recipe": dict(self.recipe),
        }  # fmt: skip
        np.savez(folder / "values.npz", **{str(i): values for i, values in enumerate(self.values.values())})  # type: ignore[arg-type]
        (folder / "atlas.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> SimilarityAtlas:
        """Read what :meth:`save` wrote.

        Raises:
            FileNotFoundError: If there is no atlas in the folder.
            ValueError: If the files lack something, hold something else beside, or do not fit together.
        """
        folder = Path(folder)
        record = json.loads((folder / "atlas.json").read_text(encoding="utf-8"))
        names = {"metrics", "layers_a", "layers_b", "n", "rows", "routes", "distances", "recipe"}
        if record.keys() != names:
            raise ValueError(f"{folder / 'atlas.json'} must have the keys {sorted(names)}, got {sorted(record)}")
        metrics = record.pop("metrics")
        for key in ("layers_a", "layers_b", "distances"):
            record[key] = tuple(record[key])
        shape = (len(record["layers_a"]), len(record["layers_b"]))
        with np.load(folder / "values.npz") as arrays:
            values = {name: arrays[str(i)] for i, name in enumerate(metrics) if str(i) in arrays}
            if len(arrays) != len(metrics) or any(v.shape != shape or v.dtype != np.float64 for v in values.values()):
                raise ValueError(f"{folder / 'values.npz'} must hold {len(metrics)} float64 arrays of shape {shape}")
        return cls(values=values, **record)

    def __rich__(self) -> Table:
        """The table that ``rich`` prints: for each layer of a its best match, by every metric."""
        from rich.table import Table
        from rich.text import Text

        table = Table("layer of a", title=f"Best matches among {len(self.layers_b)} layers of b", title_justify="left")
        table.caption = f"{self.n} samples, rows: {self.rows}"
        best = {metric: self._best(metric, "a") for metric in self.values}
        for metric in self.values:
            table.add_column(Text(f"{metric} ({self.routes[metric]})"))
        for i, layer in enumerate(self.layers_a):
            cells = [f"{self.layers_b[best[m][i]]}  {values[i, best[m][i]]:.3f}" for m, values in self.values.items()]
            table.add_row(Text(layer), *map(Text, cells))
        return table

    def __str__(self) -> str:
        """The table as text."""
        return _as_text(self)

    def _best(self, metric: str, axis: str) -> NDArray[np.intp]:
        values = -self[metric] if metric in self.distances else self[metric]
        return values.argmax(1 if axis == "a" else 0)


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
class Plan:
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

    def __str__(self) -> str:
        """The table as text."""
        return _as_text(self)


# -- the one call ------------------------------------------------------------------------------------------------------
Comparable = str | nn.Module | Adapter | Activations


@overload
def compare(
    a: Comparable, b: Comparable, data: Any = None, *, layers_a: Iterable[str] | None = None,
    layers_b: Iterable[str] | None = None, metrics: Iterable[str | Metric] = ("linear_cka",), rows: RowsPolicy = "mean",
    data_b: Any = None, batch_size: int = 64, plan: Literal[False] = False, resume: str | Path | None = None,
    accelerator: Accelerator | None = None, progress: bool = True,
) -> SimilarityAtlas: ...  # fmt: skip
@overload
def compare(
    a: Comparable, b: Comparable, data: Any = None, *, layers_a: Iterable[str] | None = None,
    layers_b: Iterable[str] | None = None, metrics: Iterable[str | Metric] = ("linear_cka",), rows: RowsPolicy = "mean",
    data_b: Any = None, batch_size: int = 64, plan: Literal[True], resume: str | Path | None = None,
    accelerator: Accelerator | None = None, progress: bool = True,
) -> Plan: ...  # fmt: skip
@torch.no_grad()
def compare(
    a: Comparable, b: Comparable, data: Any = None, *, layers_a: Iterable[str] | None = None,
    layers_b: Iterable[str] | None = None, metrics: Iterable[str | Metric] = ("linear_cka",), rows: RowsPolicy = "mean",
    data_b: Any = None, batch_size: int = 64, plan: bool = False, resume: str | Path | None = None,
    accelerator: Accelerator | None = None, progress: bool = True,
) -> SimilarityAtlas | Plan:  # fmt: skip
    """Compare every layer of one network with every layer of another, in one pass over the data.

    Each network runs once per batch; the same model on both sides runs once for both. Where several routes lead to the
    same value (co-moments, d × d, or Gram matrices, n × n), the cheaper one that fits into memory is taken and named in
    the atlas. Under ``positions`` grids of different sizes are brought to that of b's layer (bilinear), prefix tokens
    and masked positions are left out.

    Under ``accelerate launch`` every process takes a part of the samples and all get the same atlas; nothing is to be
    changed in the call. ``minibatch_cka`` alone depends on the order of the samples, and on the number of processes.

    Args:
        a: A network (an adapter, a live module, or a name for :func:`hf_stitch.load`) or saved :class:`Activations`.
        b: The other.
        data: Raw samples, the same for both: what :meth:`hf_stitch.Samples.of` takes; ``None`` if nothing has to run.
        layers_a: Layers of a: any modules that run once; default: its cuts.
        layers_b: Layers of b.
        metrics: Names of ``hf_stitch.registries.metrics``, or metrics (``build_metric("linear_cka", debiased=True)``).
        rows: The rows policy (:meth:`hf_stitch.Representation.rows`).
        data_b: Where b is to see other samples (the same sentence in another language): as many, with the same ids in
            the same order.
        batch_size: Samples per forward.
        plan: Say what it would take, and run nothing but two samples.
        resume: A folder for the state of the comparison; one that was interrupted goes on from there, to the same
            bits. Give it a folder of its own.
        accelerator: The ``accelerate.Accelerator`` that knows the processes; default: found where there are several.
        progress: Show a progress bar.

    Returns:
        The atlas, or with ``plan`` the plan.

    Raises:
        NotACutError: If a layer does not exist, does not run, or runs several times in a forward.
        ValueError: If sides hold other samples or the same in another order, layers cannot be compared under the
            policy, activations are NaN or infinite (which layer, which sample), samples are too few for a metric or
            masked entirely, a metric is undefined for a pair (which), no route fits into memory, or the folder holds
            the state of another comparison.

    Example:
        >>> import hf_stitch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> nets = [Sequential(Linear(4, 8), ReLU(), Linear(8, 2)) for _ in range(2)]
        >>> a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
        >>> atlas = compare(a, b, torch.randn(100, 4), metrics=["linear_cka", "procrustes"])
        >>> atlas["linear_cka"].shape, atlas.n, dict(atlas.routes)
        ((2, 2), 100, {'linear_cka': 'moments', 'procrustes': 'moments'})
    """
    if rows not in ROWS_POLICIES:
        raise ValueError(f"rows must be one of {', '.join(ROWS_POLICIES)}, got {rows!r}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    processes = _Processes.of(accelerator)
    scores = _metrics(metrics)
    sides = _sides(a, b, data, data_b, rows, processes)
    watch = Watch(sides, layers_a, layers_b, rows)
    _check(scores, watch, processes)
    available = _available(watch.device)
    routes = _routes(scores, watch, available)
    if plan:
        forwards = watch.seconds * watch.n / processes.count
        return Plan(routes, (len(watch.layers_a), len(watch.layers_b)), watch.n, forwards, _speed(), available)
    described = {
        "a": sides[0].describe(), "b": sides[-1].describe(), "layers_a": watch.layers_a, "layers_b": watch.layers_b,
        "rows": rows, "metrics": {label: {"name": m.name, "options": m.options} for label, m in scores.items()},
        "batch_size": batch_size, "processes": processes.count, "versions": dict(versions()),
    }  # fmt: skip
    recipe = json.loads(json.dumps(described))
    with ExitStack() as stack:
        folder = Path(resume or stack.enter_context(tempfile.TemporaryDirectory()))
        state = _State(folder, processes.rank, lasting=resume is not None)
        taken = processes.agree(state.begin(recipe, lambda: _taken(routes, available)))
        collectors = [
            _Collector(group, watch, scores, taken, state.rows / str(i)) for i, group in enumerate(watch.groups)
        ]
        _collect(watch, collectors, state, processes, batch_size, progress)
        values = {label: np.empty((len(watch.layers_a), len(watch.layers_b))) for label in scores}
        for collector in collectors:
            collector.all_reduce(processes.accelerator)
            for label in scores:
                values[label][:, collector.group.places] = collector.values(label)
    distances = tuple(label for label, metric in scores.items() if metric.is_distance)
    return SimilarityAtlas(values, watch.layers_a, watch.layers_b, watch.n, rows, taken, distances, recipe)


# -- before the pass ---------------------------------------------------------------------------------------------------
def _metrics(metrics: Iterable[str | Metric]) -> dict[str, Metric]:
    """The metrics by label: the name, with the options that are not the default."""
    if isinstance(metrics, (str, Metric)):
        raise TypeError(f"metrics must be a list of names or metrics, got {metrics!r}; write [{metrics!r}]")
    scores: dict[str, Metric] = {}
    for metric in map(build_metric, metrics):
        defaults = type(metric)().options
        changed = [f"{key}={value}" for key, value in metric.options.items() if value is not defaults[key]]
        label = metric.name + (f"({', '.join(changed)})" if changed else "")
        if label in scores:
            raise ValueError(f"metric {label} is asked for twice")
        if metric.statistic == "outputs":
            raise ValueError(f"metric {label} compares what networks answer, not their layers; call its function")
        scores[label] = metric
    if not scores:
        raise ValueError("compare needs at least one metric, got none")
    return scores


def _sides(
    a: Comparable, b: Comparable, data: Any, data_b: Any, rows: RowsPolicy, processes: _Processes
) -> tuple[Side, ...]:
    """Both sides, or the one that stands on both."""
    if isinstance(a, Activations) and isinstance(b, Activations) and data is not None:
        raise ValueError("both sides are saved activations, to which no data can be shown; leave data out")
    reader = None if data is None else Reader(Samples.of(data))
    other = reader if data_b is None else Reader(Samples.of(data_b))
    first = _side("a", a, reader, rows, processes)
    if (a is b or (isinstance(a, str) and a == b)) and data_b is None:
        return (first,)
    second = _side("b", b, other, rows, processes)
    if isinstance(first, Network) and isinstance(second, Network):
        one = first.adapter.model is second.adapter.model and first.adapter.processor is second.adapter.processor
        if one and data_b is None:
            return (first,)
        check_meet(first.adapter, second.adapter, rows)
    check_same_order(first.ids, second.ids)
    return first, second


def _side(name: str, side: Comparable, reader: Reader | None, rows: RowsPolicy, processes: _Processes) -> Side:
    if isinstance(side, Activations):
        if side.rows not in (None, rows):
            raise ValueError(f"the activations of {name} were recorded with rows={side.rows!r}, not {rows!r}")
        return side
    if reader is None:
        raise ValueError(f"{name} is a network and needs data to run on")
    return Network(processes.load(side), reader)


def _check(scores: Mapping[str, Metric], watch: Watch, processes: _Processes) -> None:
    """Refuse what is known to fail before the data are read."""
    if watch.n < processes.count:
        raise ValueError(f"{watch.n} samples are not enough for {processes.count} processes")
    for label, metric in scores.items():
        if watch.policy == "positions" and metric.statistic in ("debiased", "grams"):
            warnings.warn(
                f"{label} takes rows for independent samples, and positions of one sample are not: two networks that "
                "have nothing in common can score .7. Use rows='mean' or 'flatten'",
                stacklevel=3,
            )
        least = max(4 if metric.statistic in ("debiased", "grams") else 2, metric.options.get("k", 0) + 1)
        if watch.policy != "positions" and watch.n < least:
            raise ValueError(f"{label} takes at least {least} samples, got {watch.n}; give more")
        widths = {watch.width(key) for group in watch.groups for key in group.keys}
        if metric.equal_widths and len(widths) > 1:
            raise ValueError(f"{label} takes layers of one width, got widths {sorted(widths)}; name such layers")


def _routes(scores: Mapping[str, Metric], watch: Watch, available: int) -> tuple[Route, ...]:
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
                flops += 2 * n**2 * (both + len(pairs))
                memory += 8 * n**2 * (len(group.keys) + 1)
                disk += n * both * itemsize
            case "minibatches":
                size = min(metric.options["batch_size"], n)
                flops += 2 * n * size * (both / (8 / itemsize) + len(pairs))
                memory += 2 * size * both * itemsize + 8 * size**2 * len(group.keys)
            case _:
                wide = [2 * n * (dx * min(n, dx) + dy * min(n, dy) + min(n, dx) * min(n, dy)) for dx, dy in pairs]
                square = not isinstance(metric, MomentsMetric)
                flops += once * sum(wide) + square * once * 4 * n**2 * sum(map(sum, pairs))
                memory = max(memory, 24 * n * max(map(sum, pairs)) + square * 24 * n**2)
                disk += n * both * itemsize
    return Route(label, way, flops, memory, disk)


def _taken(routes: Sequence[Route], available: int) -> dict[str, str]:
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


def _available(device: torch.device) -> int:
    """Bytes that may be taken: half of what is free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    import psutil  # type: ignore[import-untyped]

    return int(psutil.virtual_memory().available) // 2


def _speed() -> float:
    """Floating-point operations in a second, of a product in float64 on this machine."""
    size, times = 384, 4
    x = torch.ones(size, size, dtype=torch.float64) @ torch.ones(size, size, dtype=torch.float64)
    start = time.perf_counter()
    for _ in range(times):
        x = x @ x / size**3
    return 2 * size**3 * times / (time.perf_counter() - start)


# -- the pass ----------------------------------------------------------------------------------------------------------
def _collect(
    watch: Watch,
    collectors: Sequence[_Collector],
    state: _State,
    processes: _Processes,
    batch_size: int,
    progress: bool,
) -> None:
    """Run this process's part of the samples, from where it was interrupted."""
    from tqdm.auto import tqdm

    start, stop = processes.part(watch.n)
    saved = state.load(watch.device)
    if saved is not None:
        start, tensors = saved
        for number, collector in enumerate(collectors):
            collector.load(_within(f"{number}/", tensors))
    hide = None if progress and processes.rank == 0 else True  # None: shown on terminals only
    with tqdm(total=stop - start, desc="comparing", unit="sample", delay=3, disable=hide) as bar:
        while start < stop:
            end = min(start + batch_size, stop)
            found = watch.rows(start, end)
            for collector in collectors:
                collector.update(found)
            if state.due(end == stop):
                state.save(end, _named({str(i): c.state_dict() for i, c in enumerate(collectors)}))
            bar.update(end - start)
            start = end


class _Collector:
    """What is collected of a group of layers, and the values that follow."""

    def __init__(
        self, group: Group, watch: Watch, scores: Mapping[str, Metric], taken: Mapping[str, str], folder: Path
    ) -> None:
        self.group, self._scores, self._taken = group, scores, taken
        self._names = [[key[1] for key in keys] for keys in (group.x, group.y)]
        ways = set(taken.values())
        self._moments: LayerMoments | None = None
        self._rows: _KeptRows | None = None
        if "moments" in ways:
            x, y = ([watch.probe[key].double().mean(0) for key in keys] for keys in (group.x, group.y))
            self._moments = LayerMoments(x, None if group.same else y)
        if ways & {"grams", "features"}:
            self._rows = _KeptRows(folder, [watch.probe[key] for key in group.keys])
        sizes = {m.options["batch_size"] for label, m in scores.items() if taken[label] == "minibatches"}
        self._minibatches = {size: MinibatchGrams(size, group.same) for size in sorted(sizes)}

    def update(self, found: Mapping[Key, Tensor]) -> None:
        """Add a batch."""
        x, y = ([found[key] for key in keys] for keys in (self.group.x, self.group.y))
        for statistic in (self._moments, *self._minibatches.values()):
            if statistic is not None:
                statistic.update(x, None if self.group.same else y)
        if self._rows is not None:
            self._rows.update([found[key] for key in self.group.keys])

    def state_dict(self) -> dict[str, Tensor]:
        """All there is, but for rows, which are in files."""
        parts = {f"minibatches.{size}": grams.state_dict() for size, grams in self._minibatches.items()}
        if self._moments is not None:
            parts["moments"] = self._moments.state_dict()
        if self._rows is not None:
            parts["rows"] = {"n": torch.tensor(self._rows.n)}
        return _named(parts)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state_dict` gave."""
        for size in self._minibatches:
            self._minibatches[size] = MinibatchGrams.from_state_dict(_within(f"minibatches.{size}/", state))
        if self._moments is not None:
            self._moments = LayerMoments.from_state_dict(_within("moments/", state))
        if self._rows is not None:
            self._rows.cut(int(state["rows/n"]))

    def all_reduce(self, accelerator: Accelerator | None) -> None:
        """Give every process what all have collected."""
        if accelerator is None:
            return
        for statistic in (self._moments, self._rows, *self._minibatches.values()):
            if statistic is not None:
                statistic.all_reduce(accelerator)

    def values(self, label: str) -> Array:
        """A metric for all layers of a and those layers of b that are in the group."""
        metric, way = self._scores[label], self._taken[label]
        if way == "minibatches":
            distinct = self._alignment(label, self._minibatches[metric.options["batch_size"]].hsic())
        elif metric.name == "linear_cka":
            statistic = self._moments if way == "moments" else self._grams
            assert statistic is not None
            distinct = self._alignment(label, statistic.hsic(metric.options["debiased"]))
        else:
            distinct = self._pairs(label, metric, self._of_moments if way == "moments" else self._of_rows)
        return distinct[np.ix_(self.group.of_a, self.group.of_b)]

    @cached_property
    def _grams(self) -> Grams:
        assert self._rows is not None
        rows = dict(zip(self.group.keys, self._rows.tensors, strict=True))
        x, y = ([rows[key] for key in keys] for keys in (self.group.x, self.group.y))
        return Grams(x, None if self.group.same else y)

    def _alignment(self, label: str, hsic: HSIC) -> Array:
        """Centred kernel alignment: HSIC over what it is of each side with itself."""
        for side, names, own in zip("ab", self._names, (hsic.xx, hsic.yy), strict=True):
            if bool((own <= 0).any()):
                place = int((own <= 0).nonzero()[0])
                raise ValueError(
                    f"{label} is undefined for layer {names[place]!r} of {side}: HSIC with itself is "
                    f"{own[place].item():.1e}; is the layer dead, or are there too few samples?"
                )
        return (hsic.xy / torch.outer(hsic.xx.sqrt(), hsic.yy.sqrt())).cpu().numpy()

    def _pairs(self, label: str, metric: Metric, value: Callable[[Metric, int, int], float]) -> Array:
        names_a, names_b = self._names
        mirrored = self.group.same and metric.symmetric
        found = np.empty((len(names_a), len(names_b)))
        for i, a in enumerate(names_a):
            for j, b in enumerate(names_b):
                if mirrored and j < i:
                    found[i, j] = found[j, i]
                    continue
                try:
                    found[i, j] = value(metric, i, j)
                except (ValueError, ArithmeticError) as error:
                    raise ValueError(f"{label} of layer {a!r} of a and layer {b!r} of b: {error}") from error
        return found

    def _of_moments(self, metric: Metric, i: int, j: int) -> float:
        assert self._moments is not None and isinstance(metric, MomentsMetric)
        return metric.from_moments(self._moments.moments(i, j))

    def _of_rows(self, metric: Metric, i: int, j: int) -> float:
        assert self._rows is not None
        x, y = (self._rows.tensors[self.group.keys.index(key)] for key in (self.group.x[i], self.group.y[j]))
        return type(metric).function(x, y, **metric.options).item()


class _KeptRows:
    """Rows of some matrices, each in a file that is mapped into memory when they are all there.

    Args:
        folder: Where the files are.
        like: Rows of the width and dtype of each matrix; what is narrower than float32 is kept in that.
    """

    def __init__(self, folder: Path, like: Sequence[Tensor]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.n = 0
        self._widths = [rows.shape[1] for rows in like]
        self._dtypes = [torch.promote_types(rows.dtype, torch.float32) for rows in like]
        self._paths = [folder / f"{i}.rows" for i in range(len(like))]
        for path in self._paths:
            path.touch()

    def update(self, matrices: Sequence[Tensor]) -> None:
        """Add a batch to every matrix."""
        for path, dtype, rows in zip(self._paths, self._dtypes, matrices, strict=True):
            with path.open("ab") as file:
                file.write(rows.to("cpu", dtype).contiguous().numpy().data)
        self.n += len(matrices[0])

    def cut(self, n: int) -> None:
        """Keep the first rows, the others having come after the state was saved."""
        for path, width, dtype in zip(self._paths, self._widths, self._dtypes, strict=True):
            if path.stat().st_size < n * width * dtype.itemsize:
                raise ValueError(f"{path} is shorter than the state says; start again in an empty folder")
            os.truncate(path, n * width * dtype.itemsize)
        self.n = n

    @cached_property
    def tensors(self) -> list[Tensor]:
        """All rows of every matrix."""
        return [
            torch.from_file(str(path), shared=False, size=self.n * width, dtype=dtype).view(self.n, width)
            for path, width, dtype in zip(self._paths, self._widths, self._dtypes, strict=True)
        ]

    def all_reduce(self, accelerator: Accelerator) -> None:
        """Give every process the rows of all, in the order of the ranks."""
        if accelerator.num_processes == 1:
            return
        from accelerate.utils import gather_object

        for number, path in enumerate(self._paths):
            parts = gather_object([path.read_bytes()])
            self._paths[number] = path.with_suffix(".all")
            self._paths[number].write_bytes(b"".join(parts))
        self.n = sum(gather_object([self.n]))


# -- several processes, and interruptions ------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Processes:
    """The processes that share the samples; one, if there is no accelerator."""

    accelerator: Accelerator | None

    @classmethod
    def of(cls, accelerator: Accelerator | None) -> _Processes:
        """Those that are given, or those that were launched."""
        if accelerator is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import Accelerator

            accelerator = Accelerator()
        return cls(accelerator)

    @property
    def count(self) -> int:
        """How many there are."""
        return 1 if self.accelerator is None else self.accelerator.num_processes

    @property
    def rank(self) -> int:
        """Which one this is."""
        return 0 if self.accelerator is None else self.accelerator.process_index

    def part(self, n: int) -> tuple[int, int]:
        """This process's share of n samples, from where to where: none is left out, none comes twice."""
        return n * self.rank // self.count, n * (self.rank + 1) // self.count

    def load(self, model: str | nn.Module | Adapter) -> Adapter:
        """An adapter; a model that is loaded here goes to the device of this process."""
        adapter = load(model)
        if isinstance(model, str) and self.accelerator is not None:
            adapter.model.to(self.accelerator.device)
        return adapter

    def agree(self, value: T) -> T:
        """What the first process says."""
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        return broadcast_object_list([value])[0]


class _State:
    """The state of a comparison in a folder, so that an interrupted one goes on.

    ``comparison.json`` says what is compared and by which routes, ``state-<rank>.safetensors`` holds what a process
    has collected and up to where, ``rows-<rank>`` rows.

    Args:
        folder: Where.
        rank: Of the process.
        lasting: Whether anything is saved; a comparison that keeps rows needs a folder anyway.
    """

    def __init__(self, folder: Path, rank: int, lasting: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.rows = folder / f"rows-{rank}"
        self._about, self._path = folder / "comparison.json", folder / f"state-{rank}.safetensors"
        self._writes, self._lasting = rank == 0, lasting
        self._took, self._saved = 0.0, -math.inf
        if not self._path.exists():
            shutil.rmtree(self.rows, ignore_errors=True)

    def begin(self, recipe: Mapping[str, Any], routes: Callable[[], dict[str, str]]) -> dict[str, str]:
        """The routes of the comparison that was interrupted, or those of a new one.

        Raises:
            ValueError: If the folder holds another comparison; the message says what differs.
        """
        if self._about.is_file():
            held = json.loads(self._about.read_text(encoding="utf-8"))
            differences = [
                f"{key} ({_short(held['recipe'].get(key))}, now {_short(recipe.get(key))})"
                for key in {**held["recipe"], **recipe}
                if held["recipe"].get(key) != recipe.get(key)
            ]
            if differences:
                raise ValueError(
                    f"{self._about.parent} holds the state of another comparison, which differs in "
                    f"{'; '.join(differences)}. Use another folder, or empty this one"
                )
            return held["routes"]
        taken = routes()
        if self._writes and self._lasting:
            text = json.dumps({"recipe": recipe, "routes": taken}, indent=2)
            _replace(self._about, lambda path: path.write_text(text, encoding="utf-8"))
        return taken

    def load(self, device: torch.device) -> tuple[int, dict[str, Tensor]] | None:
        """The position that was reached, and what had been collected until there."""
        if not self._path.is_file():
            return None
        from safetensors.torch import load_file

        tensors = load_file(self._path, str(device))
        return int(tensors.pop("position")), tensors

    def due(self, done: bool) -> bool:
        """Whether to save now: at the end, and as often as takes little of the time."""
        return self._lasting and (done or time.monotonic() - self._saved > self._took / SAVING)

    def save(self, position: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the state; a process killed meanwhile leaves the one before."""
        from safetensors.torch import save_file

        start = time.monotonic()
        state = {"position": torch.tensor(position), **{key: part.cpu().contiguous() for key, part in tensors.items()}}
        _replace(self._path, lambda path: save_file(state, path))
        self._saved = time.monotonic()
        self._took = self._saved - start


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file such that it is there whole or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    write(unfinished)
    unfinished.replace(path)


def _named(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{name}/{key}": part for name, state in parts.items() for key, part in state.items()}


def _within(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): part for key, part in tensors.items() if key.startswith(prefix)}


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _bytes(count: float) -> str:
    """For example ``1.4 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _as_text(shown: Any) -> str:
    from rich.console import Console

    console = Console(width=120)
    with console.capture() as captured:
        console.print(shown)
    return captured.get()
