"""Search for removable blocks: fit the maps of all intervals in one pass, and score all intervals in a second."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_stitch import Adapter, Samples
from hf_stitch.data import PairedSamples
from hf_stitch.registry import registries
from hf_stitch.representation import Representation
from hf_stitch.resources import check_fits
from hf_stitch.running import Run
from hf_stitch.tasks.base import Answers, Task
from hf_stitch.tasks.heads import WITHOUT_HEAD, check_trained
from hf_stitch.tasks.vectors import tensor_of
from hf_stitch_shorten.maps import MAPS, REFITS, Change, Fits, Moments, input_rows
from hf_stitch_shorten.stacks import Joint, Stack, Taps, joint_of, output_of, reads, rows_of, run, stacks

FOLDS = 5
"""Every fifth sample is held out from the regression, and chooses the penalty."""

PREFERRED = ("kl_divergence", "agreement")
"""Metrics that choose intervals, most preferred first; otherwise the first metric of the task."""


@dataclass(frozen=True)
class Interval:
    """Consecutive blocks of a stack to remove.

    Attributes:
        stack: The stack.
        first: Index of the block before them in the stack.
        last: Index of the last removed block.
    """

    stack: Stack
    first: int
    last: int

    @property
    def before(self) -> str:
        """Name of the block before them; its projection is changed."""
        return self.stack.blocks[self.first]

    @property
    def end(self) -> str:
        """Name of the last removed block."""
        return self.stack.blocks[self.last]

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the removed blocks."""
        return self.stack.blocks[self.first + 1 : self.last + 1]

    @property
    def places(self) -> range:
        """Indices of the removed blocks in the list."""
        return self.stack.places(self.first, self.last)


