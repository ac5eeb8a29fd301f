"""Reader of the compared layers: the rows of both sides, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from hf_stitch.adapters.base import LayerCallback
from hf_stitch.adapters.naming import layer_names
from hf_stitch.analysis.comparison.sides import Side
from hf_stitch.representation import Pooling, Representation, RepresentationSpec
from hf_stitch.resources import seconds_of
from hf_stitch.stitches.layer import check_specs

Grid = tuple[int, int] | None


Key = tuple[int, str, Grid]
"""A matrix of rows: index of its side, layer, and the grid to which its positions are resized."""


PROBE = 2
"""Number of samples in the probe, which is run before the pass over all samples."""


RunLayers = Callable[[Sequence[str], LayerCallback], None]
"""Calls the callback once per layer with the activations of some samples."""


Take = Callable[[Key, Tensor], bool]
"""Receives the rows of a matrix, which are valid only during the call, and returns whether they are finite."""


@dataclass(frozen=True)
class Group:
    """Matrices with the same rows: layers of b with the same grid, and all layers of a resized to this grid."""

    x: tuple[Key, ...]  # the distinct matrices of a
    y: tuple[Key, ...]  # the distinct matrices of b; the same object as x if they are the same matrices
    of_a: tuple[int, ...]  # for each layer of a, its index in x
    of_b: tuple[int, ...]  # for each layer of b in the group, its index in y
    places: tuple[int, ...]  # for each layer of b in the group, its index among all layers of b

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

    A probe of a few samples is run first. It determines the shapes, and which layers return the same tensor, so that
    this tensor is processed once.
    """

    def __init__(
        self,
        sides: Sequence[Side],
        layers_a: Iterable[str] | None,
        layers_b: Iterable[str] | None,
        pooling: Pooling,
        ordered: bool = True,
    ) -> None:
        self.sides, self.pooling, self._ordered = sides, pooling, ordered
        self.n = len(sides[0].ids)
        if self.n < PROBE:
            raise ValueError(f"a comparison takes at least {PROBE} samples, got {self.n}; pass more samples")
        self.layers_a = layer_names("layers_a", sides[0].layers if layers_a is None else layers_a)
        self.layers_b = layer_names("layers_b", sides[-1].layers if layers_b is None else layers_b)
        last = len(sides) - 1
        wanted = [dict.fromkeys(self.layers_a)] if last else [dict.fromkeys((*self.layers_a, *self.layers_b))]
        wanted += [dict.fromkeys(self.layers_b)] if last else []
        probes = [_Probe(side, list(names)) for side, names in zip(sides, wanted, strict=True)]
        self.groups = self._grouped(probes[0], probes[-1])
        self._grids: dict[tuple[int, str], list[Grid]] = {}
        for number, name, grid in dict.fromkeys(key for group in self.groups for key in group.keys):
            self._grids.setdefault((number, name), []).append(grid)
        self._device: torch.device | None = None
        self.probe: dict[Key, Tensor] = {}
        self._read(0, self._keep, [probe.repeat for probe in probes])
        device = self.probe[self.groups[0].y[0]].device
        self._device = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
        self.probe = {key: rows.to(self._device) for key, rows in self.probe.items()}

    def rows(self, start: int, stop: int, take: Take) -> None:
        """Call ``take`` with the ``(rows, d)`` rows of each matrix for the samples from ``start`` to ``stop``."""
        self._read(start, take, [partial(side.run_with_callback, start, stop) for side in self.sides])

    def seconds_per_sample(self, batch_size: int) -> float:
        """Measure the forward passes of all sides on a batch."""
        count = min(batch_size, self.n)
        assert self._device is not None
        return seconds_of(lambda: self.rows(0, count, lambda key, rows: True), self._device) / count

    def _read(self, start: int, take: Take, runs: Sequence[RunLayers]) -> None:
        counts: dict[Key, int] = {}
        owners: dict[int, Tensor] = {}

        def callback_of(number: int) -> LayerCallback:
            def callback(name: str, representation: Representation) -> None:
                self._check_masks(representation, name, start)
                if self.pooling == "none" and number not in owners:
                    owners[number] = representation.row_samples("none").cpu()
                for grid in self._grids[number, name]:
                    key, resized = (number, name, grid), representation if grid is None else representation.resize(grid)
                    rows = self._rows(resized)
                    counts[key] = len(rows)
                    if not take(key, rows if self._device is None else rows.to(self._device)):
                        self._refuse(rows, resized, name, start)

            return callback

        for number, run in enumerate(runs):
            run([name for owner, name in self._grids if owner == number], callback_of(number))
        for group in self.groups:
            tokens = [*owners.values()] if group.y[0][2] is None else []
            uneven = len({counts[key] for key in group.keys}) > 1
            if uneven or any(not torch.equal(tokens[0], other) for other in tokens):
                raise ValueError(
                    "pooling 'none' needs the same tokens on both sides, which differ for a sample of the batch from "
                    f"{self.sides[0].ids[start]!r} on; use pooling='mean', 'cls' or 'last'"
                )

    def _keep(self, key: Key, rows: Tensor) -> bool:
        self.probe[key] = rows
        return all_finite(rows)

    def _rows(self, representation: Representation) -> Tensor:
        if self.pooling == "flatten" and representation.layout == "bchw" and not self._ordered:
            return representation.values.flatten(1)
        return representation.rows(self.pooling)

    def width(self, key: Key) -> int:
        """Return the number of features of a matrix."""
        return self.probe[key].shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.probe[self.groups[0].y[0]].device if self._device is None else self._device

    def count(self, group: Group) -> int:
        """Return the number of rows of the matrices of a group, estimated from the probe: texts differ in length."""
        return round(len(self.probe[group.y[0]]) * self.n / PROBE)

    def _grouped(self, probe_a: _Probe, probe_b: _Probe) -> tuple[Group, ...]:
        by_grid: dict[Grid, list[int]] = {}
        for place, b in enumerate(self.layers_b):
            for a in self.layers_a:
                try:
                    check_specs(probe_a.specs[a], probe_b.specs[b], self.pooling)
                except ValueError as error:
                    raise ValueError(f"layer {a!r} of a and layer {b!r} of b: {error}") from error
            by_grid.setdefault(probe_b.specs[b].grid if self.pooling == "none" else None, []).append(place)
        groups = []
        for grid, places in by_grid.items():
            of_a = [(0, probe_a.first[name], grid) for name in self.layers_a]
            of_b = [(len(self.sides) - 1, probe_b.first[self.layers_b[place]], grid) for place in places]
            x, y = list(dict.fromkeys(of_a)), list(dict.fromkeys(of_b))
            if set(x) == set(y):
                y = x
            groups.append(
                Group(tuple(x), tuple(y), tuple(map(x.index, of_a)), tuple(map(y.index, of_b)), tuple(places))
            )
        return tuple(groups)

    def _check_masks(self, representation: Representation, name: str, start: int) -> None:
        if representation.mask is None:
            return
        empty = ~representation.mask[:, representation.prefix_tokens :].any(1)
        if bool(empty.any()):
            sample = self.sides[0].ids[start + int(empty.nonzero()[0])]
            raise ValueError(f"sample {sample!r} is masked entirely at layer {name!r}; leave it out with select")

    def _refuse(self, rows: Tensor, representation: Representation, name: str, start: int) -> NoReturn:
        """Raise an error that names the sample with non-finite activations."""
        finite = rows.isfinite().all(1)
        if bool(finite.all()):
            raise ValueError(f"products of layer {name!r} overflow {rows.dtype}; run the network in a wider dtype")
        place = int(representation.row_samples(self.pooling)[int(finite.logical_not().nonzero()[0])])
        raise ValueError(
            f"layer {name!r} is NaN or infinite for sample {self.sides[0].ids[start + place]!r}; leave it out, or run "
            "the network in a wider dtype"
        )


