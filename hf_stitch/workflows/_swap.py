"""Another encoder for a head that was trained: by anchors alone, with no training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_stitch.adapters import Adapter, load
from hf_stitch.adapters.compatibility import check_meet
from hf_stitch.adapters.cutting.modes import evaluating
from hf_stitch.analysis.scoring import check_labels
from hf_stitch.artefacts.heads import class_for
from hf_stitch.artefacts.joining import join, with_encoder
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.artefacts.outputs import logits_of
from hf_stitch.data import Samples
from hf_stitch.matchers import Matcher, TrainedMatcher
from hf_stitch.matchers.fitting import fit_layer
from hf_stitch.provenance import versions
from hf_stitch.reference import ModelReference, weights_hash
from hf_stitch.registry import registries
from hf_stitch.relative import AnchorSet, RelativeProjection
from hf_stitch.representation import Pooling, RepresentationSpec
from hf_stitch.statistics import Moments
from hf_stitch.stitches import IdentityStitch, StitchingLayer
from hf_stitch.stitches.layer import POOLED, source_positions
from hf_stitch.workflows._evaluate import evaluate

MATCHER = "inverse_relative"
BASELINES = ("procrustes",)
_Side = Samples | AnchorSet | None
_Space = tuple[ModelReference, str, Pooling]
"""Whose representations: of which network, at which layer, by which policy."""


def swap(
    model: str | nn.Module | Adapter | StitchedModel,
    encoder: str | nn.Module | Adapter | StitchedModel,
    anchors: Any = None,
    *,
    encoder_layer: str | None = None,
    paired_anchors: Any = None,
    target_layer: str | None = None,
    pooling: Pooling | None = None,
    matcher: str | Matcher | None = None,
    baselines: Sequence[str | Matcher] | None = None,
    data: Any = None,
    paired_data: Any = None,
    task: str | None = "auto",
    batch_size: int = 64,
    seed: int = 0,
    progress: bool = True,
) -> StitchedModel:
    """Give a trained head another encoder with no training, by what both encoders say of the anchors.

    - A relative model (:func:`hf_stitch.relative_model`) gets the same projection on the anchors as the new encoder
      represents them (:meth:`~hf_stitch.relative.RelativeProjection.with_anchors`).
    - Any other network gets, in place of all that precedes a layer, the new encoder and a map that ``matcher`` finds
      from the anchors alone: by default inverse relative projection (Maiorca et al. 2024). So does the absolute model,
      in place of its encoder, and what was swapped so before. Of an absolute model whose encoder was trained with its
      head, the anchors' samples are needed: its own front encodes them again.

    Args:
        model: The trained head with its own encoder: a stitched model, or a network (an adapter, a live module, or a
            name for :func:`hf_stitch.load`).
        encoder: The new one: an adapter, a live module, or a name. Or, for a relative model, another one on the same
            anchors, whose front half and anchors are taken as they are: both may have been trained end to end.
        encoder_layer: The cut of an encoder that is no stitched model.
        anchors: The samples (what :meth:`hf_stitch.Samples.of` takes), or a set. A stitched model keeps its own, with
            which these are compared; they may be left out where the new encoder is in that set, or ``paired_anchors`` is
            given.
        paired_anchors: Where the new encoder is to see other samples (the anchors' translations): as many, with the same ids
            in the same order; or a set of these.
        target_layer: Where a network that is no stitched model is cut.
        pooling: Which vector of the new encoder stands for a sample: ``mean``, ``cls``, ``last`` or ``flatten``. Default:
            that of the stitched model; ``mean`` for a network.
        matcher: What finds the map, where one is to be found: a name of ``hf_stitch.registries.matchers`` or a matcher.
        baselines: Other matchers, to be scored beside it. Default: direct translation by ``procrustes``.
        data: Raw samples to score the result on, as the new encoder sees them; classifiers need labels for more than
            agreement. ``None``: no scores.
        paired_data: Those samples as the model's own encoder is to see them, where that is another language.
        task: Of a network that is no stitched model: which head; ``"auto"``: the network's.
        batch_size: Samples per forward.
        seed: Of the bootstrap.
        progress: Show a progress bar.

    Returns:
        The stitched model. Its ``evaluation`` holds the scores (:func:`hf_stitch.evaluate`; ``target`` is the model as
        it was), its ``anchors`` the set.

    Raises:
        NotACutError: If a layer is no cut.
        ValueError: If anchors are too few or too many, in another order, others than the model's, not parallel, the
            same or constant for an encoder, of a set that was encoded at another layer or by other rows, or such that
            the similarity is not defined by them (0 under ``cosine``; no basis under ``change_of_basis``); if labels
            are no classes of the model. All of it is found before the data are read.
        TypeError: If an argument does not concern this model.

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
    if isinstance(encoder, StitchedModel):
        if any(
            each is not None
            for each in (encoder_layer, anchors, paired_anchors, target_layer, pooling, matcher, baselines)
        ):
            raise TypeError("between two relative models everything is given: leave out all but data and paired_data")
        swapped = _between(model, encoder)
        return _scored(swapped, data, model, {}, paired_data, batch_size, seed, progress)
    if encoder_layer is None:
        raise TypeError("encoder_layer is missing: name the layer where the new encoder is cut")
    anchors, paired_anchors = (
        side if side is None or isinstance(side, AnchorSet) else Samples.of(side) for side in (anchors, paired_anchors)
    )
    stitched = model if isinstance(model, StitchedModel) else None
    new = _Encoder(
        load(encoder), encoder_layer, pooling or (stitched.stitch.pooling if stitched else "mean"), batch_size, progress
    )
    if stitched is not None:
        if target_layer is not None or task != "auto":
            raise TypeError("a stitched model is cut already and has its head: leave out target_layer and task")
        space, spec = _space(stitched), stitched.stitch.target
        if space is None and not (matcher is None and baselines is None):
            raise TypeError("a relative model needs no map from encoder to encoder: leave out matcher and baselines")
        own = _own(stitched.anchors, anchors)
        if space is not None and _moved(stitched, space):
            space = _space_now(stitched)
            if not own.has(*space):
                own = own.add(_seen_by(stitched, anchors, batch_size, progress), *space)
        original: StitchedModel | Adapter = stitched
    else:
        if target_layer is None or anchors is None:
            raise TypeError("a network that is no stitched model needs target_layer=… (where it is cut) and anchors=…")
        original = load(model)
        spec = original.spec(target_layer)
        task = _task(original, new, task)
        space = (original.pinned, target_layer, _target_rows(spec, new.pooling))
        own = _own(None, anchors)
        if isinstance(anchors, Samples):
            own = own.encode(original, target_layer, anchors, space[2], batch_size=batch_size, progress=progress)

    entering = None if space is None else own.values(*space)
    own, vectors = new.encode(own, anchors, paired_anchors)
    if entering is None:
        assert stitched is not None
        joint, others = _relative(stitched.stitch, new.spec, new.pooling, vectors), {}
    else:
        joint = _fitted(matcher or MATCHER, new, spec, vectors, entering)
        names = BASELINES if baselines is None else baselines
        others = {str(each): _fitted(each, new, spec, vectors, entering) for each in names}
    if stitched is not None:
        swapped = with_encoder(stitched, new.network, encoder_layer, joint)
    else:
        assert isinstance(original, Adapter) and target_layer is not None
        swapped = join(new.network, encoder_layer, joint, original, target_layer, task=task)
    swapped.anchors = own
    swapped.config.recipe = _recipe(own, paired_anchors, new)
    if space is not None:
        found_by = registries.matchers.build(matcher or MATCHER)
        used = versions([("matchers", found_by.name)] if found_by.name in registries.matchers else ())
        swapped.config.recipe |= {"matcher": found_by.to_dict(), "space": as_space(*space), "versions": used}
    return _scored(swapped, data, original, others, paired_data, batch_size, seed, progress)


def _scored(
    swapped: StitchedModel,
    data: Any,
    original: Any,
    baselines: dict[str, StitchingLayer],
    paired_data: Any,
    batch_size: int,
    seed: int,
    progress: bool,
) -> StitchedModel:
    """The model with its scores, if there are data."""
    if data is None:
        return swapped
    samples = Samples.of(data)
    _rehearse(swapped, samples)

    swapped.evaluation = evaluate(
        swapped,
        samples,
        target=original,
        paired_data=paired_data,
        baselines=baselines,
        batch_size=batch_size,
        seed=seed,
        progress=progress,
    )
    swapped.config.scores = swapped.evaluation.to_dict()
    swapped.config.recipe["test_data"] = swapped.evaluation.data
    return swapped


def _between(model: Any, other: StitchedModel) -> StitchedModel:
    """The head of one relative model on the front half and the anchors of another, as both are now.

    Raises:
        TypeError: If one of them is no relative model.
        ValueError: If their anchors or similarities differ.
    """
    for each in (model, other):
        if not (isinstance(each, StitchedModel) and isinstance(each.stitch.body, RelativeProjection)):
            raise TypeError("the encoder of a stitched model fits a relative model only, and must be in one")
    if model.anchors is not None and other.anchors is not None:
        model.anchors.check_same(other.anchors)
    own, its = ({**each.stitch.body.config(), "in_features": None, "dtype": None} for each in (model, other))
    if own != its:
        different = ", ".join(f"{key} {own[key]!r} and {its[key]!r}" for key in own if own[key] != its[key])
        raise ValueError(f"the two models project differently: {different}")
    anchors: Any = other.stitch.body.anchors
    joint = _relative(model.stitch, other.stitch.source, other.stitch.pooling, anchors)
    swapped = with_encoder(model, other, "", joint)
    swapped.anchors = model.anchors
    swapped.config.recipe = {**(model.config.recipe or {}), "pooling": other.stitch.pooling, "versions": versions()}
    return swapped


@dataclass(frozen=True)
class _Encoder:
    """The new encoder, and how it is looked at."""

    network: Adapter
    layer: str
    pooling: Pooling
    batch_size: int
    progress: bool

    @property
    def spec(self) -> RepresentationSpec:
        return self.network.spec(self.layer)

    def encode(self, own: AnchorSet, given: _Side, paired_anchors: _Side) -> tuple[AnchorSet, Tensor]:
        """The model's anchors with what is known of them now, and what this encoder says of them or their parallels."""
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
            self.network, self.layer, samples, self.pooling, batch_size=self.batch_size, progress=self.progress
        )


