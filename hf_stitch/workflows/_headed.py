"""A trained head with the space that enters it, and the encoders that :func:`hf_stitch.swap` puts before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_stitch.adapters import Adapter, load_on
from hf_stitch.adapters.checks import check_meet
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
"""The latent space that enters a back half: network, layer and pooling."""


@dataclass(frozen=True)
class Anchors:
    """Anchors as they are given: a set, and the samples of which it was made, if these are given."""

    set: AnchorSet
    samples: Samples | None = None

    @classmethod
    def of(cls, given: Any) -> Anchors:
        """Read anchors."""
        if isinstance(given, AnchorSet):
            return cls(given)
        samples = Samples.of(given)
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
                "encoder_layer is missing: pass the layer at which the new encoder is cut, one of "
                f"{', '.join(adapter.layers)}"
            )
        return cls(adapter, layer, pooling, run)

    @property
    def spec(self) -> RepresentationSpec:
        """Spec of the cut."""
        return self.network.spec(self.layer)

    def add(self, own: AnchorSet, samples: Samples | None) -> AnchorSet:
        """Return a set with the vectors of this encoder, if there are samples to encode."""
        if samples is None:
            return own
        run = self.run
        return own.encode(
            self.network, self.layer, samples, self.pooling, batch_size=run.batch_size, progress=run.progress
        )

    def vectors(self, own: AnchorSet, given: Anchors | None, paired: Anchors | None) -> tuple[AnchorSet, Tensor]:
        """Return the anchor set of a head, extended if needed, and this encoder's vectors of the (paired) anchors."""
        if paired is not None:
            own.check_parallel(paired.set)
            return own, self.add(paired.set, paired.samples).values(self.network, self.layer, self.pooling)
        own = self.add(own, None if given is None else given.samples)
        return own, own.values(self.network, self.layer, self.pooling)

    def read(self, batch: Batch) -> Tensor:
        """Return the vectors of a batch."""
        return self.network.encode(self.network.preprocess(batch.samples), self.layer)[self.layer].rows(self.pooling)


@dataclass(frozen=True)
class Headed:
    """A trained head with what enters it."""

    whole: Any  # the network with its current encoder
    spec: RepresentationSpec  # of what the head receives
    space: Space | None  # of what it receives; None for similarities to anchors
    anchors: AnchorSet
    samples: Samples | None  # of the anchors, if they are given
    encode: Callable[[], AnchorSet]  # returns the anchors with the vectors that enter the head
    read: Callable[[Batch], Tensor] | None  # encodes a batch, if the current encoder has to encode anchors
    join: Callable[[Encoder, StitchingLayer], StitchedModel]  # puts a new encoder before the head

    @classmethod
    def of(
        cls, model: Any, layer: str | None, task: str | None, given: Anchors | None, new: Encoder, *, maps: bool,
        scored: bool,
    ) -> Headed:  # fmt: skip
        """Return the head of a stitched model or of a network; ``maps``: whether a map is asked for."""
        if isinstance(model, StitchedModel):
            if layer is not None or task != "auto":
                raise TypeError("a stitched model is already cut and has a head: leave out target_layer and task")
            if maps and is_relative(model):
                raise TypeError("a relative model needs no map between encoders: leave out matcher and baselines")
            return _of_model(model, given, new.run)
        if layer is None or given is None:
            raise TypeError("a network that is not a stitched model needs target_layer=… (its cut) and anchors=…")
        return _of_network(load_on(model, new.run.processes.device), layer, task, given, new, scored)


def _of_model(model: StitchedModel, given: Anchors | None, run: Run) -> Headed:
    """Return the head of a stitched model, whose anchors are encoded anew if its own encoder has been trained since."""
    anchors, samples = _own(model.anchors, given), None if given is None else given.samples
    space = None if is_relative(model) else _recorded_space(model)
    source: Any = model.config.source
    trained = False
    if space is not None and isinstance(model.stitch.body, IdentityStitch):  # an absolute model
        own = ModelReference.from_dict(source["reference"]), source["cut"]["layer"], model.stitch.pooling
        trained = own == (space[0].public, *space[1:]) and model.has_changed("source")
    if trained:
        now = ModelReference(None, source["reference"]["library"], weights_hash=weights_hash(model.source))
        space = now, source["cut"]["layer"], model.stitch.pooling

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
                "no longer fit its head: pass the anchors as samples, anchors=…"
            )
        found = record(
            samples, run, "encoding anchors", lambda batch: {"": read(batch)}, "the vectors of the anchors",
            "use fewer anchors",
        )  # fmt: skip
        return anchors.add(found[""], *space)

    return Headed(
        model, model.stitch.target, space, anchors, samples, encode, read if trained else None,
        lambda new, layer: with_encoder(model, new.network, new.layer, layer),
    )  # fmt: skip


