"""Checks of job arguments: networks, their layers, and held-out samples."""

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
"""Number of evenly spaced samples for the comparison of activations with the anchors."""
APART = 0.35
"""Threshold on the distance of means, in standard deviations of the anchors, for samples unlike the anchors. On two
ResNets and four networks of another kind, other images of the same data were below .2; images of 0 to 1 instead of
normalised ones, and images of another dataset, were above .5."""


class Runnable(Loadable):
    """Networks that a job can run, unlike saved activations."""

    def hint(self, value: Any) -> str:
        """Return advice for saved activations."""
        if isinstance(value, Activations):
            return (
                "a stitched model runs both networks. To fit a map to saved activations, use a matcher, for example "
                "hf_stitch.registries.matchers.build('ridge').fit(moments) with moments = hf_stitch.Moments(dx, "
                "dy).update(x, y); hf_stitch.compare takes Activations"
            )
        return super().hint(value)


Runs = Annotated[str | nn.Module | Adapter, Runnable()]


def named_networks(networks: Mapping[str, T] | Iterable[T]) -> dict[str, T]:
    """Return several networks by name."""
    if isinstance(networks, nn.Module):  # a Sequential is also a list
        raise TypeError(f"networks must be several networks, got a single {type(networks).__name__}; pass [network]")
    by_name = (
        dict(networks) if isinstance(networks, Mapping) else {str(i): network for i, network in enumerate(networks)}
    )
    if not by_name:
        raise ValueError("networks must contain at least one network, got none")
    return by_name


def named_layers(
    names: Collection[str], layers: Mapping[str, Iterable[str]] | Iterable[str] | None
) -> dict[str, tuple[str, ...]]:
    """Return the passed layers of several networks."""
    if layers is None:
        return {}
    if not isinstance(layers, Mapping):
        return dict.fromkeys(names, layer_names("layers", layers))
    if unknown := sorted(layers.keys() - names):
        raise ValueError(f"layers contains {', '.join(unknown)}, but the networks are {', '.join(names)}")
    return {name: layer_names("layers", selected) for name, selected in layers.items()}


def samples_to_score(models: Sequence[StitchedModel], data: Any, paired_data: Any) -> PairedSamples:
    """Read samples for models of one task, encode their labels, drop anchors, and warn about mismatches."""
    samples, config, task = PairedSamples.of(data, paired_data), models[0].config, task_named(models[0].task)
    samples = samples.with_first(task.numbered(samples.a, config))
    task.warn_of_labels(samples.a, config)
    for model in models:
        samples = _without_anchors(model, samples)
    for model in models:
        _warn_of_other_activations(model, samples.a)
    return samples


def fitted_share(stitched: StitchedModel, samples: Samples) -> float | None:
    """Return the share of samples that the stitching layer of a model was fitted to."""
    sketch_record = (stitched.config.recipe or {}).get(FITTED)
    return None if sketch_record is None else ContentSketch.from_dict(sketch_record).share(samples)


def check_held_out(train: Samples, test: Samples) -> None:
    """Raise an error if test samples occur among the training samples, by their content."""
    share = ContentSketch.of(train).share(test) or 0
    if share > MOST_SHARED:
        raise ValueError(
            f"{share:.1%} of test_data are also in data, so that scores would be too high; pass held-out samples, or "
            "remove test_data for a split"
        )


def _without_anchors(stitched: StitchedModel, samples: PairedSamples) -> PairedSamples:
    """Drop samples that are anchors of the model, because their scores would be too high, with a warning."""
    if stitched.anchors is None:
        return samples
    sketch_record = (stitched.config.recipe or {}).get(FITTED)
    fit_sets = [] if sketch_record is None else [AnchorSet((), "", contents=ContentSketch.from_dict(sketch_record))]
    sides = [samples.a, samples.b] if samples.differ else [samples.a]
    indices = {index for side in sides for anchors in (stitched.anchors, *fit_sets) for index in anchors.among(side)}
    if not indices:
        return samples
    if len(indices) == len(samples):
        raise ValueError(f"all {len(samples)} samples are anchors; pass further samples to score, or use fewer anchors")
    warn(
        f"{len(indices)} of {len(samples)} samples are anchors (first: {samples.a.ids[min(indices)]!r}) and are left "
        "out, because they would score too high"
    )
    return samples.select(index for index in range(len(samples)) if index not in indices)


def _warn_of_other_activations(stitched: StitchedModel, samples: Samples) -> None:
    """Warn if the encoder's activations on the samples are unlike the stored activations on the anchors.

    An encoder is identified by its weights, config and processor, which do not cover the preprocessing of passed
    tensors.
    """
    source, layer = stitched.config.source, stitched.stitch
    if stitched.anchors is None or source is None or stitched.has_changed("source") or len(samples) < 2:
        return
    space = ModelReference.from_dict(source["reference"]), source["cut"]["layer"], layer.pooling
    if not stitched.anchors.has(*space):
        return
    anchor_rows = stitched.anchors.values(*space).cpu().double()
    probe = samples.select(sorted({i * (len(samples) - 1) // (PROBE - 1) for i in range(PROBE)}))
    batch = next(probe.batches(len(probe)))
    with torch.no_grad(), evaluating(stitched):
        inputs = {name: value.to(stitched.device) for name, value in stitched.preprocess(batch.samples).items()}
        rows = source_positions(stitched.source(**inputs), layer.source, layer.target, layer.pooling)
    sample_rows = rows.to(anchor_rows)
    spread = anchor_rows.var(0).sum().sqrt()
    distance = float((sample_rows.mean(0) - anchor_rows.mean(0)).norm() / spread)
    noise = math.sqrt(1 / len(sample_rows) + 1 / len(anchor_rows))
    if distance > max(APART, 2 * noise):
        warn(
            f"the encoder's activations on these samples differ from its anchors (means {distance:.2f} standard "
            f"deviations apart, about {noise:.2f} by chance), so scores may be low; check that both are of one kind "
            "and preprocessed in the same way (range of pixels, normalisation)"
        )
