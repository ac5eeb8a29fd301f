"""Exchange of the encoder of a trained head without training, from anchors alone: :func:`swap`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Unpack, overload

import torch
from torch import Tensor

from hf_stitch.adapters import load_on
from hf_stitch.analysis.planning import NETWORKS, SOLVING, Plan, bytes_of_weights, seconds_per_sample, speed, unfitted
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Data, Samples
from hf_stitch.data.overlap import FITTED, ContentSketch
from hf_stitch.matchers import Matcher
from hf_stitch.options import checked
from hf_stitch.pairs import CollectedParts
from hf_stitch.printing import warn
from hf_stitch.provenance import versions
from hf_stitch.registry import registries
from hf_stitch.relative import AnchorSet
from hf_stitch.representation import Pooling, Representation, RepresentationSpec
from hf_stitch.results import Result
from hf_stitch.running import PLANNING, Run, RunOptions
from hf_stitch.statistics import Features, Moments
from hf_stitch.stitches import IdentityStitch, StitchingLayer
from hf_stitch.stitches.layer import part_widths
from hf_stitch.tasks.base import logits_of
from hf_stitch.tasks.heads import check_head, task_named
from hf_stitch.tasks.vectors import tensor_of
from hf_stitch.workflows._checks import Named, Runs
from hf_stitch.workflows._evaluate import evaluate
from hf_stitch.workflows._headed import Anchors, Encoder, Headed, as_space, between, is_relative, pooling_of, projected

AUTO = "auto"
CHOICES: dict[str, dict[str, Any]] = {"procrustes": {"scale": True}, "ridge": {}, "identity": {}}
"""Matchers among which ``auto`` chooses, with their options; the first of those that tie."""
FOLDS = 5
BASELINES = ("inverse_relative",)
Fit = Callable[[Named | Matcher], StitchingLayer]


@overload
def swap(model: Runs, encoder: Runs, anchors: Any = None, *, part: str, **options: Any) -> Result: ...
@overload
def swap(model: Runs, encoder: Runs, anchors: Any = None, *, part: None = None, **options: Any) -> StitchedModel: ...
@checked  # type: ignore[misc]  # options of the overloads are those of the function itself
def swap(
    model: Runs,
    encoder: Runs,
    anchors: Data | AnchorSet | None = None,
    *,
    part: str | None = None,
    encoder_layer: str | None = None,
    paired_anchors: Data | AnchorSet | None = None,
    target_layer: str | None = None,
    pooling: Pooling | None = None,
    matcher: Named | Matcher = AUTO,
    baselines: Iterable[Named | Matcher] | None = None,
    data: Data | None = None,
    paired_data: Data | None = None,
    task: str | None = "auto",
    **options: Unpack[RunOptions],
) -> StitchedModel | Result:
    """Replace the encoder of a trained head without training, from the activations of both encoders on the anchors.

    What is exchanged depends on ``model``:

    - A relative model (:func:`hf_stitch.relative_model`) keeps its projection; the anchors are replaced by their
      encoding by the new encoder (:meth:`~hf_stitch.relative.RelativeProjection.with_anchors`).
    - In any other network, the new encoder and a map replace everything up to ``target_layer``. ``matcher`` fits the
      map on the anchors alone. The same holds for an absolute model and for a model that was swapped in this way
      before. If the encoder of an absolute model was trained together with its head, pass the anchors as samples: its
      encoder has to encode them again.
    - With ``part``, it is one tower of a network that reads two things, as images and texts; the anchors are then
      images without labels (:meth:`hf_stitch.Adapter.exchange`).

    By default (``auto``), the head chooses the map: the orthogonal one (``procrustes`` with ``scale=True``, the direct
    translation of Maiorca et al. 2023), that of ``ridge``, or none (``identity``, for equal widths). No single one is
    best everywhere, and the error of the mapped vectors does not tell which is (docs/what-we-found.md). Each is
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
        part: Which tower is replaced: ``vision``, for example, if the library of the network knows its parts.
        encoder_layer: The layer at which the new encoder is cut. Required unless it is a relative model, or with
            ``part``.
        paired_anchors: The anchors for the new encoder, if it takes other samples (translations of the anchors): raw
            samples with the same ids in the same order as the anchors, or an anchor set of such samples.
        target_layer: The layer at which ``model`` is cut. Required for a network, not allowed for a stitched model.
        pooling: Which vector of the new encoder represents a sample: ``mean``, ``cls``, ``last`` or ``flatten``.
            Default: the pooling of the stitched model, or ``mean`` for a network.
        matcher: The method that fits the map: ``auto``, a name in ``hf_stitch.registries.matchers`` or a matcher
            object. Not allowed for a relative model, which needs no map.
        baselines: Further matchers to score for comparison. Default: ``inverse_relative``.
        data: Raw samples to score the result on, in the form that the new encoder takes. Classifiers need labels for
            all figures except agreement. Default: no scores; with ``part``, a quarter of the images, of which classes
            with names or a column ``answer`` tell what is right.
        paired_data: The same samples in the form that the current encoder takes, if it differs (another language).
        task: Task of the head of a network. ``"auto"`` takes the task of the network. Not allowed for a stitched model.
        **options: Options of the run (:class:`hf_stitch.running.RunOptions`): ``batch_size``, ``seed``, ``progress``.

    Returns:
        The stitched model with the new encoder. With ``data``, its ``evaluation`` attribute holds the scores
        (:func:`hf_stitch.evaluate`), in which ``target`` is the original model. Its ``anchors`` attribute holds the
        anchor set. With ``part``, a result that holds the network.

    Raises:
        NotACutError: If a network cannot be cut at the given layer.

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
    with Run.of(swap, options, ("batch_size", "seed", "progress")) as run:
        if part is not None:
            unread = {"pooling": pooling, "paired_anchors": paired_anchors, "baselines": baselines,
                      "paired_data": paired_data, "task": None if task == "auto" else task}  # fmt: skip
            if anchors is None:
                raise TypeError("part needs images without labels: pass them as anchors")
            if unused := [name for name, value in unread.items() if value is not None]:
                raise TypeError(f"part={part!r} takes no {' and no '.join(unused)}")
            return load_on(model, run.processes.device).exchange(
                part, encoder, anchors, run, encoder_layer=encoder_layer, target_layer=target_layer, matcher=matcher,
                test_data=data,
            )  # fmt: skip
        if is_relative(encoder):
            given = (encoder_layer, anchors, paired_anchors, target_layer, pooling, baselines)
            if any(each is not None for each in given) or (matcher, task) != (AUTO, "auto"):
                raise TypeError(
                    "a swap between two relative models takes only data and paired_data: leave out the others"
                )
            swapped = between(model, encoder)
            if run.planning:
                return _planned(swapped, {}, {NETWORKS: bytes_of_weights(swapped)}, data, paired_data, model, run)
            return _scored(swapped, data, paired_data, model, {}, run)
        known, paired = (None if each is None else Anchors.of(each) for each in (anchors, paired_anchors))
        new = Encoder.of(encoder, encoder_layer, pooling or pooling_of(model), run)
        maps = matcher != AUTO or baselines is not None
        head = Headed.of(model, target_layer, task, known, new, maps=maps, scored=data is not None)
        if run.planning:
            return _planned(*_unfitted(head, new, paired), data, paired_data, head.whole, run)
        own = head.encode()
        entering = None if head.space is None else own.values(*head.space)
        own, vectors = new.vectors(own, known, paired)
        more: dict[str, Any] = {}
        others: dict[str, StitchingLayer] = {}
        if entering is None:
            layer = projected(head.whole, new.spec, new.pooling, vectors, own.ids)
            swapped = head.join(new, layer.to(new.network.device))
        else:
            fit = _fitting(head, new, vectors, entering)
            swapped, more = _mapped(head, new, vectors, entering, matcher, fit)
            others = {str(each): fit(each) for each in (BASELINES if baselines is None else baselines)}
        swapped.anchors = own
        swapped.config.recipe = {**_recipe(own, known, paired, new), **more}
        return _scored(swapped, data, paired_data, head.whole, others, run)


