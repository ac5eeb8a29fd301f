"""One pass over samples that scores predictors: :class:`Scoring`."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, fields, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from hf_stitch.adapters import Adapter
from hf_stitch.adapters.cutting.forwards import evaluating
from hf_stitch.data import Batch, PairedSamples
from hf_stitch.data.samples import Id
from hf_stitch.pairs.pair import Ran, run_to
from hf_stitch.printing import warn
from hf_stitch.representation import Representation
from hf_stitch.resources import seconds_of
from hf_stitch.running import ALONE, Run, joined
from hf_stitch.scoring.halves import Halves, Predictor
from hf_stitch.scoring.measured import Measure, Measured, Record
from hf_stitch.statistics.base import within
from hf_stitch.storage.checkpoint import Checkpoint
from hf_stitch.tasks.base import Answers, Array, Task, Whole, concatenated, logits_of
from hf_stitch.tasks.per_sample import OfSamples
from hf_stitch.tasks.tokens import NextToken

Parts = dict[Measure | Record, list[Any]]  # key of a measurement -> its values, by batch
KINDS: dict[str, type[Measure | Record]] = {"answers": Measure, "seen": Record}
"""Names of the kinds of measurements in a state."""
DIFFERS = "another number of threads or another machine rounds differently, which training amplifies"


class Watch(Protocol):
    """Recorder of the stitched activations and of the target's own activations."""

    @property
    def fingerprint(self) -> bytes:
        """Hash of everything that determines the records."""

    def record_own(self, y: Mapping[str, Representation], ids: Sequence[Id]) -> Mapping[Record, Array]:
        """Return the records of the target's own activations of a batch, by layer."""

    def record_stitched(
        self, predictor: Predictor, mapped: Representation, y: Representation, ids: Sequence[Id]
    ) -> Mapping[Record, Array]:
        """Return the records of the output of a predictor; ``y`` are the target's own activations."""


class State(NamedTuple):
    """Progress of a pass in a checkpoint, which also contains an earlier pass over other samples."""

    checkpoint: Checkpoint
    offset: int  # number of samples of the earlier pass
    kept: Mapping[str, Tensor]  # tensors of the earlier pass