def all_finite(rows: Tensor) -> bool:
    """Return whether no value is NaN or infinite; the sum is checked first, which is cheaper."""
    total = rows.sum(dtype=torch.promote_types(rows.dtype, torch.float32))
    return bool(total.isfinite()) or bool(rows.isfinite().all())


class _Probe:
    """Activations of one side for the first samples."""

    def __init__(self, side: Side, names: Sequence[str]) -> None:
        self.first: dict[str, str] = {}
        self.specs: dict[str, RepresentationSpec] = {}
        self._activations: dict[str, Representation] = {}
        tensors: dict[Any, tuple[str, Tensor]] = {}  # references keep their memory from being reused

        def callback(name: str, representation: Representation) -> None:
            values = representation.values
            version = None if values.is_inference() else values._version
            what = (values.data_ptr(), representation.spec, values.stride(), values.dtype, version)
            self.first[name] = tensors.setdefault(what, (name, values))[0]
            self.specs[name] = representation.spec
            if self.first[name] == name:
                self._activations[name] = representation.replace(values=values.clone())

        side.run_with_callback(0, PROBE, names, callback)

    def repeat(self, layers: Sequence[str], callback: LayerCallback) -> None:
        """Call ``callback`` with the recorded activations."""
        for name in layers:
            callback(name, self._activations[name])