class Search:
    """Intervals of a network, and the quality of its outputs without them.

    Args:
        network: The network, which may already be shorter than the reference.
        reference: The network that provides the target outputs.
        keep: Names of blocks that stay.
        matcher: Name of a map.
        run_: Options and processes of the run.

    Attributes:
        cost: Forward passes of single samples through a whole network, counted by the layers that ran.
        rows: Number of rows of each regression.
    """

    def __init__(self, network: Adapter, reference: Adapter, keep: Collection[str], matcher: str, run_: Run) -> None:
        self.network, self.reference, self.run = network, reference, run_
        self.matcher, self.keep = matcher, keep
        self.stacks = stacks(network)
        self.task = task_of(network)
        self.joints: dict[str, Joint] = {}
        self.cost, self.rows = 0.0, 0

    def find_joints(self, samples: Samples) -> None:
        """Find the joints of all blocks on a few samples."""
        inputs = self.task.inputs(self.network, next(iter(samples.take(2).batches(2))).samples)
        for stack in self.stacks:
            for block in stack.blocks:
                if (joint := joint_of(self.network, block, inputs)) is not None:
                    self.joints[block] = joint

    def intervals(self, longest: int) -> tuple[Interval, ...]:
        """Return the removable intervals up to a length, which must have joints if the matcher uses a map."""
        intervals = [
            Interval(stack, first, last)
            for stack in self.stacks
            for first in range(len(stack.blocks))
            for last in range(first + 1, min(first + longest + 1, len(stack.blocks)))
        ]
        free = [interval for interval in intervals if not set(interval.blocks) & set(self.keep)]
        return tuple(interval for interval in free if self.matcher == "drop" or self._can_map(interval))

    def _can_map(self, interval: Interval) -> bool:
        """Return whether a map can replace an interval: both ends have joints, and their blocks end in the same way."""
        ends = self.joints.get(interval.before), self.joints.get(interval.end)
        return None not in ends and len({_kind(joint, block) for joint, block in zip(
            ends, (interval.before, interval.end), strict=True)}) == 1  # fmt: skip

    # -- fitting ------------------------------------------------------------------------------------------------------
    def changes(self, samples: Samples, intervals: Sequence[Interval]) -> dict[Interval, Change]:
        """Return the change that compensates for each interval, fitted on samples in one pass."""
        if self.matcher == "drop":
            return {}
        ends: dict[str, list[str]] = {}
        for interval in intervals:
            ends.setdefault(interval.before, []).append(interval.end)
        blocks = [*dict.fromkeys(name for interval in intervals for name in (interval.before, interval.end))]
        joints = {block: self.joints[block] for block in blocks}
        check_fits("the moments of all blocks", self._memory(ends), self.network.device, "exclude blocks with keep")
        sums = {block: (Moments(), Moments()) for block in ends}
        for count, (inputs, batch) in enumerate(self._batches(samples, "reading activations")):
            taps = run(self.network, inputs, joints, blocks, complete=False)
            for block, lasts in ends.items():
                joint, representation = joints[block], taps.outputs[block]
                rows = input_rows(self.network.model.get_submodule(joint.projection), taps.inputs[block])
                gaps = {
                    last: _missing(taps.streams[last] - taps.streams[block], representation.layout, joint)
                    for last in lasts
                }
                self._add(sums[block], representation, rows, gaps, count)
            self.cost += len(batch.samples)
        sums = self._gathered(sums)
        self.rows = max((fitted.count + held.count for fitted, held in sums.values()), default=0)
        fits = {
            block: Fits(self.network.model.get_submodule(joints[block].projection), joints[block].scale, *moments)
            for block, moments in sums.items()
        }
        return {interval: MAPS[self.matcher](fits[interval.before], interval.end) for interval in intervals}

    def _memory(self, ends: Mapping[str, Sequence[str]]) -> int:
        """Return the number of bytes of the moments of both folds and the maps of blocks."""
        total = 0
        for block, lasts in ends.items():
            projection: Any = self.network.model.get_submodule(self.joints[block].projection)
            inputs = reads(self.network.model, self.joints[block].projection) + 1
            width = projection.weight.numel() // (inputs - 1)
            total += 3 * 8 * inputs * (inputs + width * len(lasts))
        return total

    def catch_up(self, samples: Samples, block: str, original: str) -> Change:
        """Return the change of a block after removed blocks that restores its stream in the whole network."""
        joint, original_joint, sums = self.joints[block], None, {block: (Moments(), Moments())}
        for count, (inputs, batch) in enumerate(self._batches(samples, "refitting later blocks")):
            original_joint = original_joint or joint_of(self.reference, original, inputs)
            assert original_joint is not None
            taps = run(self.network, inputs, {block: joint}, [block], complete=False)
            reference_taps = run(self.reference, inputs, {original: original_joint}, [original], complete=False)
            representation = taps.outputs[block]
            rows = input_rows(self.network.model.get_submodule(joint.projection), taps.inputs[block])
            gap = _missing(reference_taps.streams[original] - taps.streams[block], representation.layout, joint)
            self._add(sums[block], representation, rows, {block: gap}, count)
            self.cost += 2 * len(batch.samples)
        fits = Fits(self.network.model.get_submodule(joint.projection), joint.scale, *self._gathered(sums)[block])
        return fits.refit(block)

    def _add(
        self, sums: tuple[Moments, Moments], representation: Representation, rows: Tensor, gaps: Mapping[str, Tensor],
        count: int,
    ) -> None:  # fmt: skip
        """Add the rows of a batch to the moments for fitting and to the held-out moments."""
        # with the rank, processes with few samples also hold some out
        first = count * representation.batch + self.run.processes.rank
        for fold, chosen_rows in zip(sums, _folds(representation.batch, rows, representation.mask, first), strict=True):
            fold.add(rows[chosen_rows], {last: gap[chosen_rows] for last, gap in gaps.items()})

    def _gathered(self, sums: dict[str, tuple[Moments, Moments]]) -> dict[str, tuple[Moments, Moments]]:
        """Return the moments of all processes."""
        gathered = self.run.processes.gather(sums)
        total = gathered[0]
        for process_sums in gathered[1:]:
            total = {name: (total[name][0] + fit, total[name][1] + held) for name, (fit, held) in process_sums.items()}
        return total

    # -- scoring ------------------------------------------------------------------------------------------------------
    def scored(
        self, samples: Samples, changes: Mapping[Interval, Change | None], metric: str | None
    ) -> tuple[dict[Interval, dict[str, float]], dict[Interval, Change | None], str]:
        """Score intervals; omit the refit where dropping the blocks gives a better score.

        Args:
            samples: Samples not used for fitting.
            changes: Interval -> change, or ``None`` to drop it.
            metric: Metric that chooses; ``None``: chosen by :func:`chosen_figure`.

        Returns:
            Interval -> metric -> value, interval -> change, and the metric.
        """
        values, best_changes = self.values(samples, changes), dict(changes)
        figure = chosen_figure(self.task, values, metric)
        if self.matcher in REFITS and changes:
            sign = 1 if self.task.figures.get(figure, True) else -1
            for interval, row in self.values(samples, dict.fromkeys(changes)).items():
                if sign * row[figure] > sign * values[interval][figure]:
                    values[interval], best_changes[interval] = row, None
        return values, best_changes, figure

    def values(self, samples: Samples, changes: Mapping[Interval, Change | None]) -> dict[Interval, dict[str, float]]:
        """Return the metrics of the network without each interval, against the outputs of the reference.

        Args:
            samples: Samples not used for fitting.
            changes: Interval -> change, or ``None`` to drop it.

        Returns:
            Interval -> metric -> value.
        """
        answers: Any = self.measured(samples, changes)
        metrics: Mapping[Any, Any] = self.task.drawn(answers, resamples=0, seed=self.run.seed)
        return {
            name: {figure: float(values[0]) for figure, values in metrics[name].items()} for name in changes
        }  # fmt: skip

    def measured(self, samples: Samples, changes: Mapping[Interval, Change | None]) -> dict[Any, Answers]:
        """Return the task's measurements per sample, for the network without each interval and for the ``target``."""
        blocks = [*dict.fromkeys(name for candidate in changes for name in (candidate.before, candidate.end))]
        mapping = [candidate for candidate, change in changes.items() if change is not None]
        joints = {name: self.joints[name] for candidate in mapping for name in (candidate.before, candidate.end)}
        answers: dict[Any, list[Answers]] = {}
        for inputs, batch in self._batches(samples, "scoring intervals"):
            taps, side = run(self.network, inputs, joints, blocks), (batch, inputs)
            target = taps.output
            if self.network is not self.reference:
                target = self.reference.forward(self.task.inputs(self.reference, batch.samples))
                self.cost += len(batch.samples)
            for index, (interval, change) in enumerate(changes.items()):
                rows = self.task.measure(
                    {"target": target, "stitched": self._mapped(taps, interval, change)}, side, side
                )
                answers.setdefault(interval, []).append(rows["stitched"])
                if not index:
                    answers.setdefault("target", []).append(rows["target"])
            later_layers = sum(self._share_after(candidate) for candidate in changes)
            self.cost += (1 + later_layers) * len(batch.samples)
        gathered = self.run.processes.gather(answers)
        parts = {name: [row for part in gathered for row in part[name]] for name in gathered[0]}
        return self.task.joined(parts, samples)

    def difference(self, short: Adapter, samples: Samples, interval: Interval, change: Change | None) -> float:
        """Return the difference between the outputs of a rebuilt and the mapped network, over the largest output."""
        batch = next(iter(samples.take(min(len(samples), 4)).batches(4)))
        inputs = self.task.inputs(self.network, batch.samples)
        joints = {} if change is None else {name: self.joints[name] for name in (interval.before, interval.end)}
        with torch.no_grad():
            taps = run(self.network, inputs, joints, [interval.before, interval.end])
            try:
                outputs = self._mapped(taps, interval, change), short.forward(inputs)
            except Exception:  # networks with an inconsistent config can raise anything
                return float("inf")
        expected, rebuilt = (tensor_of(output, len(batch.samples)) for output in outputs)
        if expected is None or rebuilt is None or expected.shape != rebuilt.shape:
            return float("inf")
        return float((expected.double() - rebuilt.double()).abs().max() / expected.double().abs().max())

    def _mapped(self, taps: Taps, interval: Interval, change: Change | None) -> Any:
        """Return the output of the network without an interval."""
        values = taps.outputs[interval.before].values
        if change is not None:
            stream = mapped(self.network, self.joints[interval.before], taps, interval, change)
            values = output_of(self.network, self.joints[interval.end], stream)
        return self.network.decode(taps.outputs[interval.end].replace(values=values), interval.end)

    def _share_after(self, interval: Interval) -> float:
        """Return the share of all layers that run after an interval."""
        layers = self.network.layers
        return (len(layers) - 1 - layers.index(interval.end)) / len(layers)

    def _batches(self, samples: Samples, label: str) -> Iterator[tuple[Mapping[str, Any], Any]]:
        """Yield inputs and batches of this process."""
        with torch.no_grad():
            for _, batch, _ in PairedSamples(samples, samples).batches(self.run, label):
                yield self.task.inputs(self.network, batch.samples), batch


