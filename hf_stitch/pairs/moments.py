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
"""Placeholder for a missing grid in a tensor."""


def check_moments_fit(pair: Pair) -> None:
    """Raise an error if the moments of pairs of layers do not fit into memory."""
    sizes: dict[tuple[str, str], int] = {}
    for a, b in pair.cells:
        dx, dy = part_widths(*pair.specs((a, b)), pair.pooling)["body"]
        sizes[a, b] = 8 * dx * dy
        sizes[a, ""], sizes["", b] = 8 * dx**2, 8 * dy**2  # of each layer with itself
    a, b = max(pair.cells, key=lambda cell: sizes[cell[0], ""] + sizes["", cell[1]])
    dx, dy = part_widths(*pair.specs((a, b)), pair.pooling)["body"]
    check_fits(
        f"the moments of layers up to {a!r} (width {dx:,}) and {b!r} (width {dy:,})", sum(sizes.values()),
        pair.source.device, f"use another pooling than {pair.pooling!r}, or fewer or narrower layers",
    )  # fmt: skip


class PairMoments:
    """Moments of any number of pairs of layers, updated batch by batch.

    Layers of the target with the same form (grid, prefix tokens) are grouped, so that each layer of the source is
    shrunk once for a group, and the second moments of a layer are computed once, not once for each pair. Layers with a
    much smaller grid are not enlarged: their moments follow from the smaller grid. Batches of images of different sizes
    form separate groups.
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
            group = next((existing for existing in self._groups if existing.form == form), None)
            if group is None:
                self._groups.append(group := _Group(form, layers))
            group.update(x, y, self.pooling)
        return self

    def prepare(self, x: Mapping[str, Representation], y: Mapping[str, Representation]) -> Self:
        """Set the origins of the sums to the means of a batch without counting it, equally in all processes."""
        self.update(x, y)
        for group in self._groups:
            group.reset()
        return self

    def all_reduce(self, processes: Processes) -> Self:
        """Combine the moments of all processes; afterwards, every process has the total."""
        if processes.count == 1:
            return self
        pairs = [(a, b) for b, partners in self._partners.items() for a in partners]
        state, total = self.state_dict(), list[_Group]()
        for rank in range(processes.count):
            of_rank = PairMoments(pairs, self.pooling)
            of_rank.load_state_dict(processes.from_rank(state, rank))
            total += [
                rank_group for rank_group in of_rank._groups if not any(group.merge(rank_group) for group in total)
            ]
        self._groups = total
        return self

    def of(self, a: str, b: str) -> dict[str, Moments]:
        """Return the moments of a pair, by part of the stitching layer."""
        first, *others = (group.of(a, b) for group in self._groups if b in group.layers_b)
        for part_moments in others:
            for part, moments in part_moments.items():
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
            group_state = within(f"{number}.", state)
            group_layers = [layers[index] for index in group_state["layers_b"].tolist()]
            form = _Form.from_tensor(self._partners[group_layers[0]], group_state["form"])
            self._groups.append(_Group(form, group_layers))
            self._groups[-1].load_state_dict(group_state)
        if missing := [b for b in layers if not any(b in group.layers_b for group in self._groups)]:
            raise ValueError(f"the moments of {', '.join(missing)} are missing")


@dataclass(frozen=True)
class _Form:
    """Common form of the layers of the target in a group."""

    layers_a: tuple[str, ...]  # their partners
    small: tuple[Grid | None, ...]  # for each partner, its grid before enlarging
    large: Grid | None  # the grid of the target; None without a grid
    is_vector: bool  # whether the target has one vector per sample
    has_prefix: bool  # whether the target has prefix tokens

    @classmethod
    def of(cls, x: Mapping[str, Representation], y: Representation, pooling: Pooling) -> Self:
        """Return the form of a layer of the target, with its partners."""
        small = tuple(a.grid if enlarges(a.grid, y.grid, pooling) and _saves_work(a, y) else None for a in x.values())
        return cls(tuple(x), small, y.grid, y.layout == "bd", bool(y.prefix_tokens))

    def to_tensor(self) -> Tensor:
        """Return all fields except the names as numbers."""
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
    """Layers of the target with the same form, each paired with all partner layers of the source."""

    def __init__(self, form: _Form, layers_b: list[str]) -> None:
        self.form, self.layers_b = form, layers_b
        self.enlarged: dict[str, list[str]] = {}
        for a, grid in zip(form.layers_a, form.small, strict=True):
            if grid:
                self.enlarged.setdefault(f"body of {grid[0]}x{grid[1]}", []).append(a)
        self.not_enlarged = [a for a, grid in zip(form.layers_a, form.small, strict=True) if not grid]
        self.sums: dict[str, Any] = {}  # LayerMoments of body and prefix, InterpolatedMoments of smaller grids

    def of(self, a: str, b: str) -> dict[str, Moments]:
        """Return the moments of a pair of layers, by part of the stitching layer."""
        j = self.layers_b.index(b)
        if a in self.not_enlarged:
            moments = {"body": self.sums["body"].moments(self.not_enlarged.index(a), j)}
        else:
            part = next(part for part, layers in self.enlarged.items() if a in layers)
            target_moments = self.sums["body"].moments(0, j)
            moments = {"body": self.sums[part].moments(self.enlarged[part].index(a), j, target_moments)}
        if "prefix" in self.sums:
            moments["prefix"] = self.sums["prefix"].moments(self.form.layers_a.index(a), j)
        return moments

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
                statistic.check_mergeable(other.sums[part])
        except ValueError:
            return False
        for part, statistic in self.sums.items():
            statistic.merge(other.sums[part])
        return True

    def update(self, x: Mapping[str, Representation], y: Mapping[str, Representation], pooling: Pooling) -> None:
        """Add a batch. Rows of a layer do not depend on its partner in the group, so one partner is enough."""
        a, target = self.form.layers_a[0], y[self.layers_b[0]]
        target_rows = [y[b].positions() for b in self.layers_b] if self.enlarged else []
        for part, layers in self.enlarged.items():
            rows = [x[layer].positions().to(target_rows[0].device) for layer in layers]
            if part not in self.sums:
                small, large = x[layers[0]].grid, target.grid
                assert small is not None and large is not None
                self.sums[part] = InterpolatedMoments(_origins(rows), _origins(target_rows), small, large)
            self.sums[part].update(rows, target_rows)
        if self.not_enlarged:
            pairs = [paired_rows(x[layer], target, pooling)["body"] for layer in self.not_enlarged]
            others = [paired_rows(x[self.not_enlarged[0]], y[b], pooling)["body"] for b in self.layers_b[1:]]
            self._update("body", [ys for _, ys in (pairs[0], *others)], [xs for xs, _ in pairs])
        else:
            self._update("body", [rows.flatten(0, 1) for rows in target_rows])
        if "prefix" in part_widths(x[a].spec, target.spec, pooling):
            pairs = [paired_prefix(x[layer], target) for layer in self.form.layers_a]
            others = [paired_prefix(x[a], y[b]) for b in self.layers_b[1:]]
            self._update("prefix", [ys for _, ys in (pairs[0], *others)], [xs for xs, _ in pairs])

    def _update(self, part: str, y: list[Tensor], x: list[Tensor] | None = None) -> None:
        sides = [y] if x is None else [[rows.to(y[0].device) for rows in x], y]
        if part not in self.sums:
            self.sums[part] = LayerMoments(*map(_origins, sides))
        self.sums[part].update(*sides)

    def state_dict(self, layers: Sequence[str]) -> dict[str, Tensor]:
        """Return the form, the indices of the layers of the target, and the sums."""
        sums = {
            f"{part}.{key}": tensor
            for part, statistic in self.sums.items()
            for key, tensor in statistic.state_dict().items()
        }
        indices = torch.tensor([layers.index(b) for b in self.layers_b])
        return {"form": self.form.to_tensor(), "layers_b": indices, **sums}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the sums."""
        for part in dict.fromkeys(key.partition(".")[0] for key in state if "." in key):
            statistic_class = InterpolatedMoments if part in self.enlarged else LayerMoments
            self.sums[part] = statistic_class.from_state_dict(within(f"{part}.", state))


def _saves_work(x: Representation, y: Representation) -> bool:
    """Return whether products on the small grid save more than resizing the target's rows costs."""
    assert x.grid is not None and y.grid is not None
    return 4 * math.prod(x.grid) <= math.prod(y.grid) and x.width > y.width


def _origins(layers: list[Tensor]) -> list[Tensor]:
    """Return means of a few rows of each layer, as origins for precise sums."""
    return [rows.flatten(0, -2)[:1024].double().mean(0) for rows in layers]
