"""Trained heads with their latent space, and the encoders that :func:`hf_stitch.swap` connects to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_stitch.adapters import Adapter, load_on
from hf_stitch.adapters.checks import check_comparable
from hf_stitch.adapters.cutting.forwards import evaluating
from hf_stitch.adapters.recording import record
from hf_stitch.artefacts.joining import join, with_encoder
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Batch, Id, Samples
from hf_stitch.provenance import versions
from hf_stitch.reference import ModelReference, weights_hash
from hf_stitch.relative import AnchorSet, RelativeProjection
from hf_stitch.representation import Pooling, RepresentationSpec
from hf_stitch.running import Run
from hf_stitch.stitches import IdentityStitch, StitchingLayer
from hf_stitch.stitches.layer import POOLED, source_positions
from hf_stitch.tasks.heads import task_named, task_of

Space = tuple[ModelReference, str, Pooling]
"""Input space of a back half: network, layer and pooling."""


@dataclass(frozen=True)
class Anchors:
    """Anchors as passed: a set, and its samples if they were passed."""

    set: AnchorSet
    samples: Samples | None = None

    @classmethod
    def of(cls, anchors: Any) -> Anchors:
        """Read anchors."""
        if isinstance(anchors, AnchorSet):
            return cls(anchors)
        samples = Samples.of(anchors)
        return cls(AnchorSet.of(samples), samples)


@dataclass(frozen=True)
class Encoder:
    """A network that encodes anchors, with its cut and pooling."""

    network: Adapter
    layer: str
    pooling: Pooling
    run: Run

    @classmethod
    def of(cls, network: Any, layer: str | None, pooling: Pooling, run: Run) -> Encoder:
        """Load the network."""
        adapter = load_on(network, run.processes.device)
        if layer is None:
            raise TypeError(
                f"encoder_layer is missing: pass a layer to cut the new encoder, one of {', '.join(adapter.layers)}"
            )
        return cls(adapter, layer, pooling, run)

    @property
    def spec(self) -> RepresentationSpec:
        """Spec of the cut."""
        return self.network.spec(self.layer)

    def add(self, anchors: AnchorSet, samples: Samples | None) -> AnchorSet:
        """Return a set with the vectors of this encoder, if samples were passed."""
        if samples is None:
            return anchors
        run = self.run
        return anchors.encode(
            self.network, self.layer, samples, self.pooling, batch_size=run.batch_size, progress=run.progress
        )

    def vectors(self, anchors: AnchorSet, passed: Anchors | None, paired: Anchors | None) -> tuple[AnchorSet, Tensor]:
        """Return the anchor set of a head, extended if needed, and this encoder's vectors of the (paired) anchors."""
        if paired is not None:
            anchors.check_parallel(paired.set)
            return anchors, self.add(paired.set, paired.samples).values(self.network, self.layer, self.pooling)
        anchors = self.add(anchors, None if passed is None else passed.samples)
        return anchors, anchors.values(self.network, self.layer, self.pooling)

    def read(self, batch: Batch) -> Tensor:
        """Return the vectors of a batch."""
        return self.network.encode(self.network.preprocess(batch.samples), self.layer)[self.layer].rows(self.pooling)


@dataclass(frozen=True)
class Headed:
    """Trained head with its latent space and anchors."""

    whole: Any  # the network with its current encoder
    spec: RepresentationSpec  # of the input of the head
    space: Space | None  # of this input; None for similarities to anchors
    anchors: AnchorSet
    samples: Samples | None  # of the anchors, if they were passed
    encode: Callable[[], AnchorSet]  # returns the anchors with the vectors that enter the head
    read: Callable[[Batch], Tensor] | None  # encodes a batch, if the current encoder must encode anchors
    join: Callable[[Encoder, StitchingLayer], StitchedModel]  # puts a new encoder before the head

    @classmethod
    def of(
        cls, model: Any, layer: str | None, task: str | None, anchors: Anchors | None, new: Encoder, *, maps: bool,
        scored: bool,
    ) -> Headed:  # fmt: skip
        """Return the head of a stitched model or of a network; ``maps``: whether the caller requests a map."""
        if isinstance(model, StitchedModel):
            if layer is not None or task != "auto":
                raise TypeError("a stitched model already has a cut and a task; remove target_layer and task")
            if maps and is_relative(model):
                raise TypeError("a relative model does not use a map between encoders; remove matcher and baselines")
            return _of_model(model, anchors, new.run)
        if layer is None or anchors is None:
            raise TypeError("a network that is not a stitched model requires target_layer=… (its cut) and anchors=…")
        return _of_network(load_on(model, new.run.processes.device), layer, task, anchors, new, scored)


