"""Exchange of the encoder of a trained head without training, from anchors alone: :func:`swap`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from hf_stitch.adapters import Adapter, load_on
from hf_stitch.adapters.compatibility import check_meet
from hf_stitch.adapters.cutting.modes import evaluating
from hf_stitch.artefacts.joining import join, with_encoder
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Id, Samples
from hf_stitch.data.overlap import FITTED, ContentSketch
from hf_stitch.matchers import Matcher
from hf_stitch.pairs import CollectedParts
from hf_stitch.provenance import versions
from hf_stitch.reference import ModelReference, weights_hash
from hf_stitch.registry import check_choice, check_name, registries
from hf_stitch.relative import AnchorSet, RelativeProjection
from hf_stitch.representation import POOLINGS, Pooling, Representation, RepresentationSpec
from hf_stitch.running import Run, RunOptions
from hf_stitch.statistics import Features, Moments
from hf_stitch.stitches import IdentityStitch, StitchingLayer
from hf_stitch.stitches.layer import POOLED, source_positions
from hf_stitch.tasks.heads import check_head, logits_of, task_of
from hf_stitch.tasks.kinds import task_named
from hf_stitch.tasks.vectors import tensor_of
from hf_stitch.workflows._evaluate import evaluate
from hf_stitch.workflows._networks import check_runs

AUTO = "auto"
CHOICES: dict[str, dict[str, Any]] = {"procrustes": {"scale": True}, "ridge": {}, "identity": {}}
"""Matchers among which ``auto`` chooses, with their options; the first of those that tie."""
FOLDS = 5
BASELINES = ("inverse_relative",)
_Side = Samples | AnchorSet | None
_Space = tuple[ModelReference, str, Pooling]
"""The latent space that enters a back half: network, layer and pooling."""


def swap(
    model: str | nn.Module | Adapter | StitchedModel,
    encoder: str | nn.Module | Adapter | StitchedModel,
    anchors: Any = None,
    *,
    encoder_layer: str | None = None,
    paired_anchors: Any = None,
    target_layer: str | None = None,
    pooling: Pooling | None = None,
    matcher: str | Matcher = AUTO,
    baselines: Sequence[str | Matcher] | None = None,
    data: Any = None,
    paired_data: Any = None,
    task: str | None = "auto",
    **options: Unpack[RunOptions],
) -> StitchedModel:
    """Replace the encoder of a trained head without training, from the activations of both encoders on the anchors.

    What is exchanged depends on ``model``:

    - A relative model (:func:`hf_stitch.relative_model`) keeps its projection; the anchors are replaced by their
      encoding by the new encoder (:meth:`~hf_stitch.relative.RelativeProjection.with_anchors`).
    - In any other network, the new encoder and a map replace everything up to ``target_layer``. ``matcher`` fits the
      map on the anchors alone. The same holds for an absolute model and for a model that was swapped in this way
      before. If the encoder of an absolute model was trained together with its head, pass the anchors as samples: its
      encoder has to encode them again.

    By default (``auto``), the head chooses the map: the orthogonal one (``procrustes`` with ``scale=True``, the direct
    translation of Maiorca et al. 2023), that of ``ridge``, or none (``identity``, for equal widths). No single one is
    best everywhere, and the error of the mapped vectors does not tell which is (docs/results/swapping.md). Each is
    fitted without a fifth of the anchors in turn, and the one is taken with which the outputs of the head on the
    anchors held out change least (sum of squares; no labels are needed), fitted on all anchors. Of fewer than five
    anchors each is held out alone. With two, and on a tie, the first named is taken. The result shows the errors,
    relative to the variation of the outputs (``config.recipe["held_out_errors"]``).

    Args:
        model: The trained head with its current encoder: a stitched model, or a network (an adapter, a module, or a
            name for :func:`hf_stitch.load`).
        encoder: The new encoder: an adapter, a module (also a stitched model), or a name. For a relative model this can
            also be another relative model with the same anchors; then its front half and its encoded anchors are used
            in their current state, including any end-to-end training.
        anchors: The anchors: raw samples, in any form that :meth:`hf_stitch.Samples.of` accepts, or an
            :class:`~hf_stitch.relative.AnchorSet`. A stitched model already keeps its anchors and checks that these are
            the same. They can be left out if its anchor set contains the encoding by the new encoder, or with
            ``paired_anchors``.
        encoder_layer: The layer at which the new encoder is cut. Required unless it is a relative model.
        paired_anchors: The anchors for the new encoder, if it takes other samples (translations of the anchors): raw
            samples with the same ids in the same order as the anchors, or an anchor set of such samples.
        target_layer: The layer at which ``model`` is cut. Required for a network, not allowed for a stitched model.
        pooling: Which vector of the new encoder represents a sample: ``mean``, ``cls``, ``last`` or ``flatten``.
            Default: the pooling of the stitched model, or ``mean`` for a network.
        matcher: The method that fits the map: ``auto``, a name in ``hf_stitch.registries.matchers`` or a matcher
            object. Not allowed for a relative model, which needs no map.
        baselines: Further matchers to score for comparison. Default: ``inverse_relative``.
        data: Raw samples to score the result on, in the form that the new encoder takes. Classifiers need labels for
            all figures except agreement. Default: no scores.
        paired_data: The same samples in the form that the current encoder takes, if it differs (another language).
        task: Task of the head of a network. ``"auto"`` takes the task of the network. Not allowed for a stitched model.
        **options: Options of the run (:class:`hf_stitch.running.RunOptions`): ``batch_size``, ``seed``, ``progress``.

    Returns:
        The stitched model with the new encoder. With ``data``, its ``evaluation`` attribute holds the scores
        (:func:`hf_stitch.evaluate`), in which ``target`` is the original model. Its ``anchors`` attribute holds the
        anchor set.

    Raises:
        NotACutError: If a network cannot be cut at the given layer.
        ValueError: If the anchors are too few or too many, differ from those of the model or are in another order, do
            not correspond to ``paired_anchors``, are encoded with another layer or pooling, have equal or constant
            activations, or leave the similarity undefined (zero vectors for ``cosine``; no basis for
            ``change_of_basis``); or if labels are not classes of the model. All of this is checked before ``data`` are
            read. If some of ``data`` are anchors.
        TypeError: If a required argument is missing, or an argument does not apply to this kind of model.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Linear, Sequential, Tanh
        >>> a = Sequential(Linear(4, 8), Tanh())
        >>> b = Sequential(Linear(4, 8), Tanh(), Linear(8, 8, bias=False))
        >>> _ = b[0].load_state_dict(a[0].state_dict()), torch.nn.init.orthogonal_(b[2].weight)
        >>> a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in (a, b))
        >>> anchors = hf_stitch.Samples.of(torch.randn(30, 4))
        >>> model = hf_stitch.relative_model(a, anchors, layer="1", num_labels=3)
        >>> swapped = hf_stitch.swap(model, b, anchors, encoder_layer="2")
        >>> x = torch.randn(5, 4)
        >>> torch.allclose(swapped(input=x).logits, model(input=x).logits, atol=1e-5)
        True
    """
    check_choice("pooling", pooling, (None, *POOLINGS))
    layers = {"encoder_layer": encoder_layer, "target_layer": target_layer}
    check_name(**{name: layer for name, layer in layers.items() if layer is not None})
    with Run.of(swap, options, ("batch_size", "seed", "progress")) as run:
        processes = run.processes
        check_runs(model=model, encoder=encoder)
        if isinstance(encoder, StitchedModel) and isinstance(encoder.stitch.body, RelativeProjection):
            if any(
                each is not None for each in (encoder_layer, anchors, paired_anchors, target_layer, pooling, baselines)
            ) or (matcher, task) != (AUTO, "auto"):
                raise TypeError(
                    "a swap between two relative models takes only data and paired_data: leave out the others"
                )
            swapped = _between(model, encoder)
            return _scored(swapped, data, model, {}, paired_data, run)
        if encoder_layer is None:
            raise TypeError(
                "encoder_layer is missing: pass the layer at which the new encoder is cut, one of "
                f"{', '.join(load_on(encoder, processes.device).layers)}"
            )
        anchors, paired_anchors = (
            side if side is None or isinstance(side, AnchorSet) else Samples.of(side)
            for side in (anchors, paired_anchors)
        )
        stitched = model if isinstance(model, StitchedModel) else None
        new = _Encoder(
            load_on(encoder, processes.device),
            encoder_layer,
            pooling or (stitched.stitch.pooling if stitched else "mean"),
            run,
        )
        if stitched is not None:
            if target_layer is not None or task != "auto":
                raise TypeError("a stitched model is already cut and has a head: leave out target_layer and task")
            if isinstance(stitched.stitch.body, RelativeProjection) and (matcher != AUTO or baselines is not None):
                raise TypeError("a relative model needs no map between encoders: leave out matcher and baselines")
            head = _head_of_model(stitched, anchors, run)
        else:
            if target_layer is None or anchors is None:
                raise TypeError("a network that is not a stitched model needs target_layer=… (its cut) and anchors=…")
            original = load_on(model, processes.device)
            task = _task(original, new, task, scored=data is not None)
            head = _head_of_network(original, target_layer, anchors, new)
        own, space, spec = head.anchors, head.space, head.spec

        entering = None if space is None else own.values(*space)
        own, vectors = new.encode(own, anchors, paired_anchors)
        if entering is None:
            assert stitched is not None
            joint, others = _relative(stitched.stitch, new.spec, new.pooling, vectors, own.ids), {}
        else:
            candidates = choices(vectors, entering) if matcher == AUTO else {"": registries.matchers.build(matcher)}
            found_by = next(iter(candidates.values()))
            joint = _fitted(found_by, new, spec, vectors, entering)
            names = BASELINES if baselines is None else baselines
            others = {str(each): _fitted(each, new, spec, vectors, entering) for each in names}
        if stitched is not None:
            swapped = with_encoder(stitched, new.network, encoder_layer, joint)
        else:
            assert target_layer is not None
            swapped = join(new.network, encoder_layer, joint, original, target_layer, task=task)
        swapped.anchors = own
        swapped.config.recipe = _recipe(own, anchors, paired_anchors, new)
        if entering is not None:
            errors: dict[str, float] = {}
            if matcher == AUTO:
                errors = held_out_errors(candidates, vectors, entering, _outputs(swapped, run.batch_size))
            if errors and (chosen := candidates[min(errors, key=errors.__getitem__)]) is not found_by:
                found_by, joint = chosen, _fitted(chosen, new, spec, vectors, entering)
                swapped.stitch, swapped.config.stitch = joint, joint.to_dict()
            if (r2 := float((joint.body.fitted or {}).get("r2", 0))) < 0:
                warnings.warn(
                    f"the map is worse than the mean of the anchors (R² {r2:.2f}), so the swapped model may have lost "
                    f"the input: use more anchors{'' if matcher == AUTO else ', or leave out matcher='}",
                    stacklevel=2,
                )
            assert space is not None
            used = versions([("matchers", found_by.name)] if found_by.name in registries.matchers else ())
            swapped.config.recipe |= {"matcher": found_by.to_dict(), "space": as_space(*space), "versions": used}
            if errors:
                swapped.config.recipe["held_out_errors"] = {k: float(f"{error:.4g}") for k, error in errors.items()}
        whole = original if stitched is None else stitched
        return _scored(swapped, data, whole, others, paired_data, run)


def _scored(
    swapped: StitchedModel,
    data: Any,
    original: Any,
    baselines: dict[str, StitchingLayer],
    paired_data: Any,
    run: Run,
) -> StitchedModel:
    """Return the model, scored if there are data."""
    if data is None:
        return swapped
    samples = Samples.of(data)
    _rehearse(swapped, samples)

    evaluation = evaluate(
        swapped,
        samples,
        target=original,
        paired_data=paired_data,
        baselines=baselines,
        **run.options,
    )
    swapped.keep_scores(evaluation)
    swapped.config.recipe["test_data"] = evaluation.data
    return swapped


def _between(model: Any, other: StitchedModel) -> StitchedModel:
    """Join the head of one relative model with the front half and the encoded anchors of another."""
    for each in (model, other):
        if not (isinstance(each, StitchedModel) and isinstance(each.stitch.body, RelativeProjection)):
            raise TypeError("a stitched model can be the encoder only if it and the model are both relative models")
    if model.anchors is not None and other.anchors is not None:
        model.anchors.check_same(other.anchors)
    own, its = ({**each.stitch.body.config(), "in_features": None, "dtype": None} for each in (model, other))
    if own != its:
        different = ", ".join(f"{key} {own[key]!r} and {its[key]!r}" for key in own if own[key] != its[key])
        raise ValueError(f"the projections of the two models differ: {different}; build both with the same options")
    anchors: Any = other.stitch.body.anchors
    ids = next((each.anchors.ids for each in (model, other) if each.anchors is not None), range(len(anchors)))
    joint = _relative(model.stitch, other.stitch.source, other.stitch.pooling, anchors, ids)
    swapped = with_encoder(model, other, "", joint)
    swapped.anchors = model.anchors
    swapped.config.recipe = {**(swapped.config.recipe or {}), "pooling": other.stitch.pooling, "versions": versions()}
    return swapped


@dataclass(frozen=True)
class _Encoder:
    """The new encoder with its cut and pooling."""

    network: Adapter
    layer: str
    pooling: Pooling
    run: Run

    @property
    def spec(self) -> RepresentationSpec:
        return self.network.spec(self.layer)

    def encode(self, own: AnchorSet, given: _Side, paired_anchors: _Side) -> tuple[AnchorSet, Tensor]:
        """Return the model's anchor set, extended if needed, and this encoder's vectors of the (paired) anchors."""
        if paired_anchors is not None:
            own.check_parallel(paired_anchors)
            side = (
                paired_anchors
                if isinstance(paired_anchors, AnchorSet)
                else self._encode(AnchorSet.of(paired_anchors), paired_anchors)
            )
            return own, side.values(self.network, self.layer, self.pooling)
        if isinstance(given, Samples):
            own = self._encode(own, given)
        return own, own.values(self.network, self.layer, self.pooling)

    def _encode(self, anchors: AnchorSet, samples: Samples) -> AnchorSet:
        return anchors.encode(
            self.network, self.layer, samples, self.pooling, batch_size=self.run.batch_size, progress=self.run.progress
        )


@dataclass(frozen=True)
class _Head:
    """What a trained head receives: the shape, the latent space (``None`` for a relative model), and its anchors."""

    spec: RepresentationSpec
    space: _Space | None
    anchors: AnchorSet


def _head_of_model(stitched: StitchedModel, anchors: _Side, run: Run) -> _Head:
    """Return the head of a stitched model, with its anchors encoded anew if its own encoder has been trained since."""
    space, own = _space(stitched), _own(stitched.anchors, anchors)
    if space is not None and _moved(stitched, space):
        space = _space_now(stitched)
        if not own.has(*space):
            own = own.add(_seen_by(stitched, anchors, run), *space)
    return _Head(stitched.stitch.target, space, own)


def _head_of_network(network: Adapter, layer: str, anchors: _Side, new: _Encoder) -> _Head:
    """Return the head of a whole network, with the anchors that it encodes, if these are samples."""
    spec = network.spec(layer)
    space = (network.pinned, layer, _target_rows(spec, new.pooling))
    own = _own(None, anchors)
    if isinstance(anchors, Samples):
        own = own.encode(network, layer, anchors, space[2], batch_size=new.run.batch_size, progress=new.run.progress)
    return _Head(spec, space, own)


def _recipe(own: AnchorSet, anchors: _Side, paired_anchors: _Side, new: _Encoder) -> dict[str, Any]:
    """Return the recipe that all swaps have in common, as JSON values."""
    recipe: dict[str, Any] = {"pooling": new.pooling, "anchors": own.fingerprint, "samples": len(own)}
    if isinstance(seen := anchors if paired_anchors is None else paired_anchors, Samples):
        recipe[FITTED] = ContentSketch.of(seen).to_dict()
    if paired_anchors is not None:
        recipe["paired_anchors"] = paired_anchors.fingerprint
    return {**recipe, "batch_size": new.run.batch_size, "versions": versions()}


def as_space(reference: ModelReference, layer: str, pooling: Pooling) -> dict[str, Any]:
    """Return the latent space that enters a back half, as JSON values for its recipe."""
    return {"reference": reference.public.to_dict(), "layer": layer, "pooling": pooling}


def _space(model: StitchedModel) -> _Space | None:
    """Return the latent space that enters a stitched model's back half; ``None`` for a relative model."""
    if isinstance(model.stitch.body, RelativeProjection):
        return None
    recorded = (model.config.recipe or {}).get("space")
    if recorded is None:
        raise ValueError(
            "this stitched model is not a relative model and does not record which network's activations enter its "
            "back half: swap its target network instead, swap(target, target_layer=…, …)"
        )
    return ModelReference.from_dict(recorded["reference"]), recorded["layer"], recorded["pooling"]


