"""Fit a stitching layer between two networks on samples, with a matcher of moments or of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from hf_stitch.adapters import Adapter
from hf_stitch.data import Batch, Samples, paired_batches
from hf_stitch.matchers import ClosedFormMatcher, Matcher, NoAlignmentError, RowsMatcher, UnpairedMatcher
from hf_stitch.processes import ALONE, Processes
from hf_stitch.representation import Pooling, Representation, RepresentationSpec
from hf_stitch.resources import check_fits
from hf_stitch.statistics import Features, InterpolatedMoments, LayerMoments, Moments
from hf_stitch.statistics.base import within
from hf_stitch.stitches import Stitch, StitchingLayer
from hf_stitch.stitches.layer import (
    POOLED,
    enlarges,
    paired_prefix,
    paired_rows,
    part_widths,
    source_positions,
    source_prefix,
)

Grid = tuple[int, int]
NO_GRID = (-1, -1)
"""Place of a missing grid among numbers."""
Statistics = dict[str, Moments]
"""Moments by part of a stitching layer: ``body``, and ``prefix`` where the target has prefix tokens."""
PairedRows = dict[str, Features]
"""Rows by part of a stitching layer."""
UnpairedRows = dict[str, tuple[Tensor, Tensor]]
"""Rows of the source and rows of the target without partners, by part of a stitching layer."""


@torch.no_grad()
def collect(
    source: Adapter,
    target: Adapter,
    pairs: Iterable[tuple[str, str]],
    samples: Samples,
    pooling: Pooling = "none",
    *,
    target_samples: Samples | None = None,
    batch_size: int = 64,
    progress: bool = True,
    processes: Processes = ALONE,
) -> dict[tuple[str, str], Statistics]:
    """Collect the moments of any number of pairs of layers in one pass over the data.

    Each network runs once per batch.

    Args:
        source: The first network.
        target: The second network.
        pairs: Pairs of layers (of the source, of the target).
        samples: Raw samples, the same for both networks.
        pooling: The pooling.
        target_samples: Samples for the second network, in the same order, if they differ.
        batch_size: Samples per forward pass.
        progress: Whether to show a progress bar.
        processes: The processes that share the samples; all of them return the same.

    Returns:
        The moments of each pair, by part of the stitching layer.

    Raises:
        ValueError: Activations are NaN or infinite (the message names layer and sample), or rows do not correspond.
    """
    pairs = list(dict.fromkeys(pairs))
    layers = list(dict.fromkeys(a for a, _ in pairs)), list(dict.fromkeys(b for _, b in pairs))
    others = samples if target_samples is None else target_samples
    check_moments_fit(source, target, pairs, pooling)
    moments = PairMoments(pairs, pooling)
    if processes.count > 1:
        count = min(batch_size, len(samples))
        first = samples.take(count)
        for x, y in _run(source, target, *layers, first, first if others is samples else others.take(count), count):
            moments.prepare(x, y)
    for x, y in _run(source, target, *layers, samples, others, batch_size, progress, processes):
        moments.update(x, y)
    moments.all_reduce(processes)
    return {pair: moments.of(*pair) for pair in pairs}


def check_moments_fit(source: Adapter, target: Adapter, pairs: Iterable[tuple[str, str]], pooling: Pooling) -> None:
    """Refuse pairs of layers whose moments do not fit into memory.

    Args:
        source: The first network.
        target: The second network.
        pairs: Pairs of layers (of the source, of the target).
        pooling: The pooling.

    Raises:
        ValueError: If less memory is free than the moments take at least.
    """
    sizes: dict[tuple[str, str], int] = {}
    for a, b in pairs:
        dx, dy = part_widths(source.spec(a), target.spec(b), pooling)["body"]
        sizes[a, b] = 8 * dx * dy
        sizes[a, ""], sizes["", b] = 8 * dx**2, 8 * dy**2
    a, b = max(((a, b) for a, b in sizes if a and b), key=lambda pair: sizes[pair[0], ""] + sizes["", pair[1]])
    dx, dy = part_widths(source.spec(a), target.spec(b), pooling)["body"]
    check_fits(
        f"the moments of layers up to {a!r} (width {dx:,}) and {b!r} (width {dy:,})", sum(sizes.values()),
        source.device, f"use another pooling than {pooling!r}, or fewer or narrower layers",
    )  # fmt: skip


@torch.no_grad()
def collect_rows(
    source: Adapter,
    target: Adapter,
    pair: tuple[str, str],
    samples: Samples,
    pooling: Pooling = "none",
    *,
    target_samples: Samples | None = None,
    batch_size: int = 64,
    progress: bool = True,
    processes: Processes = ALONE,
) -> PairedRows:
    """Collect the paired rows of two layers in one pass over the data, in memory.

    Args:
        source: The first network.
        target: The second network.
        pair: Layer of the source, and layer of the target.
        samples: Raw samples, the same for both networks.
        pooling: The pooling.
        target_samples: Samples for the second network, in the same order, if they differ.
        batch_size: Samples per forward pass.
        progress: Whether to show a progress bar.
        processes: The processes that share the samples; all of them return the same.

    Returns:
        The rows, by part of the stitching layer.

    Raises:
        ValueError: Activations are NaN or infinite (the message names layer and sample), or rows do not correspond.
    """
    others = samples if target_samples is None else target_samples
    found: PairedRows = {}
    for x, y in _run(source, target, [pair[0]], [pair[1]], samples, others, batch_size, progress, processes):
        parts = paired_rows(x[pair[0]], y[pair[1]], pooling)
        if not found:
            size = sum(rows.nbytes for both in parts.values() for rows in both) * len(samples) // x[pair[0]].batch
            cpu = torch.device("cpu")
            check_fits("the rows of all samples", size, cpu, "use fewer samples, or a matcher of moments")
        for part, rows in parts.items():
            found.setdefault(part, Features()).update(*rows)
    if processes.accelerator is not None:
        for features in found.values():
            features.all_reduce(processes.accelerator)
    return found


@torch.no_grad()
def collect_unpaired(
    source: Adapter,
    target: Adapter,
    pair: tuple[str, str],
    unpaired: tuple[Samples, Samples],
    pooling: Pooling = "none",
    *,
    batch_size: int = 64,
    progress: bool = True,
    processes: Processes = ALONE,
) -> UnpairedRows:
    """Collect the rows of two layers, each on samples of its own, in memory.

    Args:
        source: The first network.
        target: The second network.
        pair: Layer of the source, and layer of the target.
        unpaired: Raw samples for the source, and raw samples for the target.
        pooling: The pooling.
        batch_size: Samples per forward pass.
        progress: Whether to show a progress bar.
        processes: The processes that share the samples; all of them return the same.

    Returns:
        The rows of both sides, by part of the stitching layer.

    Raises:
        ValueError: Activations are NaN or infinite (the message names layer and sample).
    """
    specs = source.spec(pair[0]), target.spec(pair[1])
    sides = []
    for number, (adapter, layer, samples) in enumerate(zip((source, target), pair, unpaired, strict=True)):
        side, found = ("source", "target")[number], dict[str, list[Tensor]]()
        own = samples.select(range(*processes.part(len(samples), batch_size))) if processes.count > 1 else samples
        bar = f"reading the {side}" if progress and processes.rank == 0 else None
        for batch in processes.watched(own.batches(batch_size, bar)):
            values = adapter.encode(adapter.preprocess(batch.samples), layer)[layer]
            check_finite(values, f"layer {layer!r} of the {side}", batch)
            parts = _rows_alone(values, specs[1], pooling, of_source=number == 0)
            if not found:
                size = sum(rows.nbytes for rows in parts.values()) * len(own) // len(batch.samples)
                check_fits(f"the unpaired rows of the {side}", size, torch.device("cpu"), "use fewer samples")
            for part, rows in parts.items():
                found.setdefault(part, []).append(rows.cpu())
        mine = {part: torch.cat(rows) for part, rows in found.items()}
        if processes.count > 1:
            others = [processes.from_rank(mine, rank) for rank in range(processes.count)]
            mine = {part: torch.cat([other[part] for other in others]) for part in mine}
        sides.append(mine)
    return {part: (sides[0][part], sides[1][part]) for part in part_widths(*specs, pooling)}


def _rows_alone(
    values: Representation, target: RepresentationSpec, pooling: Pooling, *, of_source: bool
) -> dict[str, Tensor]:
    """Return the rows of one side by part, as ``paired_rows`` does for both."""
    if pooling == "none" and values.layout != "bd":
        values.check_padding_known(pooling)
        rows = source_positions(values, values.spec, target, pooling) if of_source else values.positions()
        mask = None if values.mask is None else values.mask[:, values.prefix_tokens :]
        parts = {"body": rows.flatten(0, 1) if mask is None else rows[mask]}
    elif of_source:
        parts = {"body": source_positions(values, values.spec, target, pooling)}
    else:
        parts = {"body": values.rows("cls" if pooling in POOLED and target.prefix_tokens else pooling)}
    if target.prefix_tokens and pooling not in POOLED:
        parts["prefix"] = source_prefix(values) if of_source else values.prefix().flatten(1)
    return parts


def _run(
    source: Adapter,
    target: Adapter,
    layers_a: Sequence[str],
    layers_b: Sequence[str],
    samples: Samples,
    others: Samples,
    batch_size: int,
    progress: bool = False,
    processes: Processes = ALONE,
) -> Iterator[tuple[dict[str, Representation], dict[str, Representation]]]:
    """Yield the representations of both networks batch by batch, checked for NaN and infinity."""
    for batch, other in paired_batches(samples, others, batch_size, "fitting" if progress else None, processes):
        x = source.encode(source.preprocess(batch.samples), layers_a)
        y = target.encode(target.preprocess(other.samples), layers_b)
        for side, representations in (("source", x), ("target", y)):
            for name, representation in representations.items():
                check_finite(representation, f"layer {name!r} of the {side}", batch)
        yield x, y


class PairMoments:
    """Moments of any number of pairs of layers, updated batch by batch.

    Layers of the target with the same form (grid, prefix tokens) are grouped, so that each layer of the source is
    shrunk once for a group, and the second moments of a layer are computed once, not once for each pair. Layers that
    would be enlarged much are not: their moments follow from the smaller grid. Batches of images of another size have
    groups of their own.

    Args:
        pairs: Pairs of layers (of the source, of the target).
        pooling: The pooling.

    Example:
        >>> x, y = ({"0": Representation(torch.randn(9, width), "bd")} for width in (4, 3))
        >>> PairMoments([("0", "0")]).update(x, y).of("0", "0")
        {'body': Moments(dx=4, dy=3, n=9, device='cpu')}
    """

    def __init__(self, pairs: Iterable[tuple[str, str]], pooling: Pooling = "none") -> None:
        self.pooling = pooling
        self._partners: dict[str, list[str]] = {}
        for a, b in pairs:
            self._partners.setdefault(b, []).append(a)
        self._groups: list[_Group] = []

    def update(self, x: Mapping[str, Representation], y: Mapping[str, Representation]) -> Self:
        """Add a batch.

        Args:
            x: Layer of the source -> its representation.
            y: Layer of the target -> its representation of the same samples.

        Returns:
            This object.

        Raises:
            ValueError: Rows of a pair do not correspond.
        """
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
        """Take the sums about the means of a batch, without counting it, as several processes must do alike.

        Args:
            x: Layer of the source -> its representation.
            y: Layer of the target -> its representation of the same samples.

        Returns:
            This object.
        """
        self.update(x, y)
        for group in self._groups:
            group.reset()
        return self

    def all_reduce(self, processes: Processes) -> Self:
        """Combine the moments of all processes; every process then has the total.

        Args:
            processes: The processes. All of them must call this method once, after the last batch.

        Returns:
            This object.
        """
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

    def of(self, a: str, b: str) -> Statistics:
        """Return the moments of a pair, by part of the stitching layer.

        Args:
            a: Layer of the source.
            b: Layer of the target.
        """
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
        """Restore the sums of :meth:`state_dict`, on the device of its tensors.

        Args:
            state: Result of :meth:`state_dict`.

        Raises:
            ValueError: If layers are missing, or their sums have other shapes.
        """
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
    """What layers of the target in a group have in common.

    Attributes:
        layers_a: Their partners.
        small: For each partner, the grid on which it is fitted before it is enlarged; None if it is resized first.
        large: The grid of the target; None without a grid.
        is_vector: Whether the target has one vector per sample.
        has_prefix: Whether the target has prefix tokens.
    """

    layers_a: tuple[str, ...]
    small: tuple[Grid | None, ...]
    large: Grid | None
    is_vector: bool
    has_prefix: bool

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
    """Layers of the target of one form, each paired with each of some layers of the source.

    Attributes:
        layers_b: Layers of the target.
        enlarged: Part -> layers of the source with a grid that is enlarged to that of the target.
        others: The other layers of the source.
        parts: Part -> moments. ``body`` has the other layers, or the target alone if there are none.
        small: Part in ``enlarged`` -> moments.
    """

    def __init__(self, form: _Form, layers_b: list[str]) -> None:
        self.form, self.layers_b = form, layers_b
        self.enlarged: dict[str, list[str]] = {}
        for a, grid in zip(form.layers_a, form.small, strict=True):
            if grid:
                self.enlarged.setdefault(f"body of {grid[0]}x{grid[1]}", []).append(a)
        self.others = [a for a, grid in zip(form.layers_a, form.small, strict=True) if not grid]
        self.parts: dict[str, LayerMoments] = {}
        self.small: dict[str, InterpolatedMoments] = {}

    def of(self, a: str, b: str) -> Statistics:
        """Return the moments of a pair of layers, by part of the stitching layer."""
        j = self.layers_b.index(b)
        if a in self.others:
            found = {"body": self.parts["body"].moments(self.others.index(a), j)}
        else:
            part = next(part for part, layers in self.enlarged.items() if a in layers)
            own = self.parts["body"].moments(0, j)
            found = {"body": self.small[part].moments(self.enlarged[part].index(a), j, own)}
        if "prefix" in self.parts:
            found["prefix"] = self.parts["prefix"].moments(self.form.layers_a.index(a), j)
        return found

    def reset(self) -> None:
        """Remove all rows; the origins stay."""
        for statistic in (*self.parts.values(), *self.small.values()):
            statistic.reset()

    def merge(self, other: _Group) -> bool:
        """Add the sums of another group, and return True, if both have the same form, layers and origins."""
        if (other.form, other.layers_b) != (self.form, self.layers_b):
            return False
        try:
            for part, statistic in self.parts.items():
                statistic.check_alike(other.parts[part])
            for part, small in self.small.items():
                small.check_alike(other.small[part])
        except ValueError:
            return False
        for part, statistic in self.parts.items():
            statistic.merge(other.parts[part])
        for part, small in self.small.items():
            small.merge(other.small[part])
        return True

    def update(self, x: Mapping[str, Representation], y: Mapping[str, Representation], pooling: Pooling) -> None:
        """Add a batch. Rows of a layer do not depend on its partner in the group, so that one partner is enough."""
        a, first = self.form.layers_a[0], y[self.layers_b[0]]
        own = [y[b].positions() for b in self.layers_b] if self.enlarged else []
        for part, layers in self.enlarged.items():
            rows = [x[layer].positions().to(own[0].device) for layer in layers]
            if part not in self.small:
                small, large = x[layers[0]].grid, first.grid
                assert small is not None and large is not None
                self.small[part] = InterpolatedMoments(_origins(rows), _origins(own), small, large)
            self.small[part].update(rows, own)
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
        if part not in self.parts:
            self.parts[part] = LayerMoments(*map(_origins, sides))
        self.parts[part].update(*sides)

    def state_dict(self, layers: Sequence[str]) -> dict[str, Tensor]:
        """Return form, places of the layers of the target among all, and sums."""
        kept = {
            f"{part}.{key}": tensor
            for part, statistic in (*self.parts.items(), *self.small.items())
            for key, tensor in statistic.state_dict().items()
        }
        return {
            "form": self.form.to_tensor(),
            "layers_b": torch.tensor([layers.index(b) for b in self.layers_b]),
            **kept,
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the sums."""
        for part in dict.fromkeys(key.partition(".")[0] for key in state if "." in key):
            kept = within(f"{part}.", state)
            if part in self.enlarged:
                self.small[part] = InterpolatedMoments.from_state_dict(kept)
            else:
                self.parts[part] = LayerMoments.from_state_dict(kept)


