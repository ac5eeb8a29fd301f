"""Samples on which models are scored, and checks that they are other ones than those to which something was fitted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hf_stitch.adapters.cutting.forwards import evaluating
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import PairedSamples, Samples
from hf_stitch.data.overlap import FITTED, MOST_SHARED, ContentSketch
from hf_stitch.printing import warn
from hf_stitch.reference import ModelReference
from hf_stitch.relative import AnchorSet
from hf_stitch.stitches.layer import source_positions
from hf_stitch.tasks.heads import task_named

PROBE = 64
"""Number of samples, evenly spaced, whose activations are compared with those of the anchors."""

APART = 0.35
"""Distance of the means, in standard deviations of the anchors, above which samples are unlike them. On two ResNets and
four networks of another kind, other images of the same data were below .2; images of 0 to 1 instead of normalised ones,
and images of another data set, were above .5."""


def samples_to_score(models: Sequence[StitchedModel], data: Any, paired_data: Any) -> PairedSamples:
    """Read samples for models of one task, number their labels, leave out anchors, and warn of what does not fit."""
    samples, config, task = PairedSamples.of(data, paired_data), models[0].config, task_named(models[0].task)
    samples = samples.with_first(task.numbered(samples.a, config))
    task.warn_of_labels(samples.a, config)
    for model in models:
        samples = _without_anchors(model, samples)
    for model in models:
        _warn_of_other_activations(model, samples.a)
    return samples


def fitted_share(stitched: StitchedModel, samples: Samples) -> float | None:
    """Return the share of samples to which the stitching layer of a model was fitted."""
    recorded = (stitched.config.recipe or {}).get(FITTED)
    return None if recorded is None else ContentSketch.from_dict(recorded).share(samples)


def check_held_out(train: Samples, test: Samples) -> None:
    """Check that test samples are not training samples. Samples are recognised by their content."""
    share = ContentSketch.of(train).share(test) or 0
    if share > MOST_SHARED:
        raise ValueError(
            f"{share:.1%} of test_data are also in data, to which stitches and probes are fitted, so that scores are "
            "too good: pass other samples, or leave test_data out for a split"
        )


def _without_anchors(stitched: StitchedModel, samples: PairedSamples) -> PairedSamples:
    """Leave out samples that are anchors of the model, on which it would score too well, with a warning."""
    if stitched.anchors is None:
        return samples
    recorded = (stitched.config.recipe or {}).get(FITTED)
    paired = [] if recorded is None else [AnchorSet((), "", contents=ContentSketch.from_dict(recorded))]
    sides = [samples.a, samples.b] if samples.differ else [samples.a]
    places = {place for side in sides for anchors in (stitched.anchors, *paired) for place in anchors.among(side)}
    if not places:
        return samples
    if len(places) == len(samples):
        raise ValueError(
            f"all {len(samples)} samples are anchors, so that none is left to score on: take the anchors from other "
            "samples, or fewer"
        )
    warn(
        f"{len(places)} of {len(samples)} samples are anchors, the first is {samples.a.ids[min(places)]!r}: they are "
        "left out of the scores, which would be too good"
    )
    return samples.select(place for place in range(len(samples)) if place not in places)


def _warn_of_other_activations(stitched: StitchedModel, samples: Samples) -> None:
    """Warn if the encoder's activations on the samples are unlike the stored ones on the anchors.

    An encoder is recognised by its weights, config and processor. This does not tell how tensors were preprocessed
    before they were passed.
    """
    source, layer = stitched.config.source, stitched.stitch
    if stitched.anchors is None or source is None or stitched.has_changed("source") or len(samples) < 2:
        return
    place = ModelReference.from_dict(source["reference"]), source["cut"]["layer"], layer.pooling
    if not stitched.anchors.has(*place):
        return
    known = stitched.anchors.values(*place).cpu().double()
    some = samples.select(sorted({i * (len(samples) - 1) // (PROBE - 1) for i in range(PROBE)}))
    batch = next(some.batches(len(some)))
    with torch.no_grad(), evaluating(stitched):
        inputs = {name: value.to(stitched.device) for name, value in stitched.preprocess(batch.samples).items()}
        rows = source_positions(stitched.source(**inputs), layer.source, layer.target, layer.pooling)
    seen = rows.to(known)
    spread = known.var(0).sum().sqrt()
    away = float((seen.mean(0) - known.mean(0)).norm() / spread)
    noise = math.sqrt(1 / len(seen) + 1 / len(known))
    if away > max(APART, 2 * noise):
        warn(
            f"the encoder's activations on these samples are unlike those on its anchors (their means are {away:.2f} "
            f"standard deviations apart, about {noise:.2f} by chance), and the scores may be low: check that both were "
            "preprocessed in the same way (range of pixels, normalisation) and are of one kind"
        )