def _moved(model: StitchedModel, space: _Space) -> bool:
    """Return whether the space is that of the model's own front half, which has been trained since."""
    source: Any = model.config.source
    own = ModelReference.from_dict(source["reference"]), source["cut"]["layer"], model.stitch.pooling
    absolute = own == (space[0].public, *space[1:]) and isinstance(model.stitch.body, IdentityStitch)
    return absolute and model.has_changed("source")


def _space_now(model: StitchedModel) -> _Space:
    """Return the space of an absolute model's front half now: an unnamed network, identified by its weights."""
    source: Any = model.config.source
    now = ModelReference(None, source["reference"]["library"], weights_hash=weights_hash(model.source))
    return now, source["cut"]["layer"], model.stitch.pooling


@torch.no_grad()
def _seen_by(model: StitchedModel, anchors: _Side, run: Run) -> Tensor:
    """Encode the anchors with the current front half of an absolute model."""
    if not isinstance(anchors, Samples):
        raise ValueError(
            "the encoder of this absolute model has changed since its anchors were encoded, so the stored vectors no "
            "longer fit its head: pass the anchors as samples, anchors=…"
        )
    parts, layer = [], model.stitch
    with evaluating(model):
        for batch in anchors.batches(run.batch_size, run.shown("encoding anchors")):
            inputs = {name: value.to(model.device) for name, value in model.preprocess(batch.samples).items()}
            parts.append(source_positions(model.source(**inputs), layer.source, layer.target, layer.pooling).cpu())
    return torch.cat(parts)


