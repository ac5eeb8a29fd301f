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
from hf_stitch.data import Batch, PairedSamples, Samples
from hf_stitch.pairs import Pair
from hf_stitch.processes import joined
from hf_stitch.representation import Pooling, Representation
from hf_stitch.running import Run
from hf_stitch.statistics.base import within
from hf_stitch.stitches import StitchingLayer
from hf_stitch.storage.checkpoint import Checkpoint
from hf_stitch.tasks.base import Answers
from hf_stitch.tasks.heads import logits_of
from hf_stitch.tasks.kinds import task_named

Labelled = tuple[str, str, str]
"""Label of a matcher, layer of the source, layer of the target."""
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
        self.task = task_named(pair.task).about(pair.target)
        self._parts: dict[str, list[np.ndarray[Any, Any]]] = {}

    @property
    def predictors(self) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
        """The measures by predictor; of stitches a column each, with squared residuals and norms."""
        rows = {who: within(f"{who}.", self.arrays) for who in ("stitched", "mean_only", "source", "target")}
        found = {who: row for who, row in rows.items() if row}
        columns = [self.pair.layers_b.index(lb) for _, _, lb in self.stitches]
        found["stitched"] |= {"error": self.arrays["error"], "norm": self.arrays["norm"][:, columns]}
        if (labels := self.task.known(self.samples)) is not None:
            found["target"]["label"] = labels
            chance = self.task.chance(found, 0)
            found["chance"] = {name: chance[name] for name in self.task.kept}
        return found

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
                self._parts = {name: [np.concatenate(parts)] for name, parts in self._parts.items()}
                arrays = {f"measures.{name}": torch.from_numpy(values) for name, (values,) in self._parts.items()}
                state.save(offset + count, {**kept, **arrays, "watch": fitted})
        parts = joined(run.processes.gather(self._parts))
        self.arrays = {name: np.concatenate(each) for name, each in parts.items()}

    def seen(self, what: str, number: int) -> Seen:
        """Return what detectors kept: ``stitched`` of a cell, ``own`` or ``doses`` of a layer of the target."""
        return within(f"seen.{what}.{number}.", self.arrays)

    def _measure(self, batch: Batch) -> dict[str, np.ndarray[Any, Any]]:
        pair = self.pair
        found = pair.run(batch, complete=True)
        resized = _Resized(found.x)
        parents = {"target": found.target} | ({"source": found.source} if self.with_source else {})
        side = batch, found.inputs
        answers = self.task.measure(parents, side, side)
        kept = [key for key in self.task.kept if key in answers["target"]]
        measured = {f"{who}.{key}": row[key] for who, row in answers.items() for key in kept}
        if self.task.classifies:
            measured["target.class"] = answers["target"]["class"]
        norms, errors = [], []
        rows: dict[str, list[Answers]] = {"stitched": [], "mean_only": []}
        for j, b in enumerate(pair.layers_b):
            y = received(found.y[b], pair.pooling)
            norms.append(_squares(y.values, y.mask))
            if self.watch.detectors:
                measured |= _named(f"seen.own.{j}.", self.watch.see(b, y, batch.ids))
                measured |= _named(f"seen.doses.{j}.", self.watch.see_doses(b, y, batch.ids))
            constant = logits_of(pair.finish(self._constant(b, found.x), b, found.y[b]))
            own = constant.expand(len(batch.samples), *constant.shape[1:])
            rows["mean_only"].append(self.task.measure({"own": own, "target": found.target}, side, side)["own"])
        for place, ((_, a, b), layer) in enumerate(self.stitches.items()):
            mapped = layer(resized.to(a, layer))
            errors.append(_error(mapped, found.y[b], pair.pooling))
            if self.watch.detectors:
                handed = self.watch.see(b, handed_over(mapped, pair.pooling), batch.ids)
                measured |= _named(f"seen.stitched.{place}.", handed)
            outputs = {"own": pair.finish(mapped, b, found.y[b]), "target": found.target}
            rows["stitched"].append(self.task.measure(outputs, side, side)["own"])
        for who, of in rows.items():
            measured |= {f"{who}.{key}": np.stack([row[key] for row in of], 1) for key in kept}
        return measured | {"norm": np.stack(norms, 1), "error": np.stack(errors, 1)}

    def _constant(self, b: str, x: Mapping[str, Representation]) -> Representation:
        """Return the mean of the target's rows as a representation: of one sample, or of all where texts differ."""
        own = x[self.pair.layers_a[0]]
        if own.mask is None:
            own = own.replace(values=own.values[:1])
        return self.means[b](own)


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
