"""The one pass over the data: what is collected of each group of layers, and the values that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hf_stitch.analysis.comparison.layer_reader import Group, Key, LayerReader, all_finite
from hf_stitch.analysis.comparison.routes import workload
from hf_stitch.metrics import Metric
from hf_stitch.metrics._routes import LayerError, PairError, Route
from hf_stitch.processes import Processes
from hf_stitch.statistics import Gram, LayerMoments, LayerRows, LayerStatistic, MinibatchGrams
from hf_stitch.statistics.base import within
from hf_stitch.storage.checkpoint import Checkpoint

if TYPE_CHECKING:
    from accelerate import Accelerator

Array = NDArray[np.float64]
T = TypeVar("T")


def run_pass(
    reader: LayerReader,
    collectors: Sequence[Collector],
    state: Checkpoint,
    processes: Processes,
    batch_size: int,
    progress: bool,
) -> None:
    """Run this process's part of the samples, from where it was interrupted."""
    from tqdm.auto import tqdm

    start, stop = processes.part(reader.n)
    owners = {key: collector for collector in collectors for key in collector.group.keys}
    saved = state.load(reader.device)
    if saved is not None:
        start, tensors = saved
        for number, collector in enumerate(collectors):
            collector.load(within(f"{number}/", tensors))
    hide = None if progress and processes.rank == 0 else True  # None: shown on terminals only
    with tqdm(total=stop - start, desc="comparing", unit="sample", delay=3, disable=hide) as bar:
        while start < stop:
            end = min(start + batch_size, stop)
            reader.rows(start, end, lambda key, rows: owners[key].take(key, rows))
            for collector in collectors:
                collector.end()
            if state.due(end == stop):
                state.save(end, joined({str(i): c.state_dict() for i, c in enumerate(collectors)}))
            bar.update(end - start)
            start = end


class Collector:
    """What is collected of a group of layers, and the values that follow.

    Args:
        group: The layers.
        reader: Of all layers.
        metrics: By label.
        taken: By label the name of the route that is taken.
        folder: Where rows are kept.
        n: Number of samples of this process.
    """

    def __init__(
        self,
        group: Group,
        reader: LayerReader,
        metrics: Mapping[str, Metric],
        taken: Mapping[str, str],
        folder: Path,
        n: int,
    ) -> None:
        self.group = group
        self._names = {side: [key[1] for key in keys] for side, keys in (("x", group.x), ("y", group.y))}
        self._work = workload(group, reader)
        routes = {label: {route.name: route for route in metric.routes} for label, metric in metrics.items()}
        self._routes = {label: routes[label][name] for label, name in taken.items()}
        self._statistics: dict[str, LayerStatistic] = {}
        self._kept: dict[str, dict[Key, Any]] = {}
        rows = None if reader.pooling == "none" else n
        for route in self._routes.values():
            if (name := _name(route)) not in self._statistics:
                self._statistics[name] = _statistic(route, group, reader, folder, rows)
                self._kept[name] = {}

    def take(self, key: Key, rows: Tensor) -> bool:
        """Take the rows of one matrix in a batch, and say whether they are finite; :meth:`end` follows the last."""
        products: list[Tensor] = []
        for name, statistic in self._statistics.items():
            self._kept[name][key] = kept = statistic.keep(rows)
            products += [kept.products] if isinstance(kept, Gram) else []
        # What is not finite shows in a product: the rows need not be read again.
        return bool(products[0].trace().isfinite()) if products else all_finite(rows)

    def end(self) -> None:
        """Add the batch of which all matrices have come."""
        for name, statistic in self._statistics.items():
            kept = self._kept[name]
            statistic.update([kept[key] for key in self.group.x], self._second(kept))
            kept.clear()

    def _second(self, kept: Mapping[Key, T]) -> list[T] | None:
        return None if self.group.same else [kept[key] for key in self.group.y]

    def state_dict(self) -> dict[str, Tensor]:
        """All there is, but for rows, which are in files."""
        return joined({name: statistic.state_dict() for name, statistic in self._statistics.items()})

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take up what :meth:`state_dict` gave."""
        for name, statistic in self._statistics.items():
            statistic.load_state_dict(within(f"{name}/", state))

    def all_reduce(self, accelerator: Accelerator | None) -> None:
        """Give every process what all have collected."""
        if accelerator is not None:
            for statistic in self._statistics.values():
                statistic.all_reduce(accelerator)

    def values(self, label: str) -> Array:
        """A metric for all layers of a and those layers of b that are in the group.

        Raises:
            ValueError: If it is undefined for a layer or a pair of layers; the message names them.
        """
        route = self._routes[label]
        try:
            distinct = route.values(self._statistics[_name(route)], self._work).numpy()
        except LayerError as error:
            side, name = "ab"["xy".index(error.side)], self._names[error.side][error.place]
            raise ValueError(f"{label} is undefined for layer {name!r} of {side}: {error}") from error
        except PairError as error:
            a, b = (names[place] for names, place in zip(self._names.values(), error.places, strict=True))
            raise ValueError(f"{label} of layer {a!r} of a and layer {b!r} of b: {error}") from error
        return distinct[np.ix_(self.group.of_a, self.group.of_b)]


def _name(route: Route) -> str:
    """What the statistic of a route is called in a state."""
    return "-".join([route.collects, *map(str, route.options.values())])


def _statistic(route: Route, group: Group, reader: LayerReader, folder: Path, n: int | None) -> LayerStatistic:
    """The statistic that a route collects, empty."""
    x, y = ([reader.probe[key] for key in keys] for keys in (group.x, group.y))
    match route.collects:
        case "moments":
            origins_x, origins_y = ([rows.double().mean(0) for rows in side] for side in (x, y))
            return LayerMoments(origins_x, None if group.same else origins_y)
        case "rows":
            return LayerRows(folder, x, None if group.same else y)
        case "minibatches":
            return MinibatchGrams(route.options["size"], len(x), None if group.same else len(y), n, reader.device)


def joined(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Several states as one."""
    return {f"{name}/{key}": part for name, state in parts.items() for key, part in state.items()}
