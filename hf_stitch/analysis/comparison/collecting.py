"""The one pass over the data: what is collected of each group of layers, and the values that follow."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_stitch.analysis.comparison.watch import Group, Key, Watch, all_finite
from hf_stitch.metrics import Metric, MomentsMetric
from hf_stitch.processes import Processes
from hf_stitch.statistics import HSIC, Gram, Grams, LayerMoments, MinibatchGrams
from hf_stitch.storage.checkpoint import Checkpoint

if TYPE_CHECKING:
    from accelerate import Accelerator

Array = NDArray[np.float64]
T = TypeVar("T")


def run_pass(
    watch: Watch,
    collectors: Sequence[Collector],
    state: Checkpoint,
    processes: Processes,
    batch_size: int,
    progress: bool,
) -> None:
    """Run this process's part of the samples, from where it was interrupted."""
    from tqdm.auto import tqdm

    start, stop = processes.part(watch.n)
    owners = {key: collector for collector in collectors for key in collector.group.keys}
    saved = state.load(watch.device)
    if saved is not None:
        start, tensors = saved
        for number, collector in enumerate(collectors):
            collector.load(_within(f"{number}/", tensors))
    hide = None if progress and processes.rank == 0 else True  # None: shown on terminals only
    with tqdm(total=stop - start, desc="comparing", unit="sample", delay=3, disable=hide) as bar:
        while start < stop:
            end = min(start + batch_size, stop)
            watch.rows(start, end, lambda key, rows: owners[key].take(key, rows))
            for collector in collectors:
                collector.end()
            if state.due(end == stop):
                state.save(end, _named({str(i): c.state_dict() for i, c in enumerate(collectors)}))
            bar.update(end - start)
            start = end


class Collector:
    """What is collected of a group of layers, and the values that follow."""

    def __init__(
        self,
        group: Group,
        watch: Watch,
        scores: Mapping[str, Metric],
        taken: Mapping[str, str],
        folder: Path,
        n: int,
    ) -> None:
        self.group, self._scores, self._taken = group, scores, taken
        self._names = [[key[1] for key in keys] for keys in (group.x, group.y)]
        self._n = None if watch.policy == "positions" else n
        ways = set(taken.values())
        self._moments: LayerMoments | None = None
        self._rows: _KeptRows | None = None
        if "moments" in ways:
            x, y = ([watch.probe[key].double().mean(0) for key in keys] for keys in (group.x, group.y))
            self._moments = LayerMoments(x, None if group.same else y)
        if ways & {"grams", "features"}:
            self._rows = _KeptRows(folder, [watch.probe[key] for key in group.keys])
        sizes = {m.options["batch_size"] for label, m in scores.items() if taken[label] == "minibatches"}
        self._minibatches = {size: MinibatchGrams(size, group.same, self._n) for size in sorted(sizes)}
        self._batch: dict[Key, Tensor] = {}
        self._reduced: dict[int, dict[Key, Tensor | Gram]] = {size: {} for size in self._minibatches}

    def take(self, key: Key, rows: Tensor) -> bool:
        """Take the rows of one matrix in a batch, and say whether they are finite; :meth:`end` follows the last."""
        kept = [grams.reduce(rows) for grams in self._minibatches.values()]
        for reduced, part in zip(self._reduced.values(), kept, strict=True):
            reduced[key] = part
        if self._moments is not None:
            self._batch[key] = rows.clone()
        if self._rows is not None:
            self._rows.put(self.group.keys.index(key), rows)
        # What is not finite shows in a product: the rows need not be read again.
        grams = [part for part in kept if isinstance(part, Gram)]
        return bool(grams[0].products.trace().isfinite()) if grams else all_finite(rows)

    def end(self) -> None:
        """Add the batch of which all matrices have come."""
        if self._moments is not None:
            self._moments.update(*self._sides(self._batch))
        for grams, reduced in zip(self._minibatches.values(), self._reduced.values(), strict=True):
            grams.update(*self._sides(reduced))
            reduced.clear()
        self._batch.clear()
        if self._rows is not None:
            self._rows.end()

    def _sides(self, found: Mapping[Key, T]) -> tuple[list[T], list[T] | None]:
        x, y = ([found[key] for key in keys] for keys in (self.group.x, self.group.y))
        return x, None if self.group.same else y

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
            self._minibatches[size] = MinibatchGrams.from_state_dict(_within(f"minibatches.{size}/", state), self._n)
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
            wrong = ~((own > 0) & own.isfinite())
            if bool(wrong.any()):
                place = int(wrong.nonzero()[0])
                why = "is the layer dead, or are there too few samples?"
                if not bool(own[place].isfinite()):
                    why = "products of its rows overflow their dtype; run the network in a wider one"
                raise ValueError(
                    f"{label} is undefined for layer {names[place]!r} of {side}: HSIC with itself is "
                    f"{own[place].item():.1e}; {why}"
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
        self.n = self._came = 0
        self._widths = [rows.shape[1] for rows in like]
        self._dtypes = [torch.promote_types(rows.dtype, torch.float32) for rows in like]
        self._paths = [folder / f"{i}.rows" for i in range(len(like))]
        for path in self._paths:
            path.touch()

    def put(self, place: int, rows: Tensor) -> None:
        """Add a batch to one matrix."""
        with self._paths[place].open("ab") as file:
            file.write(rows.to("cpu", self._dtypes[place]).contiguous().numpy().data)
        self._came = len(rows)

    def end(self) -> None:
        """Count the batch that every matrix has got."""
        self.n += self._came

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


def _named(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{name}/{key}": part for name, state in parts.items() for key, part in state.items()}


def _within(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): part for key, part in tensors.items() if key.startswith(prefix)}
