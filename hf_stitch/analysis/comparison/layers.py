"""Reader of the compared layers of both sides: rows batch by batch, one matrix for layers with the same tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_stitch.adapters.base import LayerCallback
from hf_stitch.adapters.checks import layer_names
from hf_stitch.analysis.activations import Activations
from hf_stitch.analysis.comparison.asking import POOLINGS, Rows, check_layer, mismatch, mixed_kinds, per_sample
from hf_stitch.analysis.comparison.sides import Networks, Side
from hf_stitch.metrics._routes import Workload
from hf_stitch.printing import warn
from hf_stitch.representation import Representation, RepresentationSpec, all_set, finite
from hf_stitch.resources import seconds_of

Grid = tuple[int, int] | None

Key = tuple[int, str, Grid]
"""Matrix of rows: index of its side, layer, and grid that its positions are resized to."""

PROBE = 2
"""Number of samples in the probe, which runs before the pass over all samples."""

RunLayers = Callable[[Sequence[str], LayerCallback], None]
"""Calls the callback once per layer with the activations of a batch of samples."""

Take = Callable[[Key, Tensor], Tensor]
"""Receives the rows of a matrix, which are valid only during the call, and returns whether they are finite."""


@dataclass(frozen=True)
class Group:
    """Matrices with the same rows: layers of a and b with the same positions."""

    x: tuple[Key, ...]  # the distinct matrices of a
    y: tuple[Key, ...]  # the distinct matrices of b; the same object as x if they are the same matrices
    of_a: tuple[int, ...]  # for each layer of a in the group, its index in x
    of_b: tuple[int, ...]  # for each layer of b in the group, its index in y
    places_a: tuple[int, ...]  # for each layer of a in the group, its index among all layers of a
    places_b: tuple[int, ...]  # for each layer of b in the group, its index among all layers of b

    @property
    def pairs(self) -> tuple[NDArray[np.intp], ...]:
        """Indices of the pairs of layers among all pairs."""
        return np.ix_(self.places_a, self.places_b)

    @property
    def same(self) -> bool:
        """Whether both sides have the same matrices."""
        return self.x == self.y

    @property
    def keys(self) -> tuple[Key, ...]:
        """All distinct matrices."""
        return tuple(dict.fromkeys((*self.x, *self.y)))


class LayerReader:
    """Reader of the compared layers of both sides, which returns their rows batch by batch.

    A probe of a few samples runs first. It determines the shapes, and which layers return the same tensor; this tensor
    is processed once.
    """

    def __init__(
        self,
        sides: Sequence[Side],
        layers_a: Iterable[str] | None,
        layers_b: Iterable[str] | None,
        row_kind: Rows,
        ordered: bool = True,
    ) -> None:
        self.sides, self.row_kind, self.per_sample, self._ordered = sides, row_kind, per_sample(row_kind), ordered
        self._options: dict[str, Any] = {"pooling": POOLINGS[row_kind], "prefix": row_kind == "tokens"}
        self.n = len(sides[0].ids)
        if self.n < PROBE:
            raise ValueError(f"a comparison requires at least {PROBE} samples, got {self.n}; pass more samples")
        self.layers_a = layer_names("layers_a", sides[0].layers if layers_a is None else layers_a)
        self.layers_b = layer_names("layers_b", sides[-1].layers if layers_b is None else layers_b)
        last = len(sides) - 1
        names_by_side = [dict.fromkeys(self.layers_a)] if last else [dict.fromkeys((*self.layers_a, *self.layers_b))]
        names_by_side += [dict.fromkeys(self.layers_b)] if last else []
        probes = [_Probe(side, list(names)) for side, names in zip(sides, names_by_side, strict=True)]
        self.specs = {"a": probes[0].specs, "b": probes[-1].specs}
        self.undefined: dict[tuple[int, int], str] = {}  # indices of a pair of layers -> reason why their rows differ
        self.groups = self._grouped(probes[0], probes[-1])
        self._grids: dict[tuple[int, str], list[Grid]] = {}
        for number, name, grid in dict.fromkeys(key for group in self.groups for key in group.keys):
            self._grids.setdefault((number, name), []).append(grid)
        self._device: torch.device | None = None
        self.probe: dict[Key, Tensor] = {}
        self._read(0, self._keep, [probe.repeat for probe in probes])  # fills self.probe
        device = self.probe[self.groups[0].y[0]].device
        self._device = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
        self.probe = {key: rows.to(self._device) for key, rows in self.probe.items()}

    def rows(self, start: int, stop: int, take: Take) -> None:
        """Call ``take`` with the ``(rows, d)`` rows of each matrix for the samples from ``start`` to ``stop``."""
        self._read(start, take, [partial(side.run_with_callback, start, stop) for side in self.sides])

    def seconds_per_sample(self, batch_size: int) -> float:
        """Measure the seconds of the forward passes of all sides on a batch."""
        count = min(batch_size, self.n)
        assert self._device is not None
        return seconds_of(lambda: self.rows(0, count, lambda key, rows: torch.tensor(True)), self._device) / count

    def _read(self, start: int, take: Take, runs: Sequence[RunLayers], *, check_each: bool = False) -> None:
        """Read the layers and pass on their rows; ``check_each`` checks the flag of each layer at once."""
        flags: list[Tensor] = []
        counts: dict[Key, int] = {}
        owners: dict[Key, Tensor] = {}  # the sample of each row, if rows are tokens of texts

        def callback_of(number: int) -> LayerCallback:
            def callback(name: str, representation: Representation) -> None:
                self._check_masks(representation, name, start)
                for grid in self._grids[number, name]:
                    key, resized = (number, name, grid), representation if grid is None else representation.resize(grid)
                    rows = self._rows(resized)
                    counts[key] = len(rows)
                    if not self.per_sample and grid is None and representation.layout != "bd":
                        owners[key] = representation.row_samples(**self._options).cpu()
                    flags.append(take(key, rows if self._device is None else rows.to(self._device)))
                    if check_each and not bool(flags[-1]):
                        self._raise_non_finite(rows, resized, name, start)

            return callback

        for number, run in enumerate(runs):
            run([name for owner, name in self._grids if owner == number], callback_of(number))
        if not all_set(flags):  # run the batch again to find the layer
            self._read(start, take, runs, check_each=True)
        for group in self.groups:
            tokens = [owners[key] for key in group.keys if key in owners]
            uneven = len({counts[key] for key in group.keys}) > 1
            if uneven or any(not torch.equal(tokens[0], owner_of_row) for owner_of_row in tokens):
                raise ValueError(
                    f"rows={self.row_kind!r} requires the same tokens on both sides, but they differ in the batch that "
                    f"starts at sample {self.sides[0].ids[start]!r}; use rows='mean', 'cls' or 'last'"
                )

    def _keep(self, key: Key, rows: Tensor) -> Tensor:
        self.probe[key] = rows
        return finite(rows)

    def _rows(self, representation: Representation) -> Tensor:
        if self.row_kind == "flat" and representation.layout == "bchw" and not self._ordered:
            return representation.values.flatten(1)
        return representation.rows(**self._options)

    def width(self, key: Key) -> int:
        """Return the number of features of a matrix."""
        return self.probe[key].shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.probe[self.groups[0].y[0]].device if self._device is None else self._device

    def count(self, group: Group) -> int:
        """Estimate the number of rows of the matrices of a group from the probe, as texts differ in length."""
        return round(len(self.probe[group.y[0]]) * self.n / PROBE)

    def workload(self, group: Group) -> Workload:
        """Return the sizes of a group of layers that determine its costs."""
        x, y, distinct = (tuple(map(self.width, keys)) for keys in (group.x, group.y, group.keys))
        return Workload(self.count(group), x, y, group.same, distinct, self.probe[group.x[0]].element_size())

    def _grouped(self, probe_a: _Probe, probe_b: _Probe) -> tuple[Group, ...]:
        specs_a, specs_b = ([probe.specs[name] for name in names]
                      for probe, names in ((probe_a, self.layers_a), (probe_b, self.layers_b)))  # fmt: skip
        for side, names, specs in (("a", self.layers_a, specs_a), ("b", self.layers_b, specs_b)):
            for name, spec in zip(names, specs, strict=True):
                try:
                    check_layer(spec, self.row_kind)
                except ValueError as error:
                    raise ValueError(f"layer {name!r} of {side}: {error}") from error
        by_rows: dict[tuple[Grid, tuple[int, ...]], list[int]] = {}
        for place, spec in enumerate(specs_b):
            reasons = [mismatch(spec_a, spec, self.row_kind) for spec_a in specs_a]
            self.undefined |= {(place_a, place): reason for place_a, reason in enumerate(reasons) if reason}
            grid = None if self.per_sample else spec.grid
            by_rows.setdefault((grid, tuple(i for i, reason in enumerate(reasons) if not reason)), []).append(place)
        groups = []
        for (grid, places_a), places_b in by_rows.items():
            of_a = [(0, probe_a.first[self.layers_a[place]], grid) for place in places_a]
            of_b = [(len(self.sides) - 1, probe_b.first[self.layers_b[place]], grid) for place in places_b]
            x, y = list(dict.fromkeys(of_a)), list(dict.fromkeys(of_b))
            if set(x) == set(y):
                y = x
            index = tuple(map(x.index, of_a)), tuple(map(y.index, of_b))
            if places_a:
                groups.append(Group(tuple(x), tuple(y), *index, places_a, tuple(places_b)))
        if not groups:
            raise ValueError(
                f"layers cannot be compared, such as {self.layers_a[0]!r} of a and {self.layers_b[0]!r} of b: "
                f"{self.undefined[0, 0]}; use rows='resized' to resize grids, or rows='mean' for one row per sample"
            )
        unpooled = [
            specs for side, specs in ((self.sides[0], specs_a), (self.sides[-1], specs_b)) if not _is_pooled(side)
        ]
        if kinds := mixed_kinds(unpooled, self.row_kind):
            warn(f"this comparison mixes values from {kinds}; do not compare the two kinds with each other")
        return tuple(groups)

    def _check_masks(self, representation: Representation, name: str, start: int) -> None:
        if representation.mask is None:
            return
        empty = ~representation.mask[:, representation.prefix_tokens :].any(1)
        if bool(empty.any()):
            sample = self.sides[0].ids[start + int(empty.nonzero()[0])]
            raise ValueError(f"sample {sample!r} is fully masked at layer {name!r}; leave it out with select")

    def _raise_non_finite(self, rows: Tensor, representation: Representation, name: str, start: int) -> NoReturn:
        """Raise an error that names the sample with non-finite activations."""
        is_finite = rows.isfinite().all(1)
        if bool(is_finite.all()):
            raise ValueError(f"products of layer {name!r} overflow {rows.dtype}; run the network in a wider dtype")
        number = int(representation.row_samples(**self._options)[int(is_finite.logical_not().nonzero()[0])])
        raise ValueError(
            f"layer {name!r} is NaN or infinite for sample {self.sides[0].ids[start + number]!r}; leave it out, or run "
            "the network in a wider dtype"
        )


def _is_pooled(side: Side) -> bool:
    """Return whether a side has pooled saved activations; their shape does not reveal their rows."""
    if isinstance(side, Networks):
        return any(map(_is_pooled, side.sides.values()))
    return isinstance(side, Activations) and side.pooling not in (None, "none")


class _Probe:  # specs and activations of the first samples; ``first``: layer -> first layer with the same tensor
    def __init__(self, side: Side, names: Sequence[str]) -> None:
        self.first: dict[str, str] = {}
        self.specs: dict[str, RepresentationSpec] = {}
        self._activations: dict[str, Representation] = {}
        tensors: dict[Any, tuple[str, Tensor]] = {}  # references keep their memory from being reused

        def callback(name: str, representation: Representation) -> None:
            values = representation.values
            version = None if values.is_inference() else values._version
            mask = None if representation.mask is None else representation.mask.cpu().numpy().tobytes()
            identity = (values.data_ptr(), representation.spec, values.stride(), values.dtype, version, mask)
            self.first[name] = tensors.setdefault(identity, (name, values))[0]
            self.specs[name] = representation.spec
            if self.first[name] == name:
                self._activations[name] = representation.replace(values=values.clone())

        side.run_with_callback(0, PROBE, names, callback)

    def repeat(self, layers: Sequence[str], callback: LayerCallback) -> None:
        """Call ``callback`` with the recorded activations."""
        for name in layers:
            callback(name, self._activations[name])