def _fitting(head: Headed, new: Encoder, vectors: Tensor, entering: Tensor) -> Fit:
    """Return the fit of a matcher to the new encoder's vectors of the anchors and those that enter the head."""
    rows = {"body": Features().update(vectors, entering)}
    collected = CollectedParts(new.spec, head.spec, new.pooling, rows)
    return lambda matcher: registries.matchers.build(matcher).match(collected).only.to(new.network.device)


def _mapped(
    head: Headed, new: Encoder, vectors: Tensor, entering: Tensor, matcher: Named | Matcher, fit: Fit
) -> tuple[StitchedModel, dict[str, Any]]:
    """Join encoder and head by the map of a matcher; return what the recipe says about it."""
    candidates = choices(vectors, entering) if matcher == AUTO else {"": registries.matchers.build(matcher)}
    found_by, *others = candidates.values()
    swapped = head.join(new, fit(found_by))
    errors: dict[str, float] = {}
    if others:
        errors = held_out_errors(candidates, vectors, entering, _outputs(swapped, new.run.batch_size))
    best = min(errors, key=lambda name: (math.isnan(errors[name]), errors[name]), default=None)
    if best is not None and candidates[best] is not found_by:
        found_by = candidates[best]
        swapped.stitch = fit(found_by)
        swapped.config.stitch = swapped.stitch.to_dict()
    if (r2 := float((swapped.stitch.body.fitted or {}).get("r2", 0))) < 0:
        warn(
            f"the map is worse than the mean of the anchors (R² {r2:.2f}), so the swapped model may have lost the "
            f"input: use more anchors{'' if matcher == AUTO else ', or leave out matcher='}"
        )
    assert head.space is not None
    used = versions([("matchers", found_by.name)] if found_by.name in registries.matchers else ())
    recipe = {"matcher": found_by.to_dict(), "space": as_space(*head.space), "versions": used}
    if errors:
        recipe["held_out_errors"] = {
            name: float(f"{error:.4g}") for name, error in errors.items() if math.isfinite(error)
        }
    return swapped, recipe


