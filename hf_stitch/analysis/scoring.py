"""Per-sample measures of several stitching layers at the same cuts, computed in one pass over the samples."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_stitch.adapters import Adapter, load
from hf_stitch.adapters.cutting.modes import evaluating
from hf_stitch.adapters.prefixes import PrefixFront
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import PairedSamples
from hf_stitch.pairs.pair import check_finite
from hf_stitch.processes import joined
from hf_stitch.reference import ModelReference
from hf_stitch.running import Run
from hf_stitch.stitches import StitchingLayer
from hf_stitch.tasks.base import Answers, Array, Task, Whole
from hf_stitch.tasks.heads import check_head, logits_of, task_of
from hf_stitch.tasks.kinds import task_named
from hf_stitch.tasks.tokens import NextToken

NULLS = ("identity", "mean_only", "chance")
"""Baselines that carry nothing over from the source."""


@dataclass(frozen=True)
class Score:
    """A figure with its 95% confidence interval (percentile bootstrap over samples).

    Attributes:
        value: The figure on all samples.
        low: Lower end of the interval.
        high: Upper end of the interval.

    Example:
        >>> print(Score(0.913, 0.902, 0.923))
        0.913 [0.902, 0.923]
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return the figure with its interval, e.g. ``0.913 [0.902, 0.923]``; a dash if it is undefined."""
        return "–" if np.isnan(self.value) else f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class _Unswapped:
    """A stitched model as the reference: the model before its encoder was exchanged."""

    model: StitchedModel

    def preprocess(self, samples: Sequence[Any]) -> Mapping[str, Any]:
        return self.model.preprocess(samples)

    def forward(self, inputs: Any) -> Any:
        with evaluating(self.model):
            return self.model(**inputs)


@torch.no_grad()
def answers(
    stitched: StitchedModel,
    layers: Mapping[str, StitchingLayer],
    samples: PairedSamples,
    whole: Whole,
    run: Run,
    *,
    alone: Whole | None = None,
) -> dict[str, Answers]:
    """Compute per-sample measures of several stitching layers and of the target.

    The source and the whole target run once per batch. The outputs of the stitching layers pass through the rest of the
    target one after the other: concatenated into one batch they would take longer on a CPU, and the last bits of the
    logits would change.
    """
    task = task_named(stitched.task).about(stitched)
    for layer in layers.values() if task.causal else ():
        layer.check_causal()
    parts: dict[str, list[Answers]] = {}
    for _, batch, twin in samples.batches(run, "scoring"):
        inputs = stitched.preprocess(batch.samples)
        own, sizes = task.inputs(whole, twin)
        with evaluating(stitched):
            representation = stitched.source(**stitched.source_inputs(inputs))
            check_finite(representation, f"layer {stitched.source.cut.layer!r} of the source", batch)
            outputs = {name: stitched.head(layer(representation)) for name, layer in layers.items()}
        others = isinstance(stitched.source, PrefixFront)  # the source alone reads other tokens than the target
        if alone is not None and not others:
            outputs["source"] = alone.forward(alone.preprocess(batch.samples))
        outputs["target"] = whole.forward(own)
        measured = task.measure(outputs, (batch, inputs), (twin, own))
        for name, found in measured.items():
            parts.setdefault(name, []).append({**found, **sizes})
        if isinstance(task, NextToken) and isinstance(alone, Adapter) and others:
            parts.setdefault("source", []).append(task.measure_alone(alone, batch))
    return task.joined(joined(run.processes.gather(parts)), samples.a)


def source_alone(stitched: StitchedModel, source: Any, target: Whole) -> tuple[Adapter | None, str]:
    """Return the whole source of a stitched model if its head can be scored like that of the target."""
    if stitched.task is None:
        return None, ""
    if source is None and stitched.parents is None:
        return None, "it is not in memory; pass source="
    found = stitched.parent("source") if source is None else load(source)
    known = stitched.config.source["reference"].get("weights_hash")
    if source is not None and known not in (None, found.pinned.weights_hash):
        warnings.warn(
            "the source has other weights than the source of this model, so its score says nothing about this model: "
            "pass the network from which the model was made",
            stacklevel=3,
        )
    why = head_difference(found, target, str(stitched.task))
    return (None, why) if why else (found, "")


def head_difference(source: Adapter, target: Whole, task: str) -> str:
    """Return why the head of a source cannot be scored like that of the target; empty if it can."""
    if source.unscored or source.task != task:
        return f"it has no head for {task}"
    if not source.completes:
        return "its tokens are not those of the target"
    if not task_named(task).describes_outputs or not isinstance(target, Adapter):
        return ""
    (count, names), (others, theirs) = _classes(source), _classes(target)
    if count == others and (names == theirs or not names or not theirs):
        return ""
    order = count == others and sorted(names) == sorted(theirs)
    return "its head has the same classes in another order" if order else "its head has other classes"


def _classes(network: Adapter) -> tuple[int, tuple[str, ...]]:
    """Return the number of classes, and their names if the network has some."""
    config: Any = getattr(network.model, "config", None)
    names = getattr(config, "id2label", None) or {}
    with torch.no_grad():
        count = int(logits_of(network.forward(network.example)).shape[-1])
    known = tuple(str(names.get(i, "")) for i in range(count))
    generic = all(name in ("", f"LABEL_{i}") for i, name in enumerate(known))
    return count, () if generic else known


def check_place(stitched: StitchedModel, name: str, layer: StitchingLayer) -> None:
    """Check that a stitching layer has the same source, target and pooling as the one of the model."""
    own, got = (f"{side.source} to {side.target} ({side.pooling})" for side in (stitched.stitch, layer))
    if own != got:
        raise ValueError(f"stitch {name!r} maps {got}, but the stitching layer of this model maps {own}")


def whole_target(stitched: StitchedModel, target: Any = None) -> Adapter:
    """Return the whole target network of a stitched model; warn if the one that is given is another."""
    if target is None:
        return stitched.parent("target")
    given = load(target)
    if changes := target_changes(stitched, given):
        warnings.warn(
            f"target= is not the target of the stitched model: it differs in {', '.join(changes)} "
            f"({'; '.join(text for texts in changes.values() for text in texts)}). Figures relative to it are not "
            "comparable with those of the recorded target",
            stacklevel=4,
        )
    return given


def scored_target(stitched: StitchedModel, target: Any = None) -> Adapter:
    """Return the whole target as :func:`whole_target`, with which a stitched model is scored."""
    whole = whole_target(stitched, target)
    for each in (whole, stitched):
        check_head(each)
    task_of(whole, stitched.task)
    return whole


def target_changes(stitched: StitchedModel, whole: Adapter) -> dict[str, list[str]]:
    """Compare a network with the recorded target of a stitched model."""
    record = (stitched.config.target or {}).get("reference")
    if record is None or record.get("weights_hash") is None:
        return {}
    return ModelReference.from_dict(record).changes(whole.pinned)


def reference(stitched: StitchedModel, target: Any = None) -> Whole:
    """Return the reference that predictors are compared with: the whole target, or a stitched model given instead."""
    if not isinstance(target, StitchedModel):
        return scored_target(stitched, target)
    for each in (stitched, target):
        check_head(each)
    return _Unswapped(target)


def not_beaten(task: Task, drawn: Mapping[str, Mapping[str, Array]], rivals: Iterable[str] = NULLS) -> tuple[str, ...]:
    """Return the baselines that a stitched model does not beat, by the first figure that is defined.

    A baseline is beaten if the 95% interval of the paired difference over the resamples lies above 0.
    """
    own = drawn["stitched"]
    figure = next((name for name, values in own.items() if not np.isnan(values[0])), None)
    if figure is None:
        return ()
    sign = 1 if task.figures[figure] else -1
    apart = {name: sign * (own[figure] - drawn[name][figure])[1:] for name in rivals if name in drawn}
    return tuple(name for name, values in apart.items() if np.nanquantile(values, 0.025) <= 0)


def as_score(drawn: Array) -> Score:
    """Return the figure on all samples with the percentiles of the resamples."""
    low, high = np.nan, np.nan
    if not np.isnan(drawn[0]):
        low, high = np.nanquantile(drawn[1:], [0.025, 0.975])  # NaN where the target has no correct sample
    return Score(float(drawn[0]), float(low), float(high))