def _of_model(model: StitchedModel, passed: Anchors | None, run: Run) -> Headed:
    """Return the head of a stitched model; its anchors are re-encoded if its encoder has been trained since."""
    anchors, samples = _anchor_set(model.anchors, passed), None if passed is None else passed.samples
    space = None if is_relative(model) else _recorded_space(model)
    source: Any = model.config.source
    trained = False
    if space is not None and isinstance(model.stitch.body, IdentityStitch):  # an absolute model
        current = ModelReference.from_dict(source["reference"]), source["cut"]["layer"], model.stitch.pooling
        trained = current == (space[0].public, *space[1:]) and model.has_changed("source")
    if trained:
        reference = ModelReference(None, source["reference"]["library"], weights_hash=weights_hash(model.source))
        space = reference, source["cut"]["layer"], model.stitch.pooling

    def read(batch: Batch) -> Tensor:
        inputs = {name: value.to(model.device) for name, value in model.preprocess(batch.samples).items()}
        layer = model.stitch
        with evaluating(model):
            return source_positions(model.source(**inputs), layer.source, layer.target, layer.pooling)

    def encode() -> AnchorSet:
        if space is None or not trained or anchors.has(*space):
            return anchors
        if samples is None:
            raise ValueError(
                "the encoder of this absolute model has changed since its anchors were encoded, so the stored vectors "
                "are outdated; pass the anchors as samples, anchors=…"
            )
        vectors = record(
            samples, run, "encoding anchors", lambda batch: {"": read(batch)}, "the vectors of the anchors",
            "use fewer anchors",
        )  # fmt: skip
        return anchors.add(vectors[""], *space)

    return Headed(
        model, model.stitch.target, space, anchors, samples, encode, read if trained else None,
        lambda new, layer: with_encoder(model, new.network, new.layer, layer),
    )  # fmt: skip


def _of_network(network: Adapter, layer: str, task: str | None, anchors: Anchors, new: Encoder, scored: bool) -> Headed:
    check_comparable(new.network, network, new.pooling)
    task = network.task if task == "auto" and not scored else task_of(network, task)
    if task_named(task).per_token:
        raise ValueError(
            f"task={task!r} is not supported: an anchor is a single vector, but the model has predictions for each "
            "token; use hf_stitch.stitch(…, matcher='inverse_relative')"
        )
    encoder = Encoder(network, layer, _target_rows(network.spec(layer), new.pooling), new.run)
    return Headed(
        network, encoder.spec, (network.pinned, layer, encoder.pooling), anchors.set, anchors.samples,
        lambda: encoder.add(anchors.set, anchors.samples), encoder.read,
        lambda new, stitch: join(new.network, new.layer, stitch, network, layer, task=task),
    )  # fmt: skip


def is_relative(model: Any) -> bool:
    """Return whether a model is a stitched model with a relative projection."""
    return isinstance(model, StitchedModel) and isinstance(model.stitch.body, RelativeProjection)


def pooling_of(model: Any) -> Pooling:
    """Return the pooling of a stitched model, or the mean for any other network."""
    return model.stitch.pooling if isinstance(model, StitchedModel) else "mean"


def projected(
    model: Any, spec: RepresentationSpec, pooling: Pooling, vectors: Tensor, ids: Sequence[Id]
) -> StitchingLayer:
    """Return the stitching layer of a relative model with the anchors of another encoder."""
    body, mean = model.stitch.body.with_anchors(vectors, ids), model.stitch.body_mean
    return StitchingLayer(spec, model.stitch.target, pooling, body, means={"body": mean}).eval()


def between(model: Any, encoder: Any) -> StitchedModel:
    """Join the head of one relative model with the front half and the encoded anchors of another."""
    if not (is_relative(model) and is_relative(encoder)):
        raise TypeError("a stitched model can only be the encoder if both models are relative models")
    if model.anchors is not None and encoder.anchors is not None:
        model.anchors.check_same(encoder.anchors)
    a, b = ({**side.stitch.body.config(), "in_features": None, "dtype": None} for side in (model, encoder))
    if a != b:  # the configs of the projections
        different = ", ".join(f"{key} {a[key]!r} and {b[key]!r}" for key in a if a[key] != b[key])
        raise ValueError(f"the projections of the two models differ: {different}; build both with the same options")
    vectors: Any = encoder.stitch.body.anchors
    ids = next((side.anchors.ids for side in (model, encoder) if side.anchors is not None), range(len(vectors)))
    layer = projected(model, encoder.stitch.source, encoder.stitch.pooling, vectors, ids)
    swapped = with_encoder(model, encoder, "", layer)
    swapped.anchors = model.anchors
    swapped.config.recipe = {**(swapped.config.recipe or {}), "pooling": encoder.stitch.pooling, "versions": versions()}
    return swapped


def as_space(reference: ModelReference, layer: str, pooling: Pooling) -> dict[str, Any]:
    """Return the input space of a back half as JSON values for its recipe."""
    return {"reference": reference.public.to_dict(), "layer": layer, "pooling": pooling}


def _recorded_space(model: StitchedModel) -> Space:
    space_record = (model.config.recipe or {}).get("space")
    if space_record is None:
        raise ValueError(
            "this stitched model is not a relative model and does not record the input space of its back half; swap "
            "its target network instead, swap(target, target_layer=…, …)"
        )
    return ModelReference.from_dict(space_record["reference"]), space_record["layer"], space_record["pooling"]


def _anchor_set(stored: AnchorSet | None, passed: Anchors | None) -> AnchorSet:
    """Return the model's anchor set, after a check that passed anchors are the same."""
    if passed is not None:
        return passed.set if stored is None else stored.merge(passed.set)
    if stored is None:
        raise ValueError("this model does not store anchors: pass its original anchors, anchors=…")
    return stored


def _target_rows(spec: RepresentationSpec, pooling: Pooling) -> Pooling:
    """Return the pooling of the target's vectors that a pooled stitching layer replaces.

    With prefix tokens this is ``cls``: the layer outputs a single token, which a head reads as its CLS token.
    """
    if pooling == "flatten" and spec.prefix_tokens:
        raise ValueError("pooling='flatten' does not provide the target's CLS token: use 'mean' or 'cls'")
    if pooling not in POOLED:
        return pooling
    if spec.prefix_tokens:
        return "cls"
    return "mean" if spec.layout != "bnd" or spec.grid is not None else pooling
