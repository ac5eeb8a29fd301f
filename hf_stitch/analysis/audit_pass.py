"""One pass over samples for all audits of stitched models that end in the same target."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_stitch.adapters import Adapter
from hf_stitch.adapters.cutting.modes import evaluating
from hf_stitch.analysis.detection.recording import View, handed_over, received
from hf_stitch.analysis.detection.result import Cell
from hf_stitch.analysis.detection.watching import Seen, Watch
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Batch, PairedSamples
from hf_stitch.pairs.pair import check_finite
from hf_stitch.processes import joined
from hf_stitch.reference import weights_hash
from hf_stitch.representation import Representation
from hf_stitch.running import Run
from hf_stitch.tasks.base import Answers
from hf_stitch.tasks.heads import logits_of
from hf_stitch.tasks.kinds import task_named

SOURCE = "source"
"""Stands for the layer of the source in the cells of an audit, which has one."""


def layer_of(model: StitchedModel) -> str:
    """Return the layer of the target at which a stitched model enters it."""
    layer: str = (model.config.target or {})["cut"]["layer"]
    return layer


def views_of(model: StitchedModel) -> dict[str, View]:
    """Return what detectors are shown of a stitched model, by part of its stitching layer."""
    views: dict[str, View] = {"body": model.stitch.pooling, "prefix": "prefix"}
    return {part: views[part] for part in model.stitch.parts}


class AuditPass:
    """Measures of every sample for several stitched models: accuracy, residuals, and what detectors keep.

    The target runs once per batch, and so does each front half that differs from the others. For each model, its
    stitching layer and its back half run in addition. The model that outputs the mean of the target runs once where
    samples have no mask.
    """

    def __init__(
        self,
        models: Sequence[StitchedModel],
        whole: Adapter,
        alone: Mapping[int, Adapter],
        watches: Mapping[View, Watch],
        scored: NDArray[np.bool_],
    ) -> None:
        self.models, self.whole, self.alone, self.watches, self.scored = models, whole, alone, watches, scored
        self.task = task_named(models[0].task).about(models[0])
        self.squares: list[dict[str, NDArray[np.float64]]] = [{} for _ in models]
        self._fronts = [_key(model, "source") for model in models]
        self._means = [(_key(model, "target"), weights_hash(model.stitch.mean_only())) for model in models]
        self._constant: dict[Any, Tensor] = {}
        self._answers: list[dict[str, list[Answers]]] = [{} for _ in models]
        self._seen: dict[tuple[str, View, Any], list[Seen]] = {}

    @torch.no_grad()
    def run(self, samples: PairedSamples, run: Run) -> None:
        """Measure all samples; all processes then have all measures."""
        processes = run.processes
        start, _ = processes.part(len(samples), run.batch_size)
        for _, batch, other in samples.batches(run, "auditing"):
            chosen = self.scored[start : (start := start + len(batch.ids))]
            self._measure(batch, other, torch.from_numpy(np.flatnonzero(chosen)))
        squares, answers, seen = zip(*processes.gather((self.squares, self._answers, self._seen)), strict=True)
        self.squares = [{part: sum(each[part] for each in of) for part in of[0]} for of in zip(*squares, strict=True)]
        self.answers = [self.task.joined(joined(of), samples.a) for of in zip(*answers, strict=True)]
        self._seen = joined(seen)

    def kept(self, what: str, view: View) -> dict[Any, Seen]:
        """Return what detectors keep."""
        return {
            key: {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            for (of, seen, key), parts in self._seen.items()
            if (of, seen) == (what, view)
        }

    def _measure(self, batch: Batch, other: Batch, chosen: Tensor) -> None:
        reference = self.whole.preprocess(other.samples)
        own: dict[str, Representation] = {}

        def keep(name: str, found: Representation) -> None:
            own[name] = found.replace(values=found.values.clone())

        layers = list(dict.fromkeys(map(layer_of, self.models)))
        target = logits_of(self.whole.run_with_callback(reference, layers, keep, complete=True))
        for layer, found in own.items():
            check_finite(found, f"layer {layer!r} of the target", other)
        self._watch_own(own, [other.ids[place] for place in chosen], chosen)
        norms = {
            (view, layer): _square(received(own[layer], view), None) for view, watch in self.watches.items()
            for layer in watch.layers
        }  # fmt: skip
        fronts: dict[str, Representation] = {}
        sources: dict[int, Tensor] = {}
        for number, model in enumerate(self.models):
            inputs = model.preprocess(batch.samples)
            if (key := self._fronts[number]) not in fronts:
                with evaluating(model):
                    fronts[key] = model.source(**model.source_inputs(inputs))
                check_finite(fronts[key], f"layer {model.source.cut.layer!r} of the source", batch)
            logits = {"target": target}
            with evaluating(model):
                mapped = model.stitch(fronts[key])
                logits["stitched"] = model.head(mapped).logits
                logits["mean_only"] = self._mean_only(number, fronts[key])
            if (alone := self.alone.get(number)) is not None:
                if id(alone) not in sources:
                    sources[id(alone)] = logits_of(alone.forward(alone.preprocess(batch.samples)))
                logits["source"] = sources[id(alone)]
            for name, found_measures in self.task.measure(logits, (batch, inputs), (other, reference)).items():
                self._answers[number].setdefault(name, []).append(found_measures)
            self._watch_stitched(number, mapped, own[layer_of(model)], norms, batch.ids, chosen)

    def _mean_only(self, number: int, front: Representation) -> Tensor:
        """Return logits of the mean activations of the target; of images they are the same for all samples."""
        model, key = self.models[number], self._means[number]
        if key in self._constant:
            return self._constant[key].expand(front.batch, -1)
        logits: Tensor = model.head(model.stitch.mean_only()(front)).logits
        if front.mask is None and logits.dim() == 2:
            self._constant[key] = logits[:1]
        return logits

    def _watch_own(self, own: Mapping[str, Representation], ids: Sequence[Any], chosen: Tensor) -> None:
        for view, watch in self.watches.items():
            for layer in watch.layers:
                if len(ids):
                    shown = received(_some(own[layer], chosen), view)
                    self._add("own", view, layer, watch.see(layer, shown, ids))
                    self._add("doses", view, layer, watch.see_doses(layer, shown, ids))

    def _watch_stitched(
        self,
        number: int,
        mapped: Representation,
        own: Representation,
        norms: Mapping[tuple[View, str], float],
        ids: Sequence[Any],
        chosen: Tensor,
    ) -> None:
        model = self.models[number]
        for part, view in views_of(model).items():
            shown = handed_over(mapped, view)
            sums = np.array([_square(shown, received(own, view)), norms[view, layer_of(model)]])
            self.squares[number][part] = self.squares[number].get(part, np.zeros(2)) + sums
            if len(chosen):
                seen = self.watches[view].see(layer_of(model), _some(shown, chosen), [ids[place] for place in chosen])
                self._add("stitched", view, _cell(number, layer_of(model)), seen)

    def _add(self, what: str, view: View, key: Any, seen: Seen) -> None:
        self._seen.setdefault((what, view, key), []).append(seen)


def _cell(number: int, layer: str) -> Cell:
    return str(number), SOURCE, layer


def _key(model: StitchedModel, side: str) -> str:
    """Return what decides the outputs of a half: its weights now, its cut, the network that it is from, its inputs."""
    record = getattr(model.config, side)
    of = {key: record.get(key) for key in ("cut", "plan", "reference", "interface")}
    return json.dumps([of, weights_hash(getattr(model, side)), repr(model.interface)], sort_keys=True, default=repr)


def _some(activations: Representation, chosen: Tensor) -> Representation:
    """Return some samples of a batch, without their context."""
    places = chosen.to(activations.values.device)
    mask = None if activations.mask is None else activations.mask[places]
    return activations.replace(values=activations.values[places], mask=mask, context={})


def _square(activations: Representation, other: Representation | None) -> float:
    """Return the squared norm of all positions, or of their differences from others."""
    values = activations.values
    if other is not None:
        values = values.to(other.values) - other.values
    if activations.mask is not None:
        values = torch.where(activations.mask[..., None], values, 0)
    if activations.prefix_tokens:
        values = values[:, activations.prefix_tokens :]
    # In parts, which are summed in float64: a norm of all in float64 is 20 times slower.
    return float(torch.linalg.vector_norm(values.flatten(1), dim=1).double().square().sum())