def _own(kept: AnchorSet | None, given: _Side) -> AnchorSet:
    """Return the model's anchor set, after a check that the given anchors are the same."""
    if given is None:
        if kept is None:
            raise ValueError("this model has no anchors: pass those with which it was made, anchors=…")
        return kept
    of_given = given if isinstance(given, AnchorSet) else AnchorSet.of(given)
    return of_given if kept is None else kept.merge(of_given)


def _task(target: Adapter, new: _Encoder, task: str | None, *, scored: bool) -> str | None:
    """Return the task of a network with a new encoder."""
    check_meet(new.network, target, new.pooling)
    task = target.task if task == "auto" and not scored else task_of(target, task)
    if task_named(task).per_token:
        raise ValueError(
            f"task={task!r} is not supported: an anchor is a single vector, but the model predicts something at each "
            "position; use hf_stitch.stitch(…, matcher='inverse_relative')"
        )
    return task


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


def _relative(
    stitch: StitchingLayer, spec: RepresentationSpec, pooling: Pooling, vectors: Tensor, ids: Sequence[Id]
) -> StitchingLayer:
    """Return the stitching layer with the same projection on the anchors as the new encoder encodes them."""
    projection: Any = stitch.body
    mean: Any = stitch.body_mean
    body = projection.with_anchors(vectors, ids)
    return StitchingLayer(spec, stitch.target, pooling, body, means={"body": mean}).eval()


