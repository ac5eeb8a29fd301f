"""The layers that are compared, and the rows of both sides, batch by batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from hf_stitch.adapters.base import LayerCallback
from hf_stitch.analysis.comparison.sides import Side
from hf_stitch.representation import Pooling, Representation, RepresentationSpec
from hf_stitch.stitches.layer import check_specs

Grid = tuple[int, int] | None


Key = tuple[int, str, Grid]
"""A matrix of rows: the number of its side, its layer, and the grid that positions were brought to."""


PROBE = 2
"""Samples that are looked at before the others."""


RunLayers = Callable[[Sequence[str], LayerCallback], None]
"""Tells what is said of some samples at some layers, each once."""


Take = Callable[[Key, Tensor], bool]
"""Is given the rows of a matrix, which last no longer than the call, and says whether they are finite."""


@dataclass(frozen=True)
class Group:
    """Matrices that share their rows: layers of b on one grid, and all layers of a brought to it.

    Attributes:
        x: The distinct matrices of a.
        y: Those of b; the very same where b is a.
        of_a: For each layer of a its place in ``x``.
        of_b: For each of these layers of b its place in ``y``.
        places: For each of these layers of b its place among all.
    """

    x: tuple[Key, ...]
    y: tuple[Key, ...]
    of_a: tuple[int, ...]
    of_b: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def same(self) -> bool:
        """Whether both sides are the same matrices."""
        return self.x == self.y

    @property
    def keys(self) -> tuple[Key, ...]:
        """All distinct matrices."""
        return tuple(dict.fromkeys((*self.x, *self.y)))


class LayerReader:
    """The layers of both sides that are compared, and their rows, batch by batch.

    A few samples are looked at first, from which the shapes follow, and which layers return the very same tensor: that
    one is taken once.

    Attributes:
        layers_a: Layers of a.
        layers_b: Layers of b.
        n: Number of samples.
        groups: What is compared with what.
        probe: The rows of the first samples.
        seconds: For one sample, as measured.

    Args:
        sides: Both sides, or the one that stands on both.
        layers_a: Layers of a; ``None``: all that it offers.
        layers_b: Layers of b.
        pooling: The pooling.
        ordered: Whether the features of flattened pooling must be in the order of positions at every layer; in that of
            memory they need not be moved.

    Raises:
        ValueError: If there are less than 2 samples, no layers, or layers that cannot be compared under the pooling.
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
            raise ValueError(f"a comparison takes at least {PROBE} samples, got {self.n}")
        self.layers_a, self.layers_b = _named("a", layers_a, sides[0]), _named("b", layers_b, sides[-1])
        last = len(sides) - 1
        wanted = [dict.fromkeys(self.layers_a)] if last else [dict.fromkeys((*self.layers_a, *self.layers_b))]
        wanted += [dict.fromkeys(self.layers_b)] if last else []
        start = time.perf_counter()
        looks = [_Look(side, list(names)) for side, names in zip(sides, wanted, strict=True)]
        self.seconds = (time.perf_counter() - start) / PROBE
        self.groups = self._grouped(looks[0], looks[-1])
        self._grids: dict[tuple[int, str], list[Grid]] = {}
        for number, name, grid in dict.fromkeys(key for group in self.groups for key in group.keys):
            self._grids.setdefault((number, name), []).append(grid)
        self._device: torch.device | None = None
        self.probe: dict[Key, Tensor] = {}
        self._tell(0, self._keep, [look.repeat for look in looks])
        device = self.probe[self.groups[0].y[0]].device
        self._device = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
        self.probe = {key: rows.to(self._device) for key, rows in self.probe.items()}

    def rows(self, start: int, stop: int, take: Take) -> None:
        """Tell the rows of the samples from ``start`` to ``stop``: of each matrix ``(rows, d)``, as it comes.

        Raises:
            ValueError: If a sample is masked entirely, an activation is NaN or infinite (the message says which), or
                the sides have different tokens.
        """
        self._tell(start, take, [partial(side.run_with_callback, start, stop) for side in self.sides])

    def _tell(self, start: int, take: Take, runs: Sequence[RunLayers]) -> None:
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
                    "pooling 'none' needs both sides to have the same tokens, and a sample of the batch from "
                    f"{self.sides[0].ids[start]!r} on has not; use pooling='mean', 'cls' or 'last'"
                )

    def _keep(self, key: Key, rows: Tensor) -> bool:
        self.probe[key] = rows
        return all_finite(rows)

    def _rows(self, representation: Representation) -> Tensor:
        if self.pooling == "flatten" and representation.layout == "bchw" and not self._ordered:
            return representation.values.flatten(1)
        return representation.rows(self.pooling)

    def width(self, key: Key) -> int:
        """How wide a matrix is."""
        return self.probe[key].shape[1]

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.probe[self.groups[0].y[0]].device if self._device is None else self._device

    def count(self, group: Group) -> int:
        """About how many rows the matrices of a group have: of texts it is not known before."""
        return round(len(self.probe[group.y[0]]) * self.n / PROBE)

    def _grouped(self, look_a: _Look, look_b: _Look) -> tuple[Group, ...]:
        by_grid: dict[Grid, list[int]] = {}
        for place, b in enumerate(self.layers_b):
            for a in self.layers_a:
                try:
                    check_specs(look_a.specs[a], look_b.specs[b], self.pooling)
                except ValueError as error:
                    raise ValueError(f"layer {a!r} of a and layer {b!r} of b: {error}") from error
            by_grid.setdefault(look_b.specs[b].grid if self.pooling == "none" else None, []).append(place)
        groups = []
        for grid, places in by_grid.items():
            of_a = [(0, look_a.first[name], grid) for name in self.layers_a]
            of_b = [(len(self.sides) - 1, look_b.first[self.layers_b[place]], grid) for place in places]
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
            raise ValueError(f"sample {sample!r} is masked entirely at layer {name!r}; leave it out by select")

    def _refuse(self, rows: Tensor, representation: Representation, name: str, start: int) -> NoReturn:
        """Say which sample of a layer is not finite."""
        finite = rows.isfinite().all(1)
        if bool(finite.all()):
            raise ValueError(f"products of layer {name!r} overflow {rows.dtype}; run the network in a wider dtype")
        place = int(representation.row_samples(self.pooling)[int(finite.logical_not().nonzero()[0])])
        raise ValueError(
            f"layer {name!r} is NaN or infinite for sample {self.sides[0].ids[start + place]!r}; leave it out, or run "
            "the network in a wider dtype"
        )


