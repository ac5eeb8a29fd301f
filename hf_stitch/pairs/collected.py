"""Activations of two networks at pairs of layers, for matchers."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_stitch.adapters import Adapter
from hf_stitch.adapters.recording import record
from hf_stitch.data import Batch, PairedSamples, Samples
from hf_stitch.pairs.moments import PairMoments, check_moments_fit
from hf_stitch.pairs.pair import Cell, Pair, check_finite
from hf_stitch.representation import Pooling, Representation, RepresentationSpec
from hf_stitch.resources import check_fits
from hf_stitch.running import ALONE, Run
from hf_stitch.statistics import Features, Moments
from hf_stitch.statistics.base import within
from hf_stitch.stitches.layer import POOLED, paired_rows, part_widths, source_positions, source_prefix
from hf_stitch.storage.checkpoint import Checkpoint
from hf_stitch.tasks.heads import task_named

Rows = dict[str, tuple[Tensor, Tensor]]
"""Rows of the source and of the target, by part of a stitching layer."""


class Collected(ABC):
    """Activations at pairs of layers, collected once for all matchers, on first use.

    Each method returns its values by part of the stitching layer: ``body``, and ``prefix`` if the target has prefix
    tokens and the pooling keeps positions.

    Attributes:
        pair: The networks; ``None`` for vectors without networks.
        pooling: The pooling.
        cells: The pairs of layers.

    Example:
        >>> spec = RepresentationSpec("bd", 3)
        >>> parts = {"body": Features().update(torch.ones(9, 3), torch.ones(9, 3))}
        >>> CollectedParts(spec, spec, "none", parts).moments(("source", "target"))
        {'body': Moments(dx=3, dy=3, n=9, device='cpu')}
    """

    pair: Pair | None = None
    pooling: Pooling
    cells: tuple[Cell, ...]

    @abstractmethod
    def specs(self, cell: Cell) -> tuple[RepresentationSpec, RepresentationSpec]:
        """Return the specs of a pair of layers, of the source and of the target."""

    @abstractmethod
    def batches(self, cell: Cell) -> Iterator[Rows]:
        """Iterate over the paired rows of a pair of layers in batches; all processes read all samples."""

    @abstractmethod
    def moments(self, cell: Cell) -> dict[str, Moments]:
        """Return the moments of the paired rows of a pair of layers."""

    @abstractmethod
    def rows(self, cell: Cell) -> dict[str, Features]:
        """Return the paired rows of a pair of layers."""

    def unpaired(self, cell: Cell) -> Rows | None:
        """Return unpaired rows of both sides, or ``None`` without unpaired samples."""
        return None


class CollectedPair(Collected):
    """Activations of two networks that run on samples.

    Moments of all pairs of layers are collected in one pass; each network runs once per batch. Rows and batches require
    a separate pass.

    Args:
        pair: The networks with their pairs of layers.
        samples: The samples.
        run: Options of the run. The processes share the samples, and all processes receive the same result.
        unpaired: Unpaired samples of the source and of the target.
        state: Checkpoint of the job, to resume interrupted work.

    Example:
        >>> import hf_stitch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> net = hf_stitch.load(Sequential(Linear(4, 8), ReLU(), Linear(8, 2)), example_inputs=torch.randn(2, 4))
        >>> pair = Pair(net, net).at([("0", "0"), ("0", "1")])
        >>> collected = CollectedPair(pair, PairedSamples.of(torch.randn(50, 4)))
        >>> collected.moments(("0", "1"))
        {'body': Moments(dx=8, dy=8, n=50, device='cpu')}
        >>> hf_stitch.registries.matchers.build("ridge").match(collected).layers["0", "0"].widths
        (8, 8)
    """

    pair: Pair

    def __init__(
        self, pair: Pair, samples: PairedSamples, run: Run | None = None, *,
        unpaired: tuple[Samples, Samples] | None = None, state: Checkpoint | None = None,
    ) -> None:  # fmt: skip
        self.pair, self.samples, self.run = pair, samples, run or Run()
        self.pooling, self.cells = pair.pooling, pair.cells
        self._unpaired, self._state = unpaired, state
        self._moments: PairMoments | None = None
        self.sums: dict[str, Tensor] = {}
        """Sums of the moments of this process, in the form of a checkpoint."""

    def specs(self, cell: Cell) -> tuple[RepresentationSpec, RepresentationSpec]:
        """Return the specs of a pair of layers."""
        return self.pair.specs(cell)

    @torch.no_grad()
    def batches(self, cell: Cell) -> Iterator[Rows]:
        """Iterate over the paired rows of a pair of layers."""
        yield from self._batches(cell, replace(self.run, processes=ALONE))

    def _batches(self, cell: Cell, run: Run) -> Iterator[Rows]:
        pair = replace(self.pair, cells=(cell,))
        for _, batch, twin in self.samples.batches(run, "fitting"):
            outputs = pair.run(batch, twin)
            yield paired_rows(outputs.x[cell[0]], outputs.y[cell[1]], self.pooling)

    def moments(self, cell: Cell) -> dict[str, Moments]:
        """Return the moments of a pair of layers."""
        if self._moments is None:
            self._moments = self._collect()
        return self._moments.of(*cell)

    @torch.no_grad()
    def _collect(self) -> PairMoments:
        """Collect the moments of all pairs of layers."""
        pair, run, checkpoint = self.pair, self.run, self._state
        check_moments_fit(pair)
        moments, samples_done = PairMoments(pair.cells, pair.pooling), None
        last = len(self.samples.of_process(run))
        if checkpoint is not None:

            def restore(_: int, tensors: Mapping[str, Tensor]) -> None:
                moments.load_state_dict(within("moments.", tensors))

            position = checkpoint.load(torch.device("cpu"), range(sys.maxsize), restore)
            samples_done = None if position is None else min(position, last)
        if samples_done is None and run.processes.count > 1:
            few = self.samples.take(min(run.batch_size, len(self.samples)))
            ((_, batch, twin),) = few.batches(replace(run, progress=False, processes=ALONE), "fitting")
            first = pair.run(batch, twin)
            moments.prepare(first.x, first.y)
        for count, batch, twin in self.samples.batches(run, "fitting", samples_done or 0):
            outputs = pair.run(batch, twin)
            moments.update(outputs.x, outputs.y)
            if checkpoint is not None and checkpoint.due(count == last):
                checkpoint.save(count, {f"moments.{key}": tensor for key, tensor in moments.state_dict().items()})
        if checkpoint is not None:  # of this process, before all processes are combined
            self.sums = {f"moments.{key}": tensor for key, tensor in moments.state_dict().items()}
        return moments.all_reduce(run.processes)

    @torch.no_grad()
    def rows(self, cell: Cell) -> dict[str, Features]:
        """Return the paired rows of a pair of layers, in memory."""
        by_part: dict[str, Features] = {}
        for parts in self._batches(cell, self.run):
            if not by_part:
                count = min(self.run.batch_size, len(self.samples.of_process(self.run)))
                size = sum(rows.nbytes for sides in parts.values() for rows in sides) * len(self.samples) // count
                cpu = torch.device("cpu")
                check_fits("the rows of all samples", size, cpu, "use fewer samples, or a matcher of moments")
            for part, rows in parts.items():
                by_part.setdefault(part, Features()).update(*rows)
        if self.run.processes.accelerator is not None:
            for features in by_part.values():
                features.all_reduce(self.run.processes.accelerator)
        return by_part

    @torch.no_grad()
    def unpaired(self, cell: Cell) -> Rows | None:
        """Return rows of both sides, on separate samples, in memory."""
        if self._unpaired is None:
            return None
        specs, task, rows = self.specs(cell), task_named(self.pair.task), list[dict[str, Tensor]]()
        for side, layer, samples in zip(("source", "target"), cell, self._unpaired, strict=True):
            adapter: Adapter = getattr(self.pair, side)

            def read(batch: Batch, adapter: Adapter = adapter, side: str = side, layer: str = layer) -> Any:
                values = adapter.encode(task.inputs(adapter, batch.samples), layer)[layer]
                check_finite({layer: values}, batch, f" of the {side}")
                return _rows_of_side(values, specs[1], self.pooling, of_source=side == "source")

            label = f"the unpaired rows of the {side}"
            rows.append(record(samples, self.run, f"reading the {side}", read, label, "use fewer samples"))
        return {part: (rows[0][part], rows[1][part]) for part in part_widths(*specs, self.pooling)}


class CollectedParts(Collected):
    """Moments or rows of one pair of layers that were collected elsewhere, without networks.

    Args:
        source: Spec of the source.
        target: Spec of the target.
        pooling: The pooling.
        parts: Moments or rows, by part of the stitching layer.

    Example:
        >>> import hf_stitch
        >>> x = torch.randn(50, 3)
        >>> spec = RepresentationSpec("bd", 3)
        >>> collected = CollectedParts(spec, spec, "none", {"body": Features().update(x, -x)})
        >>> matched = hf_stitch.registries.matchers.build("lstsq").match(collected)
        >>> round(matched.only.body.fitted["r2"], 6)
        1.0
    """

    def __init__(
        self, source: RepresentationSpec, target: RepresentationSpec, pooling: Pooling,
        parts: Mapping[str, Moments | Features],
    ) -> None:  # fmt: skip
        self._specs, self.pooling, self._parts = (source, target), pooling, parts
        self.cells = (("source", "target"),)

    def specs(self, cell: Cell) -> tuple[RepresentationSpec, RepresentationSpec]:
        """Return both specs."""
        return self._specs

    def batches(self, cell: Cell) -> Iterator[Rows]:
        """Yield all rows as one batch."""
        yield {part: (features.x, features.y) for part, features in self.rows(cell).items()}

    def moments(self, cell: Cell) -> dict[str, Moments]:
        """Return the moments, computed from rows if necessary."""
        return {
            part: statistic
            if isinstance(statistic, Moments)
            else Moments(statistic.x.shape[1], statistic.y.shape[1]).update(statistic.x, statistic.y)
            for part, statistic in self._parts.items()
        }

    def rows(self, cell: Cell) -> dict[str, Features]:
        """Return the rows; raise an error if the parts are moments."""
        rows = {part: statistic for part, statistic in self._parts.items() if isinstance(statistic, Features)}
        if len(rows) < len(self._parts):
            raise ValueError("the matcher requires rows, got moments; use a matcher of moments")
        return rows


def _rows_of_side(
    values: Representation, target: RepresentationSpec, pooling: Pooling, *, of_source: bool
) -> dict[str, Tensor]:
    """Return the rows of one side by part, as ``paired_rows`` does for both sides."""
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