def _pays(x: Representation, y: Representation) -> bool:
    """Whether products on the small grid save more than the target's rows cost, which are brought there."""
    assert x.grid is not None and y.grid is not None
    return 4 * math.prod(x.grid) <= math.prod(y.grid) and x.width > y.width


def _origins(layers: list[Tensor]) -> list[Tensor]:
    """Means of a few rows of each layer, near which sums are precise."""
    return [rows.flatten(0, -2)[:1024].double().mean(0) for rows in layers]


def fit_layer(
    matcher: Matcher,
    statistics: Statistics | PairedRows,
    source: RepresentationSpec,
    target: RepresentationSpec,
    pooling: Pooling = "none",
    *,
    unpaired: UnpairedRows | None = None,
) -> StitchingLayer:
    """Fit the stitching layer of a matcher from the moments or the rows of its parts.

    Args:
        matcher: A closed-form matcher, or a matcher of rows.
        statistics: What the matcher is fitted from, by part of the stitching layer: moments, or rows.
        source: Spec of the source representation.
        target: Spec of the target representation.
        pooling: The pooling.
        unpaired: For an unpaired matcher, rows without partners, by part. If it needs no pairs, ``statistics`` may be
            empty.

    Returns:
        The stitching layer, in eval mode.

    Raises:
        NoAlignmentError: An unpaired matcher found no evidence that the spaces correspond.
        ValueError: The matcher could not fit a part (the message names the part), or needs other statistics.
    """
    maps: dict[str, Stitch] = {}
    means: dict[str, Tensor] = {}
    for part in part_widths(source, target, pooling):
        found = statistics.get(part)
        try:
            if isinstance(matcher, UnpairedMatcher) and unpaired is not None:
                u, v = unpaired[part]
                x, y = (found.x, found.y) if isinstance(found, Features) else (u[:0], v[:0])
                maps[part] = matcher.fit(x, y, unpaired=(u, v))
                means[part] = torch.cat([y, v]).double().mean(0)
            elif isinstance(matcher, RowsMatcher) and isinstance(found, Features):
                maps[part], means[part] = matcher.fit(found.x, found.y), found.y.double().mean(0)
            elif isinstance(matcher, ClosedFormMatcher) and isinstance(found, Moments):
                maps[part], means[part] = matcher.fit(found), found.mean_y
            else:
                raise ValueError(f"matcher {matcher.name!r} is fitted to {matcher.fits}; here are only {found!r}")
        except ValueError as error:
            vectors = "positions" if pooling == "none" else f"vectors (pooling {pooling!r})"
            what = f"the map of {vectors}" if part == "body" else "the map of prefix tokens (CLS, distillation)"
            kind = NoAlignmentError if isinstance(error, NoAlignmentError) else ValueError
            raise kind(f"{what} from {source} to {target}: {error}") from error
    return StitchingLayer(source, target, pooling, maps["body"], maps.get("prefix"), means).eval()


def check_finite(representation: Representation, what: str, batch: Batch) -> None:
    """Check the activations of a batch, except at padding.

    Args:
        representation: The activations.
        what: Their name in the message.
        batch: The samples.

    Raises:
        ValueError: Activations are NaN or infinite; the message names the first sample.
    """
    values = representation.values
    if bool(values.sum().isfinite()) or bool(values.isfinite().all()):  # the first is far faster, but may overflow
        return
    real = values if representation.mask is None else torch.where(representation.mask[..., None], values, 0)
    bad = ~torch.isfinite(real).flatten(1).all(1)
    if bool(bad.any()):
        sample = batch.ids[int(bad.nonzero()[0])]
        raise ValueError(
            f"{what} is NaN or infinite for {int(bad.sum())} samples of a batch of {len(batch.ids)}; the first is "
            f"{sample!r}"
        )