def task_of(network: Adapter) -> Task:
    """Return the task that scores a network."""
    check_trained(network)
    name = network.task or WITHOUT_HEAD
    if name != WITHOUT_HEAD:
        with torch.no_grad():
            output = network.forward(dict(network.example))
        if isinstance(output, Mapping) and "logits" not in output:  # a head in name only
            name = WITHOUT_HEAD
    return registries.tasks.build(name).about(network)


def mapped(network: Adapter, joint: Joint, taps: Taps, interval: Interval, change: Change) -> Tensor:
    """Return the stream of the block before an interval with its projection changed."""
    representation = taps.outputs[interval.before]
    rows = input_rows(network.model.get_submodule(joint.projection), taps.inputs[interval.before])
    added = rows.double() @ change.weight.T + (0 if change.bias is None else change.bias)
    added = added * joint.scale
    stream: Tensor = taps.streams[interval.before]
    if representation.layout == "bchw":
        shape = stream.movedim(1, -1).shape
        return (stream.double() + added.reshape(shape).movedim(-1, 1)).to(stream.dtype)
    return (stream.double() + added.reshape(stream.shape)).to(stream.dtype)


def chosen_figure(task: Task, values: Mapping[Any, Mapping[str, float]], requested: str | None) -> str:
    """Return the metric that chooses intervals; it must be defined for all intervals."""
    rows = [*values.values()]
    names = [name for name in rows[0] if all(np.isfinite(row[name]) for row in rows)]
    if (requested is not None and requested not in names) or not names:
        raise ValueError(
            f"{requested or 'every figure'} is undefined for these samples and outputs; defined: "
            f"{', '.join(names) or 'none'}"
        )
    return requested or next(name for name in (*PREFERRED, *names) if name in names)


def _missing(difference: Tensor, layout: str, joint: Joint) -> Tensor:
    """Return, as rows, the change of a projection's output that adds a difference to its stream; 0 in dead channels."""
    rows = rows_of(difference, layout)
    return torch.where(joint.scale == 0, 0, rows / joint.scale.where(joint.scale != 0, 1))


def _kind(joint: Joint | None, block: str) -> str | None:
    """Return the name of the end of a block (:attr:`Joint.tail`) inside of the block; ``None`` without such an end."""
    return None if joint is None or joint.tail is None else joint.tail.removeprefix(block)


def _folds(batch: int, rows: Tensor, mask: Tensor | None, first: int) -> tuple[Tensor, Tensor]:
    """Return masks of the rows of a batch for fitting and of the held-out rows; padding is in neither."""
    per_sample = len(rows) // batch
    held_out = ((torch.arange(batch) + first) % FOLDS == FOLDS - 1).repeat_interleave(per_sample).to(rows.device)
    real = torch.ones_like(held_out) if mask is None else mask.flatten()
    return ~held_out & real, held_out & real