def _fitted(
    matcher: str | Matcher, new: _Encoder, spec: RepresentationSpec, vectors: Tensor, entering: Tensor
) -> StitchingLayer:
    """Fit a matcher from the new encoder's vectors of the anchors to those that enter the back half."""
    rows = {"body": Features().update(vectors, entering)}
    return registries.matchers.build(matcher).match(CollectedParts(new.spec, spec, new.pooling, rows)).only


def choices(vectors: Tensor, entering: Tensor) -> dict[str, Any]:
    """Return the matchers among which ``auto`` chooses, by name; with the identity only if the widths are equal."""
    equal = vectors.shape[1] == entering.shape[1]
    return {
        name: registries.matchers.build(name, **options)
        for name, options in CHOICES.items()
        if equal or name != "identity"
    }


@torch.no_grad()
def held_out_errors(
    candidates: Mapping[str, Any], vectors: Tensor, entering: Tensor, outputs: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """Return how much each candidate changes the outputs on anchors held out, relative to their variation.

    The result is empty for fewer than three anchors, of which none can be held out.
    """
    if (count := len(vectors)) < 3:
        return {}
    errors, own, folds = dict.fromkeys(candidates, 0.0), outputs(entering), min(FOLDS, count)
    for fold in range(folds):
        held = torch.arange(count) % folds == fold
        moments = Moments(vectors.shape[1], entering.shape[1]).update(vectors[~held], entering[~held])
        for name, matcher in candidates.items():
            mapped = matcher.fit(moments)(vectors[held])
            errors[name] += (outputs(mapped) - own[held]).square().sum().item()
    variation = (own - own.mean(0)).square().sum().item()
    return {name: error / (variation or 1) for name, error in errors.items()}


def _outputs(swapped: StitchedModel, batch_size: int) -> Callable[[Tensor], Tensor]:
    """Return the back half as a function of vectors, arranged as its stitching layer arranges them."""
    spec, pooling, width = swapped.stitch.target, swapped.stitch.pooling, swapped.stitch.widths[1]
    layer = StitchingLayer(RepresentationSpec("bd", width), spec, pooling, IdentityStitch(width, width))

    def outputs(vectors: Tensor) -> Tensor:
        parts = []
        for rows in vectors.to(swapped.device).split(batch_size):
            output = tensor_of(_through_head(swapped, layer(Representation(rows, "bd"))), len(rows))
            if output is None:
                raise ValueError(
                    "matcher='auto' compares outputs of the head, which has no floating-point output with a row per "
                    "sample: pass another matcher, for example matcher='ridge'"
                )
            parts.append(output.flatten(1).double())
        return torch.cat(parts)

    return outputs


def _through_head(swapped: StitchedModel, entering: Representation) -> Any:
    """Run the head on activations that enter it."""
    try:
        return swapped.head(entering)
    except Exception as error:
        raise ValueError(
            f"the model cannot run on the activations that pooling={swapped.stitch.pooling!r} leaves "
            f"({type(error).__name__}: {error}); cut it at another layer, or use another pooling"
        ) from error


@torch.no_grad()
def _rehearse(swapped: StitchedModel, samples: Samples) -> None:
    """Run one sample through the model, so that errors occur before all data are read."""
    if swapped.task is None:
        raise ValueError(f"{type(swapped).__name__} has no head, so it cannot be scored: leave out data")
    check_head(swapped)
    inputs = swapped.preprocess(next(iter(samples.batches(1))).samples)
    output = _through_head(swapped, swapped.transfer(**inputs))
    task_named(swapped.task).check_labels(samples, logits_of(output).shape[-1])