def _recipe(own: AnchorSet, paired_anchors: _Side, new: _Encoder) -> dict[str, Any]:
    """What there is to say of any swap, as JSON values."""
    recipe = {"pooling": new.pooling, "anchors": own.fingerprint, "samples": len(own)}
    if paired_anchors is not None:
        recipe["paired_anchors"] = paired_anchors.fingerprint
    return {**recipe, "batch_size": new.batch_size, "versions": versions()}


def as_space(reference: ModelReference, layer: str, pooling: Pooling) -> dict[str, Any]:
    """Whose representations enter a back half, as JSON values for its recipe."""
    return {"reference": reference.public.to_dict(), "layer": layer, "pooling": pooling}


def _space(model: StitchedModel) -> _Space | None:
    """Whose representations enter a stitched model's back half; ``None`` if relative ones do.

    Raises:
        ValueError: If it was made neither by a swap nor as an absolute model, and does not say.
    """
    if isinstance(model.stitch.body, RelativeProjection):
        return None
    recorded = (model.config.recipe or {}).get("space")
    if recorded is None:
        raise ValueError(
            "this stitched model is no relative one, and does not record whose representations enter its back half: "
            "swap its target instead, swap(target, target_layer=…, …)"
        )
    return ModelReference.from_dict(recorded["reference"]), recorded["layer"], recorded["pooling"]