class Scoring:
    """Measures of every sample for predictors, for their target, and for the whole source.

    The target and each distinct front half run once per batch. Then the stitching layer and the back half of each
    predictor run in sequence: concatenated into one batch, predictors would take longer on a CPU, and the last bits of
    the outputs would change.
    """

    def __init__(
        self, target: Whole, halves: Mapping[str, Halves], predictors: Sequence[Predictor], task: Task, *,
        watch: Watch | None = None, measures: Sequence[str] = (), sizes: bool = False,
    ) -> None:  # fmt: skip
        self.target, self.halves, self.predictors, self.task, self.watch = target, halves, predictors, task, watch
        self._measures, self._sizes = measures, sizes  # of predictors (default: all); whether texts are measured
        self._constants: dict[tuple[str, str], Tensor] = {}

    @property
    def networks(self) -> list[nn.Module]:
        """Networks that run."""
        whole: Any = self.target
        return [whole.model, *(module for halves in self.halves.values() for module in halves.modules)]

    @property
    def device(self) -> torch.device:
        """Device of the networks."""
        weights = (weight for network in self.networks for weight in network.parameters())
        return next((weight.device for weight in weights), torch.device("cpu"))

    @torch.no_grad()
    def run(self, samples: PairedSamples, run: Run, state: State | None = None) -> Measured:
        """Measure all samples that are not in the state yet, and gather the measures on all processes."""
        for predictor in self.predictors if self.task.causal else ():
            predictor.stitch.check_causal()
        self._constants.clear()
        last = len(samples.of_process(run))
        done, parts = (0, Parts()) if state is None else self._resumed(state, last)
        with ExitStack() as stack:
            modules = (module for halves in self.halves.values() for module in halves.modules)
            for module in (*modules, *(predictor.stitch for predictor in self.predictors)):
                stack.enter_context(evaluating(module))
            for count, batch, twin in samples.batches(run, "scoring", done):
                for key, values in self._measure(batch, twin).items():
                    parts.setdefault(key, []).append(values)
                if state is not None and state.checkpoint.due(count == last):
                    parts = {key: [concatenated(values)] for key, values in parts.items()}
                    arrays = {_encode_key(key): torch.from_numpy(rows) for key, (rows,) in parts.items()}
                    tensors = {**state.kept, **arrays, "watch": self._fingerprint}
                    state.checkpoint.save(state.offset + count, tensors)
        return self._measured(joined(run.processes.gather(parts)), samples)

    def cost(self, samples: PairedSamples, run: Run) -> tuple[float, Measured]:
        """Return the seconds for all samples, extrapolated from a batch, and the measurements of the batch."""
        few = samples.take(min(run.batch_size, len(samples)))
        quiet, measurements = replace(run, progress=False, processes=ALONE), list[Measured]()
        seconds = seconds_of(lambda: measurements.append(self.run(few, quiet)), self.device)
        return seconds * len(samples) / len(few) / run.processes.count, measurements[0]

    def _measure(self, batch: Batch, twin: Batch) -> dict[Measure | Record, Any]:
        target, sizes = self._target(twin)
        measured: dict[Measure | Record, Any] = {}
        if self.watch is not None:
            measured.update(self.watch.record_own(target.activations, twin.ids).items())
        once = _Memo()
        for name, halves in self.halves.items():
            front = once(halves.front, halves.encode, batch)
            sides = (batch, front.inputs), (twin, target.inputs)
            rows, outputs = dict[str, Answers](), dict[str, Any]()
            for predictor in (candidate for candidate in self.predictors if candidate.front == name):
                like = target.activations.get(predictor.layer_b)
                mapped, output = self._outputs(predictor, halves, front, like, once, len(batch.samples))
                of_samples = isinstance(self.task, OfSamples)  # group predictors while their outputs are small
                outputs[predictor.name] = logits_of(output) if of_samples else output
                if not of_samples or len(outputs) * outputs[predictor.name].numel() > 2**22:
                    rows |= self.task.measure({**outputs, "target": target.output}, *sides)
                    outputs.clear()
                if self.watch is not None and mapped is not None and like is not None:
                    measured.update(self.watch.record_stitched(predictor, mapped, like, batch.ids).items())
            source, alone = front.output, halves.alone
            if alone is not None and not halves.reads_other_tokens:
                source = once(id(alone), lambda net: net.forward(self.task.inputs(net, batch.samples)), alone)
            outputs |= {"source": source, "target": target.output}  # None if not comparable with the target
            rows |= self.task.measure({who: output for who, output in outputs.items() if output is not None}, *sides)
            if halves.reads_other_tokens and alone is not None and isinstance(self.task, NextToken):
                rows["source"] = self.task.measure_alone(alone, batch)
            for who, row in rows.items():
                names = self._measures if self._measures and who not in ("source", "target") else row
                measures = {**sizes, **{key: row[key] for key in names if key in row}}
                measured |= {Measure(name, who, key): values for key, values in measures.items()}
        return measured

    def _target(self, twin: Batch) -> tuple[Ran, Answers]:
        """Run the target, and measure the sizes of the samples."""
        sizes: Answers = {}
        if self._sizes:
            inputs, sizes = self.task.sized_inputs(self.target, twin)
        else:
            inputs = self.task.inputs(self.target, twin.samples)
        needs_activations = self.watch is not None or any(halves.needs_own for halves in self.halves.values())
        if not needs_activations or not isinstance(self.target, Adapter):
            return Ran(inputs, {}, self.target.forward(inputs)), sizes
        layers = dict.fromkeys(predictor.layer_b for predictor in self.predictors)
        return run_to(self.target, inputs, layers, twin, "target", complete=True), sizes

    def _outputs(
        self, predictor: Predictor, halves: Halves, front: Ran, like: Representation | None, once: _Memo, count: int
    ) -> tuple[Representation | None, Any]:
        """Return the mapped activations and the output of a predictor; a constant output is cached for all samples."""
        key = predictor.front, predictor.name
        if (constant := self._constants.get(key)) is not None:
            return None, constant.expand(count, -1)
        x, stitch = front.activations[predictor.layer_a], predictor.stitch
        if stitch.shrinks(x):  # once for all stitches to the same grid
            x = once((halves.front, predictor.layer_a, stitch.target.grid), x.resize, stitch.target.grid)
        mapped = stitch(x)
        output = halves.finish(mapped, predictor.layer_b, like)
        if not predictor.constant:
            return mapped, output
        if x.mask is None and (logits := logits_of(output)).dim() == 2:
            self._constants[key] = logits[:1]
        return None, output

    def _resumed(self, state: State, last: int) -> tuple[int, Parts]:
        """Return the number of samples that an interrupted job has measured, and their measures.

        A resumed job refits its watch. If the result differs in any bit (training amplifies the rounding of another
        number of threads), all samples are measured again, so that scores of two fits are never mixed.
        """
        done, parts, fingerprint = 0, Parts(), self._fingerprint

        def restore(position: int, tensors: Mapping[str, Tensor]) -> None:
            nonlocal done, parts
            if position <= state.offset:
                return
            if not torch.equal(tensors.get("watch", fingerprint[:0]), fingerprint):
                warn(f"the detectors differ from the interrupted job ({DIFFERS}): all samples are scored again")
                return
            done = position - state.offset
            arrays = within("measures.", tensors)
            if short := [name for name, values in arrays.items() if len(values) != done]:
                raise ValueError(f"{', '.join(short)} must have {done} samples")
            parts = {_decode_key(key): [values.numpy()] for key, values in arrays.items()}

        state.checkpoint.load(torch.device("cpu"), range(state.offset + last + 1), restore)
        return done, parts

    @property
    def _fingerprint(self) -> Tensor:
        return torch.tensor(list(b"" if self.watch is None else self.watch.fingerprint), dtype=torch.uint8)

    def _measured(self, parts: Parts, samples: PairedSamples) -> Measured:
        """Combine the measures of all batches."""
        answers: dict[str, dict[str, list[Answers]]] = {}
        seen: dict[Record, Array] = {}
        rows: dict[tuple[str, str], dict[str, list[Any]]] = {}
        for key, values in parts.items():
            if isinstance(key, Record):
                seen[key] = np.concatenate(values)
            else:
                rows.setdefault((key.front, key.who), {})[key.name] = values
        for (name, who), by_measure in rows.items():
            batches = zip(*by_measure.values(), strict=True)
            answers.setdefault(name, {})[who] = [dict(zip(by_measure, values, strict=True)) for values in batches]
        return Measured(
            self.task, {name: self.task.joined(by_measure, samples.a) for name, by_measure in answers.items()}, seen
        )


class _Memo(dict[Hashable, Any]):
    """Cache of the results for a batch."""

    def __call__(self, key: Hashable, work: Callable[..., Any], *arguments: Any) -> Any:
        if key not in self:
            self[key] = work(*arguments)
        return self[key]


def _encode_key(key: Measure | Record) -> str:
    kind = next(name for name, key_class in KINDS.items() if isinstance(key, key_class))
    return f"measures.{json.dumps([kind, *astuple(key)])}"


def _decode_key(encoded: str) -> Measure | Record:
    kind, *values = json.loads(encoded)
    if len(values) != len(fields(KINDS[kind])):
        raise ValueError(f"it has the format of an earlier version: {encoded}")
    return KINDS[kind](*values)
