"""What jobs take: networks, their layers, and samples that are others than those to which something was fitted."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import torch
from torch import nn

from hf_stitch.adapters import Adapter
from hf_stitch.adapters.checks import layer_names
from hf_stitch.adapters.cutting.forwards import evaluating
from hf_stitch.adapters.loading import Loadable
from hf_stitch.analysis.activations import Activations
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import PairedSamples, Samples
from hf_stitch.data.overlap import FITTED, MOST_SHARED, ContentSketch
from hf_stitch.printing import warn
from hf_stitch.reference import ModelReference
from hf_stitch.relative import AnchorSet
from hf_stitch.stitches.layer import source_positions
from hf_stitch.tasks.heads import task_named

T = TypeVar("T")

Named = str | Mapping[str, Any]
"""A method of a registry, by its name or its record."""
PROBE = 64
"""Number of samples, evenly spaced, whose activations are compared with those of the anchors."""
APART = 0.35
"""Distance of the means, in standard deviations of the anchors, above which samples are unlike them. On two ResNets and
four networks of another kind, other images of the same data were below .2; images of 0 to 1 instead of normalised ones,
and images of another data set, were above .5."""


class Runnable(Loadable):
    """Networks that a job runs, which saved activations are not."""

    def hint(self, value: Any) -> str:
        """Say what to do with saved activations."""
        if isinstance(value, Activations):
            return (
                "a stitched model runs both networks. To fit a map of saved activations, use a matcher, for example "
                "hf_stitch.registries.matchers.build('ridge').fit(moments) with moments = hf_stitch.Moments(dx, "
                "dy).update(x, y); hf_stitch.compare takes Activations"
            )
        return super().hint(value)


Runs = Annotated[str | nn.Module | Adapter, Runnable()]


def named_networks(networks: Mapping[str, T] | Iterable[T]) -> dict[str, T]:
    """Return several networks by name."""
    if isinstance(networks, nn.Module):  # a Sequential is also a list
        raise TypeError(f"networks must be several networks, got a single {type(networks).__name__}; write [network]")
    named = dict(networks) if isinstance(networks, Mapping) else {str(i): each for i, each in enumerate(networks)}
    if not named:
        raise ValueError("networks must contain at least one network, got none")
    return named


def named_layers(
    names: Collection[str], layers: Mapping[str, Iterable[str]] | Iterable[str] | None
) -> dict[str, tuple[str, ...]]:
    """Return the layers of several networks, as far as they are given."""
    if layers is None:
        return {}
    if not isinstance(layers, Mapping):
        return dict.fromkeys(names, layer_names("layers", layers))
    if unknown := sorted(layers.keys() - names):
        raise ValueError(f"layers names {', '.join(unknown)}, but the networks are {', '.join(names)}")
    return {name: layer_names("layers", own) for name, own in layers.items()}


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
