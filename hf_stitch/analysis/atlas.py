"""How alike is every layer of one network to every layer of another: :func:`compare`, in one pass over the data."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hf_stitch.adapters import Adapter
from hf_stitch.analysis.activations import Activations, Network, Reader, Side, Watch
from hf_stitch.analysis.alignment import ALIGN, Align, aligned
from hf_stitch.analysis.collecting import Collector, run_pass
from hf_stitch.analysis.routes import Plan, as_text, available_memory, routes_of, speed, taken_routes
from hf_stitch.data import Samples, check_same_order
from hf_stitch.metrics import Metric, build_metric
from hf_stitch.processes import Processes
from hf_stitch.representation import ROWS_POLICIES, RowsPolicy
from hf_stitch.storage.checkpoint import Checkpoint
from hf_stitch.workflows._stitch import check_meet, versions

if TYPE_CHECKING:
    import pandas
    from accelerate import Accelerator
    from matplotlib.figure import Figure
    from rich.table import Table

Array = NDArray[np.float64]

_SHOWN = 3
"""Layers that an error names, where there may be many."""


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
        from hf_stitch.plots import heatmap

        name = metric or next(iter(self.values))
        marked = np.zeros(self[name].shape, bool)
        marked[np.arange(len(self.layers_a)), self._best(name, "a")] = True
        title = f"{self.n} samples, rows: {self.rows}"
        return heatmap(self[name], self.layers_a, self.layers_b, title=title, label=name, marked=marked)

    def save(self, folder: str | Path) -> None:
        """Write ``atlas.json`` and ``values.npz`` into a folder; of several processes, the first one does."""
        if Processes.of(None).rank:
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
        return as_text(self)

    def _best(self, metric: str, axis: str) -> NDArray[np.intp]:
        values = -self[metric] if metric in self.distances else self[metric]
        return values.argmax(1 if axis == "a" else 0)


# -- the one call ------------------------------------------------------------------------------------------------------
Comparable = str | nn.Module | Adapter | Activations


@overload
def compare(
    a: Comparable, b: Comparable, data: Any = None, *, layers_a: Iterable[str] | None = None,
    layers_b: Iterable[str] | None = None, metrics: Iterable[str | Metric] = ("linear_cka",), rows: RowsPolicy = "mean",
    align: Align = "tokens", data_b: Any = None, batch_size: int = 64, plan: Literal[False] = False,
    resume: str | Path | None = None, accelerator: Accelerator | None = None, progress: bool = True,
) -> SimilarityAtlas: ...  # fmt: skip
@overload
def compare(
    a: Comparable, b: Comparable, data: Any = None, *, layers_a: Iterable[str] | None = None,
    layers_b: Iterable[str] | None = None, metrics: Iterable[str | Metric] = ("linear_cka",), rows: RowsPolicy = "mean",
    align: Align = "tokens", data_b: Any = None, batch_size: int = 64, plan: Literal[True],
    resume: str | Path | None = None, accelerator: Accelerator | None = None, progress: bool = True,
) -> Plan: ...  # fmt: skip
@torch.no_grad()
def compare(
    a: Comparable, b: Comparable, data: Any = None, *, layers_a: Iterable[str] | None = None,
    layers_b: Iterable[str] | None = None, metrics: Iterable[str | Metric] = ("linear_cka",), rows: RowsPolicy = "mean",
    align: Align = "tokens", data_b: Any = None, batch_size: int = 64, plan: bool = False,
    resume: str | Path | None = None, accelerator: Accelerator | None = None, progress: bool = True,
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
        align: Which rows of texts correspond under ``positions``. ``tokens``: token i of both sides, which takes one
            tokenizer. ``offsets``: the smallest pieces of text that both tokenizers cut out, each the mean of its
            tokens' vectors, without special tokens, white space and what only one side saw.
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
            policy, activations are NaN or infinite (which layer, which sample), samples are too few for a metric
            (which layers) or masked entirely, a metric is undefined for a pair (which), offsets cannot be aligned, no
            route fits into memory, or the folder holds the state of another job.

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
    if align not in ALIGN:
        raise ValueError(f"align must be one of {', '.join(ALIGN)}, got {align!r}")
    if align == "offsets" and rows != "positions":
        raise ValueError(f"align='offsets' goes with rows='positions': under rows={rows!r} no token is a row")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    processes = Processes.of(accelerator)
    scores = labelled(metrics)
    sides = _sides(a, b, data, data_b, rows, align, processes)
    if align == "offsets":
        sides = aligned(sides)
    ordered = any("permutation" not in metric.invariances for metric in scores.values())
    watch = Watch(sides, layers_a, layers_b, rows, ordered)
    _check(scores, watch, processes)
    available = available_memory(watch.device)
    routes = routes_of(scores, watch, available)
    if plan:
        forwards = watch.seconds * watch.n / processes.count
        return Plan(routes, (len(watch.layers_a), len(watch.layers_b)), watch.n, forwards, speed(), available)
    described = {
        "a": sides[0].describe(), "b": sides[-1].describe(), "layers_a": watch.layers_a, "layers_b": watch.layers_b,
        "rows": rows, "align": align, "batch_size": batch_size, "processes": processes.count,
        "metrics": {label: {"name": m.name, "options": m.options} for label, m in scores.items()},
        "versions": dict(versions()),
    }  # fmt: skip
    recipe = json.loads(json.dumps(described))
    with ExitStack() as stack:
        folder = Path(resume or stack.enter_context(tempfile.TemporaryDirectory()))
        state = Checkpoint(folder, processes.rank, lasting=resume is not None)
        taken = processes.agree(state.begin(recipe, lambda: taken_routes(routes, available)))
        start, stop = processes.part(watch.n)
        collectors = [
            Collector(group, watch, scores, taken, state.rows / str(i), stop - start)
            for i, group in enumerate(watch.groups)
        ]
        run_pass(watch, collectors, state, processes, batch_size, progress)
        values = {label: np.empty((len(watch.layers_a), len(watch.layers_b))) for label in scores}
        for collector in collectors:
            collector.all_reduce(processes.accelerator)
            for label in scores:
                values[label][:, collector.group.places] = collector.values(label)
    distances = tuple(label for label, metric in scores.items() if metric.is_distance)
    return SimilarityAtlas(values, watch.layers_a, watch.layers_b, watch.n, rows, taken, distances, recipe)


# -- before the pass ---------------------------------------------------------------------------------------------------
def labelled(metrics: Iterable[str | Metric]) -> dict[str, Metric]:
    """The metrics of layers by label: the name, with the options that are not the default.

    Raises:
        TypeError: If it is no list, or an option is unknown.
        ValueError: If there is none, one is unknown, asked for twice, or compares outputs.
    """
    if isinstance(metrics, (str, Metric)):
        raise TypeError(f"metrics must be a list of names or metrics, got {metrics!r}; write [{metrics!r}]")
    scores: dict[str, Metric] = {}
    for metric in map(build_metric, metrics):
        label = metric.label
        if label in scores:
            raise ValueError(f"metric {label} is asked for twice")
        if metric.statistic == "outputs":
            raise ValueError(f"metric {label} compares what networks answer, not their layers; call its function")
        scores[label] = metric
    if not scores:
        raise ValueError("compare needs at least one metric, got none")
    return scores


def _sides(
    a: Comparable, b: Comparable, data: Any, data_b: Any, rows: RowsPolicy, align: Align, processes: Processes
) -> tuple[Side, ...]:
    """Both sides, or the one that stands on both."""
    if isinstance(a, Activations) and isinstance(b, Activations) and data is not None:
        raise ValueError("both sides are saved activations, to which no data can be shown; leave data out")
    if isinstance(b, Activations) and data_b is not None:
        raise ValueError("b is saved activations, to which no data can be shown; leave data_b out")
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
        # aligned tokenizers may differ, as where no token is a row
        check_meet(first.adapter, second.adapter, "mean" if align == "offsets" else rows)
    check_same_order(first.ids, second.ids)
    return first, second


def _side(name: str, side: Comparable, reader: Reader | None, rows: RowsPolicy, processes: Processes) -> Side:
    if isinstance(side, Activations):
        if side.rows not in (None, rows):
            raise ValueError(f"the activations of {name} were recorded with rows={side.rows!r}, not {rows!r}")
        return side
    if reader is None:
        raise ValueError(f"{name} is a network and needs data to run on")
    return Network(processes.load(side), reader)


def _check(scores: Mapping[str, Metric], watch: Watch, processes: Processes) -> None:
    """Refuse what is known to fail before the data are read."""
    start, stop = processes.part(watch.n)
    for label, metric in scores.items():
        if metric.name == "minibatch_cka" and watch.policy != "positions" and stop - start < 4:
            raise ValueError(
                f"{label} takes at least 4 samples in each process, and {processes.count} processes share {watch.n}"
            )
        if watch.policy == "positions" and metric.statistic in ("debiased", "grams"):
            warnings.warn(
                f"{label} takes rows for independent samples, and positions of one sample are not: two networks that "
                "have nothing in common can score .7. Use rows='mean' or 'flatten'",
                stacklevel=4,
            )
        if watch.policy != "positions":
            _check_count(label, metric, watch)
        widths = {watch.width(key) for group in watch.groups for key in group.keys}
        if metric.equal_widths and len(widths) > 1:
            raise ValueError(f"{label} takes layers of one width, got widths {sorted(widths)}; name such layers")


def _check_count(label: str, metric: Metric, watch: Watch) -> None:
    """Refuse fewer samples than the metric is known to take of layers that wide."""
    least = max(metric.least_rows("x", 1), metric.least_rows("y", 1))
    if watch.n < least:
        raise ValueError(f"{label} takes at least {least} samples, got {watch.n}; give more")
    (group,) = watch.groups  # one, as only positions have a grid
    widths_a = [watch.width(group.x[place]) for place in group.of_a]
    widths_b = [watch.width(group.y[place]) for place in group.of_b]
    few: dict[str, list[str]] = {}
    for name, layers, widths, takes in (
        ("a", watch.layers_a, widths_a, partial(metric.least_rows, "x")),
        ("b", watch.layers_b, widths_b, partial(metric.least_rows, "y")),
    ):
        for layer, width in zip(layers, widths, strict=True):
            if watch.n < takes(width):
                few.setdefault(f"{takes(width)} for layers of {name} with {width} features", []).append(layer)
    if few:
        wants = ", ".join(f"{what} ({_listed(layers)})" for what, layers in few.items())
        raise ValueError(
            f"{label} takes more than the {watch.n} samples there are: at least {wants}; give more or name other layers"
        )


def _listed(layers: list[str]) -> str:
    """The first of them by name, the others by number."""
    shown = ", ".join(map(repr, layers[:_SHOWN]))
    return shown if len(layers) <= _SHOWN else f"{shown} and {len(layers) - _SHOWN} more"