def _of_network(network: Adapter, layer: str, task: str | None, given: Anchors, new: Encoder, scored: bool) -> Headed:
    check_meet(new.network, network, new.pooling)
    task = network.task if task == "auto" and not scored else task_of(network, task)
    if task_named(task).per_token:
        raise ValueError(
            f"task={task!r} is not supported: an anchor is a single vector, but the model predicts something at each "
            "token; use hf_stitch.stitch(…, matcher='inverse_relative')"
        )
    own = Encoder(network, layer, _target_rows(network.spec(layer), new.pooling), new.run)
    return Headed(
        network, own.spec, (network.pinned, layer, own.pooling), given.set, given.samples,
        lambda: own.add(given.set, given.samples), own.read,
        lambda new, stitch: join(new.network, new.layer, stitch, network, layer, task=task),
    )  # fmt: skip


def is_relative(model: Any) -> bool:
    """Whether a model is a stitched model whose head reads similarities to anchors."""
    return isinstance(model, StitchedModel) and isinstance(model.stitch.body, RelativeProjection)


def pooling_of(model: Any) -> Pooling:
    """Return the pooling of a stitched model, and the mean for any other network."""
    return model.stitch.pooling if isinstance(model, StitchedModel) else "mean"


def projected(
    model: Any, spec: RepresentationSpec, pooling: Pooling, vectors: Tensor, ids: Sequence[Id]
) -> StitchingLayer:
    """Return the stitching layer of a relative model, whose anchors are encoded by another encoder."""
    body, mean = model.stitch.body.with_anchors(vectors, ids), model.stitch.body_mean
    return StitchingLayer(spec, model.stitch.target, pooling, body, means={"body": mean}).eval()


def between(model: Any, other: Any) -> StitchedModel:
    """Join the head of one relative model with the front half and the encoded anchors of another."""
    if not (is_relative(model) and is_relative(other)):
        raise TypeError("a stitched model can be the encoder only if it and the model are both relative models")
    if model.anchors is not None and other.anchors is not None:
        model.anchors.check_same(other.anchors)
    own, its = ({**each.stitch.body.config(), "in_features": None, "dtype": None} for each in (model, other))
    if own != its:
        different = ", ".join(f"{key} {own[key]!r} and {its[key]!r}" for key in own if own[key] != its[key])
        raise ValueError(f"the projections of the two models differ: {different}; build both with the same options")
    vectors: Any = other.stitch.body.anchors
    ids = next((each.anchors.ids for each in (model, other) if each.anchors is not None), range(len(vectors)))
    joint = projected(model, other.stitch.source, other.stitch.pooling, vectors, ids)
    swapped = with_encoder(model, other, "", joint)
    swapped.anchors = model.anchors
    swapped.config.recipe = {**(swapped.config.recipe or {}), "pooling": other.stitch.pooling, "versions": versions()}
    return swapped


def as_space(reference: ModelReference, layer: str, pooling: Pooling) -> dict[str, Any]:
    """Return the latent space that enters a back half, as JSON values for its recipe."""
    return {"reference": reference.public.to_dict(), "layer": layer, "pooling": pooling}


def _recorded_space(model: StitchedModel) -> Space:
    recorded = (model.config.recipe or {}).get("space")
    if recorded is None:
        raise ValueError(
            "this stitched model is not a relative model and does not record which network's activations enter its "
            "back half: swap its target network instead, swap(target, target_layer=…, …)"
        )
    return ModelReference.from_dict(recorded["reference"]), recorded["layer"], recorded["pooling"]


def _own(kept: AnchorSet | None, given: Anchors | None) -> AnchorSet:
    """Return the model's anchor set, after a check that the given anchors are the same."""
    if given is not None:
        return given.set if kept is None else kept.merge(given.set)
    if kept is None:
        raise ValueError("this model has no anchors: pass those with which it was made, anchors=…")
    return kept


def _target_rows(spec: RepresentationSpec, pooling: Pooling) -> Pooling:
    """Return the pooling of the target's vectors that a pooled stitching layer replaces.

    With prefix tokens this is ``cls``, because the single token that the layer outputs is where a head reads its CLS
    token.
    """
    if pooling == "flatten" and spec.prefix_tokens:
        raise ValueError("pooling='flatten' leaves nothing for the target's CLS token: use 'mean' or 'cls'")
    if pooling not in POOLED:
        return pooling
    if spec.prefix_tokens:
        return "cls"
    return "mean" if spec.layout != "bnd" or spec.grid is not None else pooling
