"""The two passes of a grid of stitches: moments of all pairs of layers, and measures of all stitches."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from hf_stitch.adapters import Adapter
from hf_stitch.adapters.prefixes import PrefixAdapter
from hf_stitch.analysis.detection.recording import handed_over, received
from hf_stitch.analysis.detection.watching import Seen, Watch
from hf_stitch.analysis.scoring import Answers, measure_classes, measure_tokens
from hf_stitch.data import Batch, Samples
from hf_stitch.matchers.fitting import PairMoments, check_finite, check_moments_fit
from hf_stitch.processes import joined
from hf_stitch.representation import Pooling, Representation
from hf_stitch.running import Run
from hf_stitch.statistics.base import within
from hf_stitch.stitches import StitchingLayer
from hf_stitch.storage.checkpoint import Checkpoint
from hf_stitch.tasks import logits_of

Cell = tuple[str, str, str]
"""Label of a matcher, layer of the source, layer of the target."""
KEPT = {"classes": ("right", "agreement"), "tokens": ("tokens", "cross_entropy", "agreement")}
"""Measures that are kept for each sample and each stitch."""
DIFFERS = "another number of threads or another machine rounds differently, which training amplifies"


@dataclass(frozen=True)
class Sides:
    """Both networks with the layers between which stitches run.

    Attributes:
        source: The network of the front halves.
        target: The network of the back halves.
        layers_a: Layers of the source.
        layers_b: Layers of the target.
        pooling: The pooling of all stitches.
        task: Task of the stitched models.
    """

    source: Adapter
    target: Adapter
    layers_a: tuple[str, ...]
    layers_b: tuple[str, ...]
    pooling: Pooling
    task: str

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """All pairs of layers."""
        return [(a, b) for b in self.layers_b for a in self.layers_a]

    @property
    def is_language_model(self) -> bool:
        """Whether next tokens are predicted."""
        return self.task == "text-generation"


@dataclass(frozen=True)
class Outputs:
    """What both networks output for a batch, each run once."""

    inputs: Mapping[str, Any]
    x: Mapping[str, Representation]
    y: Mapping[str, Representation]
    source: Any
    target: Any


def run_both(sides: Sides, batch: Batch, twin: Batch | None = None, *, complete: bool) -> Outputs:
    """Run both networks once.

    Args:
        sides: The networks.
        batch: Raw samples.
        twin: Samples of the target, if it takes other ones.
        complete: Whether to run the networks to their ends, or only to their deepest layers. A source that reads
            the tokens of the target has no output there.

    Raises:
        ValueError: Activations are NaN or infinite; the message names layer and sample.
    """
    found, outputs, inputs = [], [], {}
    for side, adapter, layers, own in (
        ("source", sides.source, sides.layers_a, batch),
        ("target", sides.target, sides.layers_b, twin or batch),
    ):
        inputs = adapter.preprocess(own.samples)
        kept: dict[str, Representation] = {}

        def keep(name: str, representation: Representation, kept: dict[str, Representation] = kept) -> None:
            kept[name] = representation.replace(values=representation.values.clone())

        ends = complete and not isinstance(adapter, PrefixAdapter)
        outputs.append(adapter.run_with_callback(inputs, layers, keep, complete=ends))
        for name, representation in kept.items():
            check_finite(representation, f"layer {name!r} of the {side}", batch)
        found.append(kept)
    return Outputs(inputs, found[0], found[1], outputs[0], outputs[1])


@torch.no_grad()
def collect_moments(
    sides: Sides,
    samples: Samples,
    state: Checkpoint,
    last: int,
    run: Run,
) -> PairMoments:
    """Collect the moments of all pairs of layers.

    Args:
        sides: The networks.
        samples: Raw samples.
        state: Checkpoint, from which interrupted work continues.
        last: The last position in the checkpoint.
        run: How the job runs.

    Returns:
        The moments of the samples of this process.
    """
    check_moments_fit(sides.source, sides.target, sides.pairs, sides.pooling)
    moments, done = PairMoments(sides.pairs, sides.pooling), 0
    own = _part(samples, run)
    position = state.load(
        torch.device("cpu"), range(last + 1), lambda _, tensors: moments.load_state_dict(within("moments.", tensors))
    )
    if position is not None:
        done = min(position, len(own))
    elif run.processes.count > 1:
        first = run_both(sides, next(samples.batches(run.batch_size)), complete=False)
        moments.prepare(first.x, first.y)
    for count, batch in _remaining(own, done, run, "fitting"):
        found = run_both(sides, batch, complete=False)
        moments.update(found.x, found.y)
        if state.due(count == len(own)):
            state.save(count, {f"moments.{key}": tensor for key, tensor in moments.state_dict().items()})
    return moments


class Measures:
    """Measures of every sample for every stitch, target cut and parent.

    Attributes:
        arrays: Name of the measure -> ``(n, …)`` float64. ``stitched.*`` have one entry per cell, ``mean_only.*`` and
            ``norm`` one per layer of the target; ``source.*`` and ``target.*`` have one per sample.
            What detectors keep of stitched activations is in ``seen.stitched.<number of the cell>.*``, of the target's
            own in ``seen.own.<number of the layer>.*``, and with noise in ``seen.doses.<number of the layer>.*``.

    Args:
        sides: The networks.
        stitches: Cell -> stitching layer.
        samples: Labelled raw samples.
        with_source: Whether to measure the whole source, which needs the classes of the target.
        means: Layer of the target -> stitching layer from the first layer of the source that outputs its mean.
        watch: The fitted detectors.
    """

    def __init__(
        self,
        sides: Sides,
        stitches: Mapping[Cell, StitchingLayer],
        samples: Samples,
        *,
        with_source: bool,
        means: Mapping[str, StitchingLayer],
        watch: Watch,
    ) -> None:
        self.sides, self.stitches, self.samples, self.with_source = sides, stitches, samples, with_source
        self.means, self.watch = means, watch
        self.kept = KEPT["tokens" if sides.is_language_model else "classes"]
        if not sides.is_language_model and samples.labels is None:
            self.kept = ("agreement",)
        self._parts: dict[str, list[np.ndarray[Any, Any]]] = {}

    @property
    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """The measures of all samples so far."""
        return {name: np.concatenate(parts) for name, parts in self._parts.items()}

    @torch.no_grad()
    def collect(
        self,
        state: Checkpoint,
        offset: int,
        kept: Mapping[str, Tensor],
        run: Run,
    ) -> None:
        """Measure all samples that the checkpoint does not contain yet.

        A resumed job fits its detectors anew. If they have other bits than before (training amplifies the rounding of
        another number of threads), all samples are measured anew, so that no scores of two fits are mixed.

        Args:
            state: Checkpoint, from which interrupted work continues.
            offset: Position of the first sample in the checkpoint.
            kept: Further tensors that each checkpoint contains.
            run: How the job runs; all processes then have the measures of all samples.
        """
        own = _part(self.samples, run)
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

        state.load(torch.device("cpu"), range(offset + len(own) + 1), restore)
        for count, batch in _remaining(own, done, run, "scoring"):
            for name, values in self._measure(batch).items():
                self._parts.setdefault(name, []).append(values)
            if state.due(count == len(own)):
                self._parts = {name: [values] for name, values in self.arrays.items()}
                arrays = {f"measures.{name}": torch.from_numpy(values) for name, (values,) in self._parts.items()}
                state.save(offset + count, {**kept, **arrays, "watch": fitted})
        self._parts = joined(run.processes.gather(self._parts))

    def seen(self, what: str, number: int) -> Seen:
        """Return what detectors kept of activations.

        Args:
            what: ``stitched``, ``own`` or ``doses``.
            number: Number of the cell, or of the layer of the target.
        """
        prefix = f"seen.{what}.{number}."
        return {
            name.removeprefix(prefix): np.concatenate(parts)
            for name, parts in self._parts.items()
            if name.startswith(prefix)
        }

    def _measure(self, batch: Batch) -> dict[str, np.ndarray[Any, Any]]:
        sides = self.sides
        found = run_both(sides, batch, complete=True)
        resized = _Resized(found.x)
        logits = {"target": logits_of(found.target)}
        if self.with_source:
            logits["source"] = logits_of(found.source)
        parents = self._answers(logits, found, batch)
        measured = {f"{who}.{key}": row[key] for who, row in parents.items() for key in self.kept}
        if not sides.is_language_model:
            measured["target.class"] = parents["target"]["class"]
        norms, means, errors, cells = [], [], [], []
        for j, b in enumerate(sides.layers_b):
            own = received(found.y[b], sides.pooling)
            norms.append(_squares(own.values, own.mask))
            if self.watch.detectors:
                measured |= _named(f"seen.own.{j}.", self.watch.see(b, own, batch.ids))
                measured |= _named(f"seen.doses.{j}.", self.watch.see_doses(b, own, batch.ids))
            constant = self._decode(self._constant(b, found.x), b, found.y[b])
            means.append({"mean": constant.expand(len(batch.samples), *constant.shape[1:])})
        for place, ((_, a, b), layer) in enumerate(self.stitches.items()):
            mapped = layer(resized.to(a, layer))
            errors.append(_error(mapped, found.y[b], sides.pooling))
            if self.watch.detectors:
                handed = self.watch.see(b, handed_over(mapped, sides.pooling), batch.ids)
                measured |= _named(f"seen.stitched.{place}.", handed)
            cell = {"own": self._decode(mapped, b, found.y[b]), "target": logits["target"]}
            cells.append(self._answers(cell, found, batch)["own"])
        rows = [self._answers({**mean, "target": logits["target"]}, found, batch)["mean"] for mean in means]
        measured |= {f"stitched.{key}": np.stack([row[key] for row in cells], 1) for key in self.kept}
        measured |= {f"mean_only.{key}": np.stack([row[key] for row in rows], 1) for key in self.kept}
        return measured | {"norm": np.stack(norms, 1), "error": np.stack(errors, 1)}

    def _constant(self, b: str, x: Mapping[str, Representation]) -> Representation:
        """Return the mean of the target's rows as a representation: of one sample, or of all where texts differ."""
        own = x[self.sides.layers_a[0]]
        if own.mask is None:
            own = own.replace(values=own.values[:1])
        return self.means[b](own)

    def _decode(self, mapped: Representation, layer: str, like: Representation) -> Tensor:
        values = mapped.values.to(like.values.dtype)
        return logits_of(self.sides.target.decode(mapped.replace(values=values), layer))

    def _answers(self, logits: Mapping[str, Tensor], found: Outputs, batch: Batch) -> dict[str, Answers]:
        if self.sides.is_language_model:
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


def _part(samples: Samples, run: Run) -> Samples:
    """Return the samples of this process."""
    part = run.processes.part(len(samples), run.batch_size)
    return samples if run.processes.count == 1 else samples.select(range(*part))


def _remaining(samples: Samples, done: int, run: Run, label: str) -> Iterator[tuple[int, Batch]]:
    """Iterate over the batches after the first samples, with the number of samples including the batch."""
    rest: Sequence[int] = range(done, len(samples))
    hide = True if run.shown(label) is None else None  # None: shown on terminals only
    with tqdm(total=len(samples), initial=done, desc=label, unit="sample", delay=3, disable=hide) as bar:
        if not rest:
            return
        for batch in run.processes.watched(samples.select(rest).batches(run.batch_size)):
            done += len(batch.samples)
            yield done, batch
            bar.update(len(batch.samples))
