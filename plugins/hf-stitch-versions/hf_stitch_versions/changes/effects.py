"""Effects of single parts on the outputs: hybrids of two networks, compared with noise of the same size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_stitch import Adapter, Samples
from hf_stitch.data import Batch, PairedSamples
from hf_stitch.running import Run
from hf_stitch_versions.changes.hybrids import Recording, exchanged, given, noise, run, valued, with_weights
from hf_stitch_versions.changes.moved import Moved
from hf_stitch_versions.changes.outputs import Array, Measure, agreement, elsewhere, per_sample, quality
from hf_stitch_versions.changes.parts import Pairing, Part
from hf_stitch_versions.changes.weights import dense, packed
from hf_stitch_versions.inputs import Vocabulary, differences, for_second
from hf_stitch_versions.recording import dtype_of, in_dtype, values_of
from hf_stitch_versions.sameness.distances import rows_of
from hf_stitch_versions.sources import Feed, Network

SEEDS = 2
"""Number of noise draws per part."""

FIRST, OTHER = "first", "other"
"""Network that provides the first parts of a hybrid."""


@dataclass
class Measured:
    """Measurements per sample, concatenated over batches: name -> (samples,)."""

    ids: list[Any] = field(default_factory=list)
    values: dict[str, list[Array]] = field(default_factory=dict)

    def add(self, name: str, values: Array) -> None:
        """Add the values of a batch."""
        self.values.setdefault(name, []).append(values)

    def joined(self) -> dict[str, Array]:
        """Return the values of all batches."""
        return {name: np.concatenate(parts) for name, parts in self.values.items()}


class Effects:
    """Measurements of two networks and their hybrids on the same samples.

    Args:
        a: The first network.
        b: The second network.
        pairing: The parts that both have.
        differ: Names of the parts that differ.
        measure: Distance between outputs.
        run_: Options and processes of the run.

    Attributes:
        cost: Number of forward passes of a whole network, counted by the parts that ran.
        batches: Number of batches.
        replays: Whether the network can continue from recorded outputs of its parts.
        order: Modules of the first network that are called once, in order of completion.
        inputs: How the second network's own inputs differ; it runs on the inputs of the first.
        widths: Sizes of the vocabularies of both networks.
        left_out: Outputs that are not compared.
        moved: Activations after blocks.
        local: Name of a part -> sums of squares of the difference of its outputs on the same inputs, and of its
            outputs.
    """

    def __init__(
        self, a: Adapter, b: Adapter, pairing: Pairing, differ: frozenset[str], measure: Measure, run_: Run
    ) -> None:  # fmt: skip
        self.a, self.b, self.pairing, self.measure, self.run = a, b, pairing, measure, run_
        self.parts = [part for part in pairing.parts if part.whole and part.name in differ]
        self.modules = {mine: theirs for part in pairing.parts if part.whole for mine, theirs in part.modules.items()}
        self.cost, self.batches = 0.0, 0
        self.replays: bool | None = None
        self.order: tuple[str, ...] = ()
        self.inputs = list[str]()
        self.widths = list[int]()
        self.left_out = list[str]()
        self.vocabulary = Vocabulary(a, b)
        self.moved = Moved()
        self.local: dict[str, list[float]] = {}

    def measured(self, samples: Samples) -> tuple[dict[str, Array], list[Any]]:
        """Run both networks and all hybrids; return name -> (samples,), and the ids of the samples."""
        measured = Measured()
        with self._in_one_dtype():
            for _, batch, _ in PairedSamples(samples, samples).batches(self.run, "running hybrids"):
                self._batch(batch, measured)
        parts = self.run.processes.gather((measured.ids, measured.joined()))
        names = parts[0][1]
        self.moved.gather(self.run.processes)
        self.inputs = next(filter(None, self.run.processes.gather(self.inputs)), [])
        sums = [named_sums for local in self.run.processes.gather(self.local) for named_sums in local.items()]
        self.local = {name: [sum(v[i] for n, v in sums if n == name) for i in (0, 1)] for name in dict(sums)}
        return {name: np.concatenate([part[1][name] for part in parts]) for name in names}, [
            id_ for part in parts for id_ in part[0]
        ]

    @contextmanager
    def _in_one_dtype(self) -> Iterator[None]:
        """Convert both networks to the wider of float32 and their dtypes, so that modules can be exchanged."""
        dtypes = [dtype_of(network.model) for network in (self.a, self.b)]
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        with ExitStack() as stack:
            for network, dtype in zip((self.a, self.b), dtypes, strict=True):
                stack.enter_context(in_dtype(network.model, wide if dtype != wide else None))
            yield

    def _batch(self, batch: Batch, measured: Measured) -> None:
        """Measure one batch."""
        inputs = self.a.preprocess(batch.samples)
        mask = inputs.get(self.a.interface.mask)
        self.mask = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
        given_b = for_second(inputs, self.a, self.b)
        self.vocabulary.check(batch.ids, given_b)
        arguments = {
            "a": Network(self.a).arguments(Feed((), inputs)),
            "b": Network(self.b).arguments(Feed((), given_b)),
        }
        recording_a = Recording(self.a, arguments["a"], list(self.modules))
        recording_b = Recording(self.b, arguments["b"], list(self.modules.values()))
        self.cost, self.batches = self.cost + 2, self.batches + 1
        self._compare_inputs(batch, inputs, recording_a, recording_b)
        reference, second = (self.measure.output(recording.output) for recording in (recording_a, recording_b))
        self._check(reference, second, batch.ids)
        measured.ids += batch.ids
        self._outputs(batch, inputs, reference, second, measured)
        if self.replays is None:
            self._learn_order(recording_a, recording_b, arguments)
        self._streams(recording_a, recording_b)
        for part in self.parts:
            replayed = self._before(part)
            outputs_a = {name: recording_a.parts[name] for name in replayed}
            outputs_b = {self.modules[name]: recording_b.parts[self.modules[name]] for name in replayed}
            share = 1 - len(replayed) / max(len(self.order), 1)
            output = self._patched(part, arguments["a"], outputs_a, recording_a)
            measured.add(f"patch {part.name}", self._apart(reference, output))
            if any(packed(self.b.model.get_submodule(theirs)) for theirs in part.modules.values()):
                plain = {mine: dense(self.b.model.get_submodule(theirs)) for mine, theirs in part.modules.items()}
                with exchanged(self.a.model, plain), given(self.a.model, outputs_a):
                    output = run(self.a, arguments["a"])
                self.cost += share
            measured.add(f"weights {part.name}", self._apart(reference, output))
            with self._swapped(self.b, part, reverse=True), given(self.b.model, outputs_b):
                output = run(self.b, arguments["b"])
            measured.add(f"revert {part.name}", self._apart(reference, output))
            for seed in range(SEEDS):
                noisy = noise(self.pairing.a, self.pairing.b, part, self.run.seed + seed)
                with self._valued(part, noisy), given(self.a.model, outputs_a):
                    output = run(self.a, arguments["a"])
                measured.add(f"noise {seed} {part.name}", self._apart(reference, output))
            self.cost += (2 + SEEDS) * share
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(self._swapped(self.a, part))
            measured.add(
                "rest", self.measure.apart(second, self.measure.output(run(self.a, arguments["a"])), self.mask)
            )
        self.cost += 1
        self._curves(recording_a, recording_b, arguments, reference, measured)

    def _apart(self, reference: Tensor, output: Any) -> Array:
        """Return the distance of the output of a hybrid from the output of the first network."""
        return self.measure.apart(reference, self.measure.output(output), self.mask)

    def _compare_inputs(
        self, batch: Batch, inputs: Mapping[str, Any], recording_a: Recording, recording_b: Recording
    ) -> None:
        """Record how the second network's own inputs differ; with equal inputs, vocabularies may have extra tokens."""
        has_own_inputs = self.b.processor is not None and not any(
            isinstance(sample, Tensor) for sample in batch.samples
        )
        if has_own_inputs and not self.inputs:
            own_inputs = self.b.preprocess(batch.samples)
            self.inputs = differences(Feed(tuple(batch.ids), inputs, own_inputs, self.mask), self.a, self.b)
        self.left_out = self.left_out or self.measure.left_out(recording_a.output)
        if self.batches == 1 and self.measure.per_token:
            self.measure = replace(self.measure, nested=not self.inputs)
            self.widths = [self.measure.output(recording.output).shape[-1] for recording in (recording_a, recording_b)]

    def _check(self, reference: Tensor, second: Tensor, ids: Sequence[Any]) -> None:
        """Raise an error for outputs of different shapes or with NaN."""
        if not self.measure.fits(reference, second):
            raise ValueError(
                f"the outputs must have the same classes or tokens, got the shapes {tuple(reference.shape)} and "
                f"{tuple(second.shape)}. Omit the data to compare only weights, or load the backbones "
                "(task='feature-extraction')"
            )
        for side, output in (("first", reference), ("second", second)):
            has_nan = output.isnan()
            if self.mask is not None and has_nan.shape[:2] == self.mask.shape:
                has_nan = has_nan & self.mask.to(has_nan.device).reshape(*self.mask.shape, *[1] * (has_nan.dim() - 2))
            has_nan = has_nan.flatten(1).any(1)
            if bool(has_nan.any()):
                raise ValueError(
                    f"the {side} network outputs NaN for sample {ids[int(has_nan.nonzero()[0])]!r}: omit this sample"
                )

    def _outputs(self, batch: Batch, inputs: Any, reference: Tensor, second: Tensor, measured: Measured) -> None:
        """Measure the outputs of both networks."""
        measured.add("total", self.measure.apart(reference, second, self.mask))
        measured.add("back", self.measure.apart(second, reference, self.mask))
        ids = inputs.get(self.a.interface.content[0])
        for prefix, output in (("a", reference), ("b", second)):
            for name, values in quality(self.measure, output, ids, batch.labels, self.mask).items():
                measured.add(f"{prefix} {name}", values)
        if self.measure.is_divergence:
            measured.add("agreement", agreement(reference, second, self.mask))
            if reference.shape != second.shape:
                measured.add("elsewhere", per_sample(elsewhere(reference, second), self.mask))
        else:
            for name, values in self.measure.spread(reference, self.mask).items():
                measured.add(name, values)

    # -- parts --------------------------------------------------------------------------------------------------------
    def _patched(
        self, part: Part, arguments: Mapping[str, Any], outputs: Mapping[str, Any], recording: Recording
    ) -> Any:
        """Run the first network with a part of the second; record the difference of the part's own output."""
        gaps: list[tuple[float, float]] = []

        def compare(name: str) -> Any:
            def hook(module: Any, args: Any, output: Any) -> None:
                mine, theirs = (_stream(part_output, self.mask) for part_output in (recording.parts[name], output))
                if mine is not None and theirs is not None and mine.shape == theirs.shape:
                    gaps.append((float((mine - theirs).square().sum()), float(mine.square().sum())))

            return hook

        with self._swapped(self.a, part), given(self.a.model, outputs), ExitStack() as hooks:
            for name in part.modules:
                if name in recording.parts:
                    module = self.a.model.get_submodule(name)
                    hooks.callback(module.register_forward_hook(compare(name)).remove)
            output = run(self.a, arguments)
        for gap, size in gaps:
            sums = self.local.setdefault(part.name, [0.0, 0.0])
            sums[0], sums[1] = sums[0] + gap, sums[1] + size
        return output

    @contextmanager
    def _swapped(self, network: Adapter, part: Part, *, reverse: bool = False) -> Iterator[None]:
        """Replace a part of a network by the part of the second network."""
        modules = {
            theirs if reverse else mine: (
                self.a.model.get_submodule(mine) if reverse else self.b.model.get_submodule(theirs)
            )
            for mine, theirs in part.modules.items()
        }
        values = self.pairing.a if reverse else self.pairing.b
        loose = {(self.pairing.names[name] if reverse else name): values[name] for name in part.loose}
        with valued(network.model, loose), exchanged(network.model, modules):
            yield

    @contextmanager
    def _valued(self, part: Part, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Replace the weights of a part of the first network."""
        loose = {name: values[name] for name in part.loose}
        with valued(self.a.model, loose), exchanged(self.a.model, with_weights(self.a.model, part, values)):
            yield

    # -- replaying ----------------------------------------------------------------------------------------------------
    def _learn_order(
        self, recording_a: Recording, recording_b: Recording, arguments: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Find the order of the parts, and whether both networks can continue from recorded outputs."""
        order = tuple(name for name in recording_a.parts if self.modules[name] in recording_b.parts)
        theirs = {name: self.modules[name] for name in order}
        self.replays = self._goes_on(self.a, recording_a, arguments["a"], order)
        self.replays = self.replays and self._goes_on(self.b, recording_b, arguments["b"], tuple(theirs.values()))
        self.order = order if self.replays else ()

    def _goes_on(
        self, network: Adapter, recorded: Recording, arguments: Mapping[str, Any], order: Sequence[str]
    ) -> bool:
        """Return whether a network has the same output when it continues from recorded outputs of its first parts."""
        expected = self.measure.output(recorded.output)
        for count in range(1, len(order)):
            with given(network.model, {name: recorded.parts[name] for name in order[:count]}):
                try:
                    output = run(network, arguments)
                except Exception:  # a later part requires more than the outputs
                    return False
            self.cost += 1 - count / len(order)
            if not torch.equal(self.measure.output(output), expected):
                return False
        return True

    def _before(self, part: Part) -> tuple[str, ...]:
        """Return the modules that end before a part begins."""
        indices = [self.order.index(name) for name in part.modules if name in self.order]
        if part.loose or not indices or len(indices) < len(part.modules):
            return ()
        return self.order[: min(indices)]

    def _curves(
        self, recording_a: Recording, recording_b: Recording, arguments: Mapping[str, Mapping[str, Any]],
        reference: Tensor, measured: Measured,
    ) -> None:  # fmt: skip
        """Measure hybrids with the first parts from one network and the rest from the second."""
        for count, name in enumerate(self.order, 1):
            replayed = self.order[:count]
            outputs_a = {self.modules[module]: recording_a.parts[module] for module in replayed}
            with given(self.b.model, outputs_a):
                measured.add(f"{FIRST} {name}", self._apart(reference, run(self.b, arguments["b"])))
            outputs_b = {module: recording_b.parts[self.modules[module]] for module in replayed}
            with given(self.a.model, outputs_b):
                measured.add(f"{OTHER} {name}", self._apart(reference, run(self.a, arguments["a"])))
            self.cost += 2 * (1 - count / len(self.order))

    def _streams(self, recording_a: Recording, recording_b: Recording) -> None:
        """Collect the moments of the activations after each block."""
        for part in self.pairing.parts:
            for name in part.modules if part.block else ():
                pair = recording_a.parts.get(name), recording_b.parts.get(self.modules.get(name, ""))
                if None not in pair:
                    self.moved.add(part.name, *pair, self.mask)


def _stream(output: Any, mask: Tensor | None) -> Tensor | None:
    """Return the first activations in an output as rows, without padding."""
    values = next(iter(values_of(output).values()), None)
    return None if values is None else rows_of(values, mask)