def _moved(model: StitchedModel, space: _Space) -> bool:
    """Whether the representations that enter a back half are those of the model's own front, trained since."""
    source: Any = model.config.source
    its_own = as_space(*space) == {"reference": source["reference"], "layer": space[1], "pooling": model.stitch.pooling}
    absolute = its_own and space[1] == source["cut"]["layer"] and isinstance(model.stitch.body, IdentityStitch)
    return absolute and model.has_changed("source")


def _space_now(model: StitchedModel) -> _Space:
    """The space of an absolute model's own front as it is now: a network of no name, pinned by its weights."""
    source: Any = model.config.source
    now = ModelReference(None, source["reference"]["library"], weights_hash=weights_hash(model.source))
    return now, source["cut"]["layer"], model.stitch.pooling


@torch.no_grad()
def _seen_by(model: StitchedModel, anchors: _Side, batch_size: int, progress: bool) -> Tensor:
    """What an absolute model's own front says of the anchors now.

    Raises:
        ValueError: If their samples are not given.
    """
    if not isinstance(anchors, Samples):
        raise ValueError(
            "the encoder of this absolute model has changed since its anchors were encoded, so that what is kept of "
            "them says nothing of its head: pass the anchors' samples, anchors=…"
        )
    parts, layer = [], model.stitch
    with evaluating(model):
        for batch in anchors.batches(batch_size, "encoding anchors" if progress else None):
            inputs = {name: value.to(model.device) for name, value in model.preprocess(batch.samples).items()}
            parts.append(source_positions(model.source(**inputs), layer.source, layer.target, layer.pooling).cpu())
    return torch.cat(parts)


