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
from hf_stitch.scoring.measured import Kept, Measure, Measured
from hf_stitch.statistics.base import within
from hf_stitch.storage.checkpoint import Checkpoint
from hf_stitch.tasks.base import Answers, Array, Task, Whole, concatenated, logits_of
from hf_stitch.tasks.per_sample import OfSamples
from hf_stitch.tasks.tokens import NextToken

Parts = dict[Measure | Kept, list[Any]]
KINDS: dict[str, type[Measure | Kept]] = {"answers": Measure, "seen": Kept}
"""What a state calls the keys of what was measured."""
DIFFERS = "another number of threads or another machine rounds differently, which training amplifies"


class Watch(Protocol):
    """What keeps something of the activations that the target gets, and of its own."""

    @property
    def fingerprint(self) -> bytes:
        """Hash of what decides what is kept."""

    def see_own(self, y: Mapping[str, Representation], ids: Sequence[Id]) -> Mapping[Kept, Array]:
        """Return what is kept of the target's own activations of a batch, by layer."""

    def see_stitched(
        self, predictor: Predictor, mapped: Representation, y: Representation, ids: Sequence[Id]
    ) -> Mapping[Kept, Array]:
        """Return what is kept of the activations that a predictor hands over, of which ``y`` are the target's own."""


class State(NamedTuple):
    """Where a job keeps what an interrupted pass has measured, behind what it keeps of an earlier pass."""

    checkpoint: Checkpoint
    offset: int  # number of samples of the earlier pass
    kept: Mapping[str, Tensor]  # what it keeps of the earlier pass