def all_finite(rows: Tensor) -> bool:
    """Whether nothing is NaN or infinite; a sum shows it, unless it overflows."""
    total = rows.sum(dtype=torch.promote_types(rows.dtype, torch.float32))
    return bool(total.isfinite()) or bool(rows.isfinite().all())


def _named(side: str, layers: Iterable[str] | None, offered: Side) -> tuple[str, ...]:
    if isinstance(layers, str):
        raise TypeError(f"layers_{side} must be a list of names, got {layers!r}; write [{layers!r}]")
    names = tuple(offered.layers if layers is None else layers)
    if not names:
        raise ValueError(f"layers_{side} must name at least one layer, got none")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"layers_{side} names {twice[0]!r} more than once")
    return names


class _Look:
    """What a side says of the first samples.

    Attributes:
        first: For each layer the first that returns the very same tensor.
        specs: Of each layer.
    """

    def __init__(self, side: Side, names: Sequence[str]) -> None:
        self.first: dict[str, str] = {}
        self.specs: dict[str, RepresentationSpec] = {}
        self._said: dict[str, Representation] = {}
        tensors: dict[Any, tuple[str, Tensor]] = {}  # they are held, so that no other takes their place in memory

        def callback(name: str, representation: Representation) -> None:
            values = representation.values
            version = None if values.is_inference() else values._version
            what = (values.data_ptr(), representation.spec, values.stride(), values.dtype, version)
            self.first[name] = tensors.setdefault(what, (name, values))[0]
            self.specs[name] = representation.spec
            if self.first[name] == name:
                self._said[name] = representation.replace(values=values.clone())

        side.run_with_callback(0, PROBE, names, callback)

    def repeat(self, layers: Sequence[str], callback: LayerCallback) -> None:
        """Tell it again."""
        for name in layers:
            callback(name, self._said[name])