def _own(kept: AnchorSet | None, given: _Side) -> AnchorSet:
    """The model's anchors, with what is given compared with those that it keeps.

    Raises:
        ValueError: If they are not the same, or there are none.
    """
    if given is None:
        if kept is None:
            raise ValueError("this model keeps no anchors: pass those that it was made with, anchors=…")
        return kept
    of_given = given if isinstance(given, AnchorSet) else AnchorSet.of(given)
    return of_given if kept is None else kept.merge(of_given)


def _task(target: Adapter, new: _Encoder, task: str | None) -> str | None:
    """The task of an ordinary network with a new encoder.

    Raises:
        ValueError: If the two take other kinds of samples, or a vector for a sample does not do.
    """
    check_meet(new.network, target, new.pooling)
    task = target.task if task == "auto" else task
    class_for(task)
    if task == "text-generation":
        raise ValueError(
            "an anchor is one vector, and a language model predicts a token for each position: join two of them by "
            "hf_stitch.stitch(…, matcher='inverse_relative')"
        )
    return task


def _target_rows(spec: RepresentationSpec, pooling: Pooling) -> Pooling:
    """Which vector of the target a pooled stitch stands in for: the single token is where a head finds its CLS token.

    Raises:
        ValueError: If the policy gives nothing for the target's prefix tokens.
    """
    if pooling == "flatten" and spec.prefix_tokens:
        raise ValueError("pooling='flatten' gives the target's CLS token nothing: use 'mean' or 'cls'")
    if pooling not in POOLED:
        return pooling
    if spec.prefix_tokens:
        return "cls"
    return "mean" if spec.layout != "bnd" or spec.grid is not None else pooling


def _relative(stitch: StitchingLayer, spec: RepresentationSpec, pooling: Pooling, vectors: Tensor) -> StitchingLayer:
    """The same projection on the anchors as the new encoder represents them."""
    projection: Any = stitch.body
    mean: Any = stitch.body_mean
    body = projection.with_anchors(vectors)
    return StitchingLayer(spec, stitch.target, pooling, body, means={"body": mean}).eval()


def _fitted(
    matcher: str | Matcher, new: _Encoder, spec: RepresentationSpec, vectors: Tensor, entering: Tensor
) -> StitchingLayer:
    """The map of a matcher, from what the new encoder says of the anchors and what enters the back half for them."""
    fitted_by = registries.matchers.build(matcher)
    if isinstance(fitted_by, TrainedMatcher):
        raise ValueError(f"a swap trains nothing, and matcher {fitted_by.name!r} does: use hf_stitch.stitch")
    moments = Moments(vectors.shape[1], entering.shape[1]).update(vectors, entering)
    return fit_layer(fitted_by, {"body": moments}, new.spec, spec, new.pooling)


@torch.no_grad()
def _rehearse(swapped: StitchedModel, samples: Samples) -> None:
    """Take one sample all the way, so that what cannot work fails before all data are read.

    Raises:
        ValueError: If the model has no head that could be scored, cannot run on it, or labels are none of its classes.
    """

    if swapped.task is None:
        raise ValueError(f"{type(swapped).__name__} has no head that could be scored: leave out data")
    inputs = swapped.preprocess(next(iter(samples.batches(1))).samples)
    entering = swapped.transfer(**inputs)
    try:
        output = swapped.head(entering)
    except Exception as error:
        raise ValueError(
            f"the model cannot run on what pooling={swapped.stitch.pooling!r} gives it ({type(error).__name__}: {error}); "
            "cut it at another layer, or use another pooling"
        ) from error
    check_labels(samples, logits_of(output).shape[-1])
