"""Measures of all stitches of a grid in one pass."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_stitch.analysis.detection.recording import handed_over, received
from hf_stitch.analysis.detection.watching import Seen, Watch
from hf_stitch.analysis.scoring import Answers, measure_classes, measure_tokens
from hf_stitch.data import Batch, PairedSamples, Samples
from hf_stitch.pairs import Pair
from hf_stitch.pairs.pair import Outputs
from hf_stitch.processes import joined
from hf_stitch.representation import Pooling, Representation
from hf_stitch.running import Run
from hf_stitch.statistics.base import within
from hf_stitch.stitches import StitchingLayer
from hf_stitch.storage.checkpoint import Checkpoint
from hf_stitch.tasks import logits_of

Labelled = tuple[str, str, str]
"""Label of a matcher, layer of the source, layer of the target."""
KEPT = {"classes": ("right", "agreement"), "tokens": ("tokens", "cross_entropy", "agreement")}
"""Measures that are kept for each sample and each stitch."""
DIFFERS = "another number of threads or another machine rounds differently, which training amplifies"


class Measures:
    """Measures of every sample for every stitch, target cut and parent."""

    def __init__(
        self,
        pair: Pair,
        stitches: Mapping[Labelled, StitchingLayer],
        samples: Samples,
        *,
        with_source: bool,
        means: Mapping[str, StitchingLayer],
        watch: Watch,
    ) -> None:
        self.pair, self.stitches, self.samples, self.with_source = pair, stitches, samples, with_source
        self.means, self.watch = means, watch
        self.kept = KEPT["tokens" if pair.is_language_model else "classes"]
        if not pair.is_language_model and samples.labels is None:
            self.kept = ("agreement",)
        self._parts: dict[str, list[np.ndarray[Any, Any]]] = {}

    @property
    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """The measures of all samples so far."""
        return {name: np.concatenate(parts) for name, parts in self._parts.items()}

    @torch.no_grad()
    def collect(self, state: Checkpoint, offset: int, kept: Mapping[str, Tensor], run: Run) -> None:
        """Measure all samples that the checkpoint does not contain yet.

        A resumed job fits its detectors anew. If they have other bits than before (training amplifies the rounding of
        another number of threads), all samples are measured anew, so that no scores of two fits are mixed.
        """
        samples = PairedSamples.of(self.samples)
        last = len(samples.of_process(run))
        done, fitted = 0, torch.tensor(list(self.watch.fingerprint), dtype=torch.uint8)

        def restore(position: int, tensors: Mapping[str, Tensor]) -> None:
            nonlocal done
            if position <= offset:
                return
            if torch.equal(tensors.get("watch", fitted[:0]), fitted):
                done = position - offset
                arrays = {name: tensor.numpy() for name, tensor in within("measures.", tensors).items()}
                if short := [name for name, values in arrays.items() if len(values) != done]:
                    raise ValueError(f"{', '.join(short)} must have {done} samples")
                self._parts = {name: [values] for name, values in arrays.items()}
            else:
                warnings.warn(
                    f"the detectors differ from those of the interrupted job ({DIFFERS}): all samples are scored anew",
                    stacklevel=4,
                )

        state.load(torch.device("cpu"), range(offset + last + 1), restore)
        for count, batch, _ in samples.batches(run, "scoring", done):
            for name, values in self._measure(batch).items():
                self._parts.setdefault(name, []).append(values)
            if state.due(count == last):
                self._parts = {name: [values] for name, values in self.arrays.items()}
                arrays = {f"measures.{name}": torch.from_numpy(values) for name, (values,) in self._parts.items()}
                state.save(offset + count, {**kept, **arrays, "watch": fitted})
        self._parts = joined(run.processes.gather(self._parts))

    def seen(self, what: str, number: int) -> Seen:
        """Return what detectors kept: ``stitched`` of a cell, ``own`` or ``doses`` of a layer of the target."""
        prefix = f"seen.{what}.{number}."
        return {
            name.removeprefix(prefix): np.concatenate(parts)
            for name, parts in self._parts.items()
            if name.startswith(prefix)
        }

    def _measure(self, batch: Batch) -> dict[str, np.ndarray[Any, Any]]:
        pair = self.pair
        found = pair.run(batch, complete=True)
        resized = _Resized(found.x)
        logits = {"target": logits_of(found.target)}
        if self.with_source:
            logits["source"] = logits_of(found.source)
        parents = self._answers(logits, found, batch)
        measured = {f"{who}.{key}": row[key] for who, row in parents.items() for key in self.kept}
        if not pair.is_language_model:
            measured["target.class"] = parents["target"]["class"]
        norms, means, errors, cells = [], [], [], []
        for j, b in enumerate(pair.layers_b):
            own = received(found.y[b], pair.pooling)
            norms.append(_squares(own.values, own.mask))
            if self.watch.detectors:
                measured |= _named(f"seen.own.{j}.", self.watch.see(b, own, batch.ids))
                measured |= _named(f"seen.doses.{j}.", self.watch.see_doses(b, own, batch.ids))
            constant = logits_of(pair.finish(self._constant(b, found.x), b, found.y[b]))
            means.append({"mean": constant.expand(len(batch.samples), *constant.shape[1:])})
        for place, ((_, a, b), layer) in enumerate(self.stitches.items()):
            mapped = layer(resized.to(a, layer))
            errors.append(_error(mapped, found.y[b], pair.pooling))
            if self.watch.detectors:
                handed = self.watch.see(b, handed_over(mapped, pair.pooling), batch.ids)
                measured |= _named(f"seen.stitched.{place}.", handed)
            cell = {"own": logits_of(pair.finish(mapped, b, found.y[b])), "target": logits["target"]}
            cells.append(self._answers(cell, found, batch)["own"])
        rows = [self._answers({**mean, "target": logits["target"]}, found, batch)["mean"] for mean in means]
        measured |= {f"stitched.{key}": np.stack([row[key] for row in cells], 1) for key in self.kept}
        measured |= {f"mean_only.{key}": np.stack([row[key] for row in rows], 1) for key in self.kept}
        return measured | {"norm": np.stack(norms, 1), "error": np.stack(errors, 1)}

    def _constant(self, b: str, x: Mapping[str, Representation]) -> Representation:
        """Return the mean of the target's rows as a representation: of one sample, or of all where texts differ."""
        own = x[self.pair.layers_a[0]]
        if own.mask is None:
            own = own.replace(values=own.values[:1])
        return self.means[b](own)

    def _answers(self, logits: Mapping[str, Tensor], found: Outputs, batch: Batch) -> dict[str, Answers]:
        if self.pair.is_language_model:
            return measure_tokens(logits, found.inputs, batch)
        return measure_classes(logits, batch)


