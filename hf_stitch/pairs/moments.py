"""Moments of any number of pairs of layers, updated batch by batch: :class:`PairMoments`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from hf_stitch.pairs.pair import Pair
from hf_stitch.representation import Pooling, Representation
from hf_stitch.resources import check_fits
from hf_stitch.running import Processes
from hf_stitch.statistics import Moments
from hf_stitch.statistics.base import within
from hf_stitch.statistics.layer_moments import InterpolatedMoments, LayerMoments
from hf_stitch.stitches.layer import enlarges, paired_prefix, paired_rows, part_widths

Grid = tuple[int, int]
NO_GRID = (-1, -1)
"""Place of a missing grid among numbers."""


def check_moments_fit(pair: Pair) -> None:
    """Refuse pairs of layers whose moments do not fit into memory."""
    sizes: dict[tuple[str, str], int] = {}
    for a, b in pair.cells:
        dx, dy = part_widths(*pair.specs((a, b)), pair.pooling)["body"]
        sizes[a, b] = 8 * dx * dy
        sizes[a, ""], sizes["", b] = 8 * dx**2, 8 * dy**2
    a, b = max(pair.cells, key=lambda cell: sizes[cell[0], ""] + sizes["", cell[1]])
    dx, dy = part_widths(*pair.specs((a, b)), pair.pooling)["body"]
    check_fits(
        f"the moments of layers up to {a!r} (width {dx:,}) and {b!r} (width {dy:,})", sum(sizes.values()),
        pair.source.device, f"use another pooling than {pair.pooling!r}, or fewer or narrower layers",
    )  # fmt: skip


class PairMoments:
    """Moments of any number of pairs of layers, updated batch by batch.

    Layers of the target with the same form (grid, prefix tokens) are grouped, so that each layer of the source is
    shrunk once for a group, and the second moments of a layer are computed once, not once for each pair. Layers that
    would be enlarged much are not: their moments follow from the smaller grid. Batches of images of another size have
    groups of their own.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]], pooling: Pooling = "none") -> None:
        self.pooling = pooling
        self._partners: dict[str, list[str]] = {}
        for a, b in pairs:
            self._partners.setdefault(b, []).append(a)
        self._groups: list[_Group] = []

    def update(self, x: Mapping[str, Representation], y: Mapping[str, Representation]) -> Self:
        """Add a batch."""
        forms: dict[_Form, list[str]] = {}
        for b, partners in self._partners.items():
            forms.setdefault(_Form.of({a: x[a] for a in partners}, y[b], self.pooling), []).append(b)
        for form, layers in forms.items():
            group = next((each for each in self._groups if each.form == form), None)
            if group is None:
                self._groups.append(group := _Group(form, layers))
            group.update(x, y, self.pooling)
        return self

    def prepare(self, x: Mapping[str, Representation], y: Mapping[str, Representation]) -> Self:
        """Take the sums about the means of a batch, without counting it, as several processes must do alike."""
        self.update(x, y)
        for group in self._groups:
            group.reset()
        return self

    def all_reduce(self, processes: Processes) -> Self:
        """Combine the moments of all processes; every process then has the total."""
        if processes.count == 1:
            return self
        pairs = [(a, b) for b, partners in self._partners.items() for a in partners]
        mine, total = self.state_dict(), list[_Group]()
        for rank in range(processes.count):
            part = PairMoments(pairs, self.pooling)
            part.load_state_dict(processes.from_rank(mine, rank))
            total += [own for own in part._groups if not any(group.merge(own) for group in total)]
        self._groups = total
        return self

    def of(self, a: str, b: str) -> dict[str, Moments]:
        """Return the moments of a pair, by part of the stitching layer."""
        first, *others = (group.of(a, b) for group in self._groups if b in group.layers_b)
        for other in others:
            for part, moments in other.items():
                first[part].merge(moments)
        return first

    def state_dict(self) -> dict[str, Tensor]:
        """Return the sums as tensors by name, for a checkpoint."""
        layers = list(self._partners)
        return {
            f"{number}.{key}": tensor
            for number, group in enumerate(self._groups)
            for key, tensor in group.state_dict(layers).items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the sums of :meth:`state_dict`, on the device of its tensors."""
        layers = list(self._partners)
        for number in dict.fromkeys(key.partition(".")[0] for key in state):
            of_group = within(f"{number}.", state)
            own = [layers[place] for place in of_group["layers_b"].tolist()]
            form = _Form.from_tensor(self._partners[own[0]], of_group["form"])
            self._groups.append(_Group(form, own))
            self._groups[-1].load_state_dict(of_group)
        if missing := [b for b in layers if not any(b in group.layers_b for group in self._groups)]:
            raise ValueError(f"the moments of {', '.join(missing)} are missing")


@dataclass(frozen=True)
class _Form:
    """What layers of the target in a group have in common."""

    layers_a: tuple[str, ...]  # their partners
    small: tuple[Grid | None, ...]  # for each partner, the grid on which it is fitted before it is enlarged
    large: Grid | None  # the grid of the target; None without a grid
    is_vector: bool  # whether the target has one vector per sample
    has_prefix: bool  # whether the target has prefix tokens

    @classmethod
    def of(cls, x: Mapping[str, Representation], y: Representation, pooling: Pooling) -> Self:
        """Return the form of a layer of the target, with its partners."""
        small = tuple(own.grid if enlarges(own.grid, y.grid, pooling) and _pays(own, y) else None for own in x.values())
        return cls(tuple(x), small, y.grid, y.layout == "bd", bool(y.prefix_tokens))

    def to_tensor(self) -> Tensor:
        """Return everything but the names as numbers."""
        return torch.tensor(
            [*(grid or NO_GRID for grid in (*self.small, self.large)), (self.is_vector, self.has_prefix)]
        )

    @classmethod
    def from_tensor(cls, layers_a: Iterable[str], numbers: Tensor) -> Self:
        """Return the form of :meth:`to_tensor`."""
        *grids, flags = (tuple(row) for row in numbers.tolist())
        *small, large = (None if grid == NO_GRID else grid for grid in grids)
        return cls(tuple(layers_a), tuple(small), large, *map(bool, flags))


class _Group:
    """Layers of the target of one form, each paired with each of some layers of the source."""

    def __init__(self, form: _Form, layers_b: list[str]) -> None:
        self.form, self.layers_b = form, layers_b
        self.enlarged: dict[str, list[str]] = {}
        for a, grid in zip(form.layers_a, form.small, strict=True):
            if grid:
                self.enlarged.setdefault(f"body of {grid[0]}x{grid[1]}", []).append(a)
        self.others = [a for a, grid in zip(form.layers_a, form.small, strict=True) if not grid]
        self.sums: dict[str, Any] = {}  # LayerMoments of body and prefix, InterpolatedMoments of smaller grids

    def of(self, a: str, b: str) -> dict[str, Moments]:
        """Return the moments of a pair of layers, by part of the stitching layer."""
        j = self.layers_b.index(b)
        if a in self.others:
            found = {"body": self.sums["body"].moments(self.others.index(a), j)}
        else:
            part = next(part for part, layers in self.enlarged.items() if a in layers)
            own = self.sums["body"].moments(0, j)
            found = {"body": self.sums[part].moments(self.enlarged[part].index(a), j, own)}
        if "prefix" in self.sums:
            found["prefix"] = self.sums["prefix"].moments(self.form.layers_a.index(a), j)
        return found

    def reset(self) -> None:
        """Remove all rows; the origins stay."""
        for statistic in self.sums.values():
            statistic.reset()

    def merge(self, other: _Group) -> bool:
        """Add the sums of another group, and return True, if both have the same form, layers and origins."""
        if (other.form, other.layers_b) != (self.form, self.layers_b):
            return False
        try:
            for part, statistic in self.sums.items():
                statistic.check_alike(other.sums[part])
        except ValueError:
            return False
        for part, statistic in self.sums.items():
            statistic.merge(other.sums[part])
        return True

    def update(self, x: Mapping[str, Representation], y: Mapping[str, Representation], pooling: Pooling) -> None:
        """Add a batch. Rows of a layer do not depend on its partner in the group, so that one partner is enough."""
        a, first = self.form.layers_a[0], y[self.layers_b[0]]
        own = [y[b].positions() for b in self.layers_b] if self.enlarged else []
        for part, layers in self.enlarged.items():
            rows = [x[layer].positions().to(own[0].device) for layer in layers]
            if part not in self.sums:
                small, large = x[layers[0]].grid, first.grid
                assert small is not None and large is not None
                self.sums[part] = InterpolatedMoments(_origins(rows), _origins(own), small, large)
            self.sums[part].update(rows, own)
        if self.others:
            pairs = [paired_rows(x[layer], first, pooling)["body"] for layer in self.others]
            others = [paired_rows(x[self.others[0]], y[b], pooling)["body"] for b in self.layers_b[1:]]
            self._update("body", [of_y for _, of_y in (pairs[0], *others)], [of_x for of_x, _ in pairs])
        else:
            self._update("body", [rows.flatten(0, 1) for rows in own])
        if "prefix" in part_widths(x[a].spec, first.spec, pooling):
            pairs = [paired_prefix(x[layer], first) for layer in self.form.layers_a]
            others = [paired_prefix(x[a], y[b]) for b in self.layers_b[1:]]
            self._update("prefix", [of_y for _, of_y in (pairs[0], *others)], [of_x for of_x, _ in pairs])

    def _update(self, part: str, y: list[Tensor], x: list[Tensor] | None = None) -> None:
        sides = [y] if x is None else [[rows.to(y[0].device) for rows in x], y]
        if part not in self.sums:
            self.sums[part] = LayerMoments(*map(_origins, sides))
        self.sums[part].update(*sides)

    def state_dict(self, layers: Sequence[str]) -> dict[str, Tensor]:
        """Return form, places of the layers of the target among all, and sums."""
        kept = {
            f"{part}.{key}": tensor
            for part, statistic in self.sums.items()
            for key, tensor in statistic.state_dict().items()
        }
        places = torch.tensor([layers.index(b) for b in self.layers_b])
        return {"form": self.form.to_tensor(), "layers_b": places, **kept}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the sums."""
        for part in dict.fromkeys(key.partition(".")[0] for key in state if "." in key):
            kind = InterpolatedMoments if part in self.enlarged else LayerMoments
            self.sums[part] = kind.from_state_dict(within(f"{part}.", state))


def _pays(x: Representation, y: Representation) -> bool:
    """Whether products on the small grid save more than the target's rows cost, which are brought there."""
    assert x.grid is not None and y.grid is not None
    return 4 * math.prod(x.grid) <= math.prod(y.grid) and x.width > y.width


def _origins(layers: list[Tensor]) -> list[Tensor]:
    """Means of a few rows of each layer, near which sums are precise."""
    return [rows.flatten(0, -2)[:1024].double().mean(0) for rows in layers]