def _recipe(own: AnchorSet, given: Anchors | None, paired: Anchors | None, new: Encoder) -> dict[str, Any]:
    """Return the recipe that all swaps have in common, as JSON values."""
    recipe: dict[str, Any] = {"pooling": new.pooling, "anchors": own.fingerprint, "samples": len(own)}
    seen = given if paired is None else paired
    if seen is not None and seen.samples is not None:
        recipe[FITTED] = ContentSketch.of(seen.samples).to_dict()
    if paired is not None:
        recipe["paired_anchors"] = paired.set.fingerprint
    return {**recipe, "batch_size": new.run.batch_size, "versions": versions()}


def _scored(
    swapped: StitchedModel, data: Any, paired_data: Any, original: Any, baselines: dict[str, StitchingLayer], run: Run
) -> StitchedModel:
    """Return the model, scored if there are data; a rehearsal finds errors before all data are read."""
    if data is None:
        return swapped
    if swapped.task is None:
        raise ValueError(f"{type(swapped).__name__} has no head, so it cannot be scored: leave out data")
    check_head(swapped)
    samples = Samples.of(data)
    with torch.no_grad():
        inputs = swapped.preprocess(next(iter(samples.batches(1))).samples)
        output = _through_head(swapped, swapped.transfer(**inputs))
    task_named(swapped.task).check_labels(samples, logits_of(output).shape[-1])
    evaluation = evaluate(
        swapped, samples, target=original, paired_data=paired_data, baselines=baselines, **run.options
    )
    swapped.keep_scores(evaluation)
    swapped.config.recipe["test_data"] = evaluation.data
    return swapped


def _unfitted(
    head: Headed, new: Encoder, paired: Anchors | None
) -> tuple[StitchedModel, dict[str, float], dict[str, int]]:
    """Encode one batch of the anchors, and extrapolate; return the model with a map of no meaning, and the costs."""
    device, (dx, dy) = new.network.device, part_widths(new.spec, head.spec, new.pooling)["body"]
    count, stages = len(head.anchors), {"encoding anchors": 0.0}
    read_by_new = None if head.anchors.has(new.network, new.layer, new.pooling) else new.read
    for read, samples in ((read_by_new, head.samples if paired is None else paired.samples), (head.read, head.samples)):
        if read is not None and samples is not None:
            stages["encoding anchors"] += count * seconds_per_sample(read, samples, new.run, device)
    memory = {NETWORKS: bytes_of_weights(new.network.model), "anchors": 8 * count * (dx + dy)}
    if head.space is None:
        random = torch.randn(count, dx, device=device)
        layer = projected(head.whole, new.spec, new.pooling, random, head.anchors.ids)
    else:
        layer = unfitted(new.spec, head.spec, new.pooling, device)
        stages["fitting"] = len(CHOICES) * (FOLDS + 1) * SOLVING * max(dx, dy) ** 3 / speed()
    return head.join(new, layer), stages, memory


def _planned(
    swapped: StitchedModel, stages: dict[str, float], memory: dict[str, int], data: Any, paired_data: Any,
    original: Any, run: Run,
) -> Any:  # fmt: skip
    """Add the scoring to the plan, if there are data."""
    if data is not None:
        asked: Any = {**run.options, PLANNING: True}
        scoring: Any = evaluate(swapped, data, target=original, paired_data=paired_data, **asked)
        stages, memory = {**stages, **scoring.stages}, {**memory, **scoring.memory}
    return Plan.of("swap", stages, memory, {}, swapped.device, run)


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
    if not any(map(math.isfinite, errors.values())):
        raise ValueError(
            "the head outputs NaN or infinite values for the anchors, so that matcher='auto' cannot choose"
        )
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
    try:
        return swapped.head(entering)
    except Exception as error:
        raise ValueError(
            f"the model cannot run on the activations that pooling={swapped.stitch.pooling!r} leaves "
            f"({type(error).__name__}: {error}); cut it at another layer, or use another pooling"
        ) from error