class _Resized:
    """Representations of the source, shrunk once for all stitches to the same grid."""

    def __init__(self, x: Mapping[str, Representation]) -> None:
        self._x = x
        self._kept: dict[tuple[str, tuple[int, int]], Representation] = {}

    def to(self, layer: str, stitch: StitchingLayer) -> Representation:
        own, grid = self._x[layer], stitch.target.grid
        if (
            stitch.pooling != "none"
            or own.grid is None
            or grid is None
            or grid[0] * grid[1] >= own.grid[0] * own.grid[1]
        ):
            return own
        if (layer, grid) not in self._kept:
            self._kept[layer, grid] = own.resize(grid)
        return self._kept[layer, grid]


def _named(prefix: str, values: Seen) -> dict[str, np.ndarray[Any, Any]]:
    return {f"{prefix}{name}": array for name, array in values.items()}


def _error(mapped: Representation, y: Representation, pooling: Pooling) -> np.ndarray[Any, Any]:
    """Squared distance of the mapped activations from the target's, summed over each sample."""
    own = received(y, pooling)
    return _squares(handed_over(mapped, pooling).values - own.values, own.mask)


def _squares(values: Tensor, mask: Tensor | None) -> np.ndarray[Any, Any]:
    if mask is not None:
        values = torch.where(mask[..., None], values, 0)
    if values.dim() > 2:  # in parts, which are summed in float64: a norm of all in float64 is 20 times slower
        values = torch.linalg.vector_norm(values.flatten(2), dim=2)
    return values.double().square().sum(1).cpu().numpy()
