"""Pass over the data: collect the statistics of each group of layers and compute the metrics from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hf_stitch.analysis.comparison.layers import Group, Key, LayerReader
from hf_stitch.analysis.permutation import MaximumTest, maximum_test
from hf_stitch.metrics import ActivationMetric
from hf_stitch.metrics._routes import Collected, LayerError
from hf_stitch.printing import progress_bar
from hf_stitch.representation import finite
from hf_stitch.running import Run
from hf_stitch.statistics.base import within
from hf_stitch.statistics.features import LayerRows
from hf_stitch.statistics.grams import Gram, MinibatchGrams
from hf_stitch.statistics.layer_moments import LayerMoments
from hf_stitch.storage.checkpoint import Checkpoint

if TYPE_CHECKING:
    from accelerate import Accelerator

Array = NDArray[np.float64]
LayerStatistic = LayerMoments | LayerRows | MinibatchGrams

_ROWS = "rows"
"""Key of the rows in a state; their route does not have options."""


def run_pass(reader: LayerReader, collectors: Sequence[Collector], checkpoint: Checkpoint, run: Run) -> None:
    """Pass the samples of this process to the collectors, resuming from an existing checkpoint."""
    start, stop = run.processes.part(reader.n)
    owners = {key: collector for collector in collectors for key in collector.group.keys}

    def restore(position: int, tensors: Mapping[str, Tensor]) -> None:
        for number, collector in enumerate(collectors):
            collector.load(within(f"{number}/", tensors))

    if (position := checkpoint.load(reader.device, range(start, stop + 1), restore)) is not None:
        start = position
    with progress_bar(run.shown("comparing"), stop - start, "sample") as bar:
        while start < stop:
            end = min(start + run.batch_size, stop)
            reader.rows(start, end, lambda key, rows: owners[key].take(key, rows))
            for collector in collectors:
                collector.end()
            if checkpoint.due(end == stop):
                checkpoint.save(end, joined({str(i): c.state_dict() for i, c in enumerate(collectors)}))
            bar.update(end - start)
            start = end


class Collector:
    """Collects the statistics of a group of layers and computes the metrics from them."""

    def __init__(
        self,
        group: Group,
        reader: LayerReader,
        metrics: Mapping[str, ActivationMetric],
        route_of_metric: Mapping[str, str],
        folder: Path,
        n: int,
        keep_rows: bool = False,
    ) -> None:
        self.group = group
        self._metrics = metrics
        self._names = {side: [key[1] for key in keys] for side, keys in (("x", group.x), ("y", group.y))}
        self._work = reader.workload(group)
        routes = {label: {route.name: route for route in metric.routes} for label, metric in metrics.items()}
        self._routes = {label: routes[label][name] for label, name in route_of_metric.items()}
        specs: dict[str, tuple[Collected, Mapping[str, Any]]] = {}
        for route in self._routes.values():
            specs.setdefault(route.statistic, (route.collects, route.options))
        if keep_rows:
            specs.setdefault(_ROWS, ("rows", {}))
        rows = n if reader.per_sample else None
        self._statistics = {name: _statistic(*spec, group, reader, folder, rows) for name, spec in specs.items()}
        self._stored: dict[str, dict[Key, Any]] = {name: {} for name in specs}

    def take(self, key: Key, rows: Tensor) -> Tensor:
        """Add the rows of one matrix in the current batch. Call :meth:`end` after the last matrix of the batch."""
        products: list[Tensor] = []
        for name, statistic in self._statistics.items():
            stored = statistic.keep(rows) if isinstance(statistic, MinibatchGrams) else rows.clone()
            self._stored[name][key] = stored
            products += [stored.products] if isinstance(stored, Gram) else []
        # Non-finite rows make the products non-finite, and the products are cheaper to check.
        return products[0].sum().isfinite() if products else finite(rows)

    def end(self) -> None:
        """Update the statistics with the current batch after all its matrices were added."""
        for name, statistic in self._statistics.items():
            stored = self._stored[name]
            second = None if self.group.same else [stored[key] for key in self.group.y]
            statistic.update([stored[key] for key in self.group.x], second)
            stored.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of all statistics, without rows, which are stored in files."""
        return joined({name: statistic.state_dict() for name, statistic in self._statistics.items()})

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state returned by :meth:`state_dict`."""
        for name, statistic in self._statistics.items():
            statistic.load_state_dict(within(f"{name}/", state))

    def all_reduce(self, accelerator: Accelerator | None) -> None:
        """Combine the statistics of all processes, on each process."""
        if accelerator is not None:
            for statistic in self._statistics.values():
                statistic.all_reduce(accelerator)

    def values(self, label: str) -> tuple[Array, dict[tuple[int, int], str]]:
        """Compute a metric for all pairs of the layers of a and the layers of b in the group.

        Returns (layers of a, layers of b) float64 for the layers in the group, NaN where the metric is undefined; and
        the indices of the undefined pairs among all layers of a and of b -> reason.
        """
        route = self._routes[label]
        try:
            route_values = route.values(self._statistics[route.statistic], self._work)
        except LayerError as error:
            sides = {"x": "a", "y": "b"}
            named = (f"layer {self._names[of][place]!r} of {sides[of]}" for of, place in error.places.items())
            raise ValueError(f"{label} of {' and '.join(named)}: {error}") from error
        undefined = {
            (a, b): route_values.undefined[i, j]
            for a, i in zip(self.group.places_a, self.group.of_a, strict=True)
            for b, j in zip(self.group.places_b, self.group.of_b, strict=True)
            if (i, j) in route_values.undefined
        }
        return route_values.values.numpy()[np.ix_(self.group.of_a, self.group.of_b)], undefined

    def rows_of_a(self) -> list[Tensor]:
        """Return the stored rows of each layer of a, (n, d)."""
        return [self._rows.x(place) for place in self.group.of_a]

    @property
    def _rows(self) -> LayerRows:
        rows: Any = self._statistics[_ROWS]
        return rows

    def test(self, label: str, defined: NDArray[np.bool_], permutations: int, run: Run, memory: int) -> MaximumTest:
        """Test a metric for all pairs of layers of the group, from the rows, with one row per sample."""
        rows = self._rows
        x, y = [rows.x(i) for i in range(len(self.group.x))], [rows.y(j) for j in range(len(self.group.y))]
        is_defined, pairs = np.zeros((len(x), len(y)), bool), np.ix_(self.group.of_a, self.group.of_b)
        is_defined[pairs] = defined
        test = maximum_test(
            self._metrics[label], x, y, defined=is_defined, permutations=permutations, seed=run.seed, memory=memory,
            bar_label=run.shown(f"permuting, {label}")
        )  # fmt: skip
        selected: dict[str, Any] = {name: getattr(test, name)[pairs] for name in ("chance", "scores", "unadjusted")}
        selected |= {"maxima_a": test.maxima_a[:, self.group.of_a], "maxima_b": test.maxima_b[:, self.group.of_b]}
        return replace(test, **selected)


def _statistic(
    collects: Collected, options: Mapping[str, Any], group: Group, reader: LayerReader, folder: Path, n: int | None
) -> LayerStatistic:
    x, y = ([reader.probe[key] for key in keys] for keys in (group.x, group.y))
    match collects:
        case "moments":
            origins_x, origins_y = ([rows.double().mean(0) for rows in side] for side in (x, y))
            return LayerMoments(origins_x, None if group.same else origins_y)
        case "rows":
            return LayerRows(folder, x, None if group.same else y)
        case "minibatches":
            return MinibatchGrams(options["size"], len(x), None if group.same else len(y), n, reader.device)


def joined(states: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Merge several states into one, with their names as key prefixes."""
    return {f"{name}/{key}": tensor for name, state in states.items() for key, tensor in state.items()}