class Scoring:
    """Measures of every sample for predictors, for their target, and for the whole source.

    The target runs once per batch, and so does each front half that differs from the others. For each predictor, its
    stitching layer and the back half run in addition, one predictor after the other: concatenated into one batch they
    would take longer on a CPU, and the last bits of the outputs would change.
    """

    def __init__(
        self, target: Whole, halves: Mapping[str, Halves], predictors: Sequence[Predictor], task: Task, *,
        watch: Watch | None = None, kept: Sequence[str] = (), sizes: bool = False,
    ) -> None:  # fmt: skip
        self.target, self.halves, self.predictors, self.task, self.watch = target, halves, predictors, task, watch
        self._kept, self._sizes = kept, sizes  # measures of predictors, by default all; whether texts are measured
        self._constants: dict[tuple[str, str], Tensor] = {}

    @property
    def networks(self) -> list[nn.Module]:
        """The networks that run."""
        whole: Any = self.target
        return [whole.model, *(module for halves in self.halves.values() for module in halves.modules)]

    @property
    def device(self) -> torch.device:
        """The device on which they run."""
        weights = (weight for network in self.networks for weight in network.parameters())
        return next((weight.device for weight in weights), torch.device("cpu"))

    @torch.no_grad()
    def run(self, samples: PairedSamples, run: Run, state: State | None = None) -> Measured:
        """Measure all samples that the state does not contain yet; all processes then have all measures."""
        for predictor in self.predictors if self.task.causal else ():
            predictor.stitch.check_causal()
        self._constants.clear()
        last = len(samples.of_process(run))
        done, parts = (0, Parts()) if state is None else self._resumed(state, last)
        with ExitStack() as stack:
            own = (module for halves in self.halves.values() for module in halves.modules)
            for module in (*own, *(predictor.stitch for predictor in self.predictors)):
                stack.enter_context(evaluating(module))
            for count, batch, twin in samples.batches(run, "scoring", done):
                for key, values in self._measure(batch, twin).items():
                    parts.setdefault(key, []).append(values)
                if state is not None and state.checkpoint.due(count == last):
                    parts = {key: [concatenated(values)] for key, values in parts.items()}
                    arrays = {_written(key): torch.from_numpy(of) for key, (of,) in parts.items()}
                    tensors = {**state.kept, **arrays, "watch": self._fingerprint}
                    state.checkpoint.save(state.offset + count, tensors)
        return self._measured(joined(run.processes.gather(parts)), samples)

    def cost(self, samples: PairedSamples, run: Run) -> tuple[float, Measured]:
        """Return the seconds that all samples take, extrapolated from a batch, and what is measured of the batch."""
        few = samples.take(min(run.batch_size, len(samples)))
        quiet, found = replace(run, progress=False, processes=ALONE), list[Measured]()
        seconds = seconds_of(lambda: found.append(self.run(few, quiet)), self.device)
        return seconds * len(samples) / len(few) / run.processes.count, found[0]

    def _measure(self, batch: Batch, twin: Batch) -> dict[Measure | Kept, Any]:
        target, sizes = self._target(twin)
        measured: dict[Measure | Kept, Any] = {}
        if self.watch is not None:
            measured.update(self.watch.see_own(target.found, twin.ids).items())
        once = _Once()
        for name, halves in self.halves.items():
            own = once(halves.front, halves.encode, batch)
            sides = (batch, own.inputs), (twin, target.inputs)
            rows, outputs = dict[str, Answers](), dict[str, Any]()
            for predictor in (each for each in self.predictors if each.front == name):
                like = target.found.get(predictor.layer_b)
                mapped, output = self._outputs(predictor, halves, own, like, once, len(batch.samples))
                of_samples = isinstance(self.task, OfSamples)  # as many at a time as are small together
                outputs[predictor.name] = logits_of(output) if of_samples else output
                if not of_samples or len(outputs) * outputs[predictor.name].numel() > 2**22:
                    rows |= self.task.measure({**outputs, "target": target.output}, *sides)
                    outputs.clear()
                if self.watch is not None and mapped is not None and like is not None:
                    measured.update(self.watch.see_stitched(predictor, mapped, like, batch.ids).items())
            source, alone = own.output, halves.alone
            if alone is not None and not halves.reads_other_tokens:
                source = once(id(alone), lambda net: net.forward(self.task.inputs(net, batch.samples)), alone)
            outputs |= {"source": source, "target": target.output}  # None if not compared with that of the target
            rows |= self.task.measure({who: output for who, output in outputs.items() if output is not None}, *sides)
            if halves.reads_other_tokens and alone is not None and isinstance(self.task, NextToken):
                rows["source"] = self.task.measure_alone(alone, batch)
            for who, row in rows.items():
                kept = self._kept if self._kept and who not in ("source", "target") else row
                found = {**sizes, **{key: row[key] for key in kept if key in row}}
                measured |= {Measure(name, who, key): values for key, values in found.items()}
        return measured

    def _target(self, twin: Batch) -> tuple[Ran, Answers]:
        """Run the target, and measure the samples themselves."""
        sizes: Answers = {}
        if self._sizes:
            inputs, sizes = self.task.sized_inputs(self.target, twin)
        else:
            inputs = self.task.inputs(self.target, twin.samples)
        reads = self.watch is not None or any(halves.needs_own for halves in self.halves.values())
        if not reads or not isinstance(self.target, Adapter):
            return Ran(inputs, {}, self.target.forward(inputs)), sizes
        layers = dict.fromkeys(predictor.layer_b for predictor in self.predictors)
        return run_to(self.target, inputs, layers, twin, "target", complete=True), sizes

    def _outputs(
        self, predictor: Predictor, halves: Halves, own: Ran, like: Representation | None, once: _Once, count: int
    ) -> tuple[Representation | None, Any]:
        """Return what a predictor hands over to the target, and its output; of a constant one that of all samples."""
        place = predictor.front, predictor.name
        if (known := self._constants.get(place)) is not None:
            return None, known.expand(count, -1)
        x, stitch = own.found[predictor.layer_a], predictor.stitch
        if stitch.shrinks(x):  # once for all stitches to the same grid
            x = once((halves.front, predictor.layer_a, stitch.target.grid), x.resize, stitch.target.grid)
        mapped = stitch(x)
        output = halves.finish(mapped, predictor.layer_b, like)
        if not predictor.constant:
            return mapped, output
        if x.mask is None and (logits := logits_of(output)).dim() == 2:
            self._constants[place] = logits[:1]
        return None, output

    def _resumed(self, state: State, last: int) -> tuple[int, Parts]:
        """Return the number of samples that an interrupted job has measured, and their measures.

        A resumed job fits its watch anew. If that has other bits than before (training amplifies the rounding of
        another number of threads), all samples are measured anew, so that no scores of two fits are mixed.
        """
        done, parts, fitted = 0, Parts(), self._fingerprint

        def restore(position: int, tensors: Mapping[str, Tensor]) -> None:
            nonlocal done, parts
            if position <= state.offset:
                return
            if not torch.equal(tensors.get("watch", fitted[:0]), fitted):
                warn(f"the detectors differ from those of the interrupted job ({DIFFERS}): all samples are scored anew")
                return
            done = position - state.offset
            arrays = within("measures.", tensors)
            if short := [name for name, values in arrays.items() if len(values) != done]:
                raise ValueError(f"{', '.join(short)} must have {done} samples")
            parts = {_read(key): [values.numpy()] for key, values in arrays.items()}

        state.checkpoint.load(torch.device("cpu"), range(state.offset + last + 1), restore)
        return done, parts

    @property
    def _fingerprint(self) -> Tensor:
        return torch.tensor(list(b"" if self.watch is None else self.watch.fingerprint), dtype=torch.uint8)

    def _measured(self, parts: Parts, samples: PairedSamples) -> Measured:
        """Put the measures of all batches together."""
        answers: dict[str, dict[str, list[Answers]]] = {}
        seen: dict[Kept, Array] = {}
        rows: dict[tuple[str, str], dict[str, list[Any]]] = {}
        for key, values in parts.items():
            if isinstance(key, Kept):
                seen[key] = np.concatenate(values)
            else:
                rows.setdefault((key.front, key.who), {})[key.name] = values
        for (name, who), of in rows.items():
            batches = zip(*of.values(), strict=True)
            answers.setdefault(name, {})[who] = [dict(zip(of, values, strict=True)) for values in batches]
        return Measured(self.task, {name: self.task.joined(of, samples.a) for name, of in answers.items()}, seen)


class _Once(dict[Hashable, Any]):
    """What is computed once for a batch."""

    def __call__(self, key: Hashable, work: Callable[..., Any], *given: Any) -> Any:
        if key not in self:
            self[key] = work(*given)
        return self[key]


def _written(key: Measure | Kept) -> str:
    kind = next(name for name, of in KINDS.items() if isinstance(key, of))
    return f"measures.{json.dumps([kind, *astuple(key)])}"


def _read(written: str) -> Measure | Kept:
    kind, *values = json.loads(written)
    if len(values) != len(fields(KINDS[kind])):
        raise ValueError(f"an earlier version wrote it, which names measures in another way: {written}")
    return KINDS[kind](*values)
