"""Exchange of the encoder of a trained head from anchors, without training: :func:`swap`."""

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
"""Matchers that ``auto`` compares, with their options, in order of preference on a tie."""
FOLDS = 5  # of the cross-validation on the anchors
BASELINES = ("inverse_relative",)  # matchers that are scored for comparison by default
Fit = Callable[[Named | Matcher], StitchingLayer]  # fits a matcher on the anchors


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

    The exchange depends on ``model``:

    - A relative model (:func:`hf_stitch.relative_model`) keeps its projection with the anchors re-encoded by the new
      encoder (:meth:`~hf_stitch.relative.RelativeProjection.with_anchors`).
    - In any other network, the new encoder and a map replace everything up to ``target_layer``. ``matcher`` fits the
      map only on the anchors. The same holds for an absolute model and for a model from an earlier such swap. If the
      encoder of an absolute model was trained together with its head, pass the anchors as samples, to be encoded again.
    - With ``part``, the encoder replaces one tower of a multimodal network, for example of images and texts. The
      anchors are then images without labels (:meth:`hf_stitch.Adapter.exchange`).

    By default (``auto``), the outputs of the head determine the map: an orthogonal map (``procrustes`` with
    ``scale=True``, the direct translation of Maiorca et al. 2023), ``ridge``, or ``identity`` (for equal widths). None
    of them is best everywhere, and the error of the mapped vectors does not show which is (docs/what-we-found.md).
    Five-fold cross-validation on the anchors selects the map that changes the outputs of the head least on held-out
    anchors (sum of squares, without labels); it is then fitted on all anchors. Fewer than five anchors are held out one
    at a time. With two anchors, and on a tie, the first in this order is used. ``config.recipe["held_out_errors"]``
    contains the errors, relative to the variation of the outputs.

    Args:
        model: The trained head with its current encoder: a stitched model, or a network (an adapter, a module, or a
            name for :func:`hf_stitch.load`).
        encoder: The new encoder: an adapter, a module (also a stitched model), or a name. For a relative model this can
            also be another relative model with the same anchors; then its front half and its encoded anchors are used
            in their current state, including any end-to-end training.
        anchors: The anchors: raw samples, in any form that :meth:`hf_stitch.Samples.of` accepts, or an
            :class:`~hf_stitch.relative.AnchorSet`. A stitched model already stores its anchors and checks that these
            are the same. Omit them if its anchor set contains the encoding by the new encoder, or with
            ``paired_anchors``.
        part: Name of the tower to replace, for example ``vision``, if the library of the network defines its parts.
        encoder_layer: The cut of the new encoder. Not required for a relative model, or with ``part``.
        paired_anchors: The anchors for the new encoder, if they differ (translations of the anchors): raw samples with
            the same ids in the same order as the anchors, or an anchor set of such samples.
        target_layer: The cut of ``model``. Required for a network, not allowed for a stitched model.
        pooling: Which vector of the new encoder represents a sample: ``mean``, ``cls``, ``last`` or ``flatten``.
            Default: the pooling of the stitched model, or ``mean`` for a network.
        matcher: The method that fits the map: ``auto``, a name in ``hf_stitch.registries.matchers`` or a matcher
            object. Not allowed for a relative model, which does not use a map.
        baselines: Further matchers to score for comparison. Default: ``inverse_relative``.
        data: Raw samples to score the result, in the form that the new encoder accepts. Classifiers require labels for
            all figures except agreement. Default: no scores; with ``part``, a quarter of the images, with named classes
            or a column ``answer`` as the correct answers.
        paired_data: The same samples in the form that the current encoder accepts, if it differs (another language).
        task: Task of the head of a network. ``"auto"`` uses the task of the network. Not allowed for a stitched model.
        **options: Options of the run (:class:`hf_stitch.running.RunOptions`): ``batch_size``, ``seed``, ``progress``.

    Returns:
        The stitched model with the new encoder. With ``data``, its ``evaluation`` attribute contains the scores
        (:func:`hf_stitch.evaluate`), with the original model as ``target``. Its ``anchors`` attribute is the anchor
        set. With ``part``, a result that contains the network.

    Raises:
        NotACutError: If a network cannot be cut at the layer.

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
            unsupported = {"pooling": pooling, "paired_anchors": paired_anchors, "baselines": baselines,
                      "paired_data": paired_data, "task": None if task == "auto" else task}  # fmt: skip
            if anchors is None:
                raise TypeError("swap(part=…) requires images; pass them as anchors (labels are ignored)")
            if unused := [name for name, value in unsupported.items() if value is not None]:
                raise TypeError(f"part={part!r} cannot be combined with {' and '.join(unused)}")
            return load_on(model, run.processes.device).exchange(
                part, encoder, anchors, run, encoder_layer=encoder_layer, target_layer=target_layer, matcher=matcher,
                test_data=data,
            )  # fmt: skip
        if is_relative(encoder):
            unused_options = (encoder_layer, anchors, paired_anchors, target_layer, pooling, baselines)
            if any(option is not None for option in unused_options) or (matcher, task) != (AUTO, "auto"):
                raise TypeError(
                    "a swap between two relative models only accepts data and paired_data; remove the remaining options"
                )
            swapped = between(model, encoder)
            if run.planning:
                return _planned(swapped, {}, {NETWORKS: bytes_of_weights(swapped)}, data, paired_data, model, run)
            return _scored(swapped, data, paired_data, model, {}, run)
        anchors_passed, anchors_paired = (
            None if samples is None else Anchors.of(samples) for samples in (anchors, paired_anchors)
        )
        new = Encoder.of(encoder, encoder_layer, pooling or pooling_of(model), run)
        maps = matcher != AUTO or baselines is not None
        head = Headed.of(model, target_layer, task, anchors_passed, new, maps=maps, scored=data is not None)
        if run.planning:
            return _planned(*_unfitted(head, new, anchors_paired), data, paired_data, head.whole, run)
        anchor_set = head.encode()
        inputs = None if head.space is None else anchor_set.values(*head.space)
        anchor_set, vectors = new.vectors(anchor_set, anchors_passed, anchors_paired)
        map_recipe: dict[str, Any] = {}
        baseline_layers: dict[str, StitchingLayer] = {}
        if inputs is None:
            layer = projected(head.whole, new.spec, new.pooling, vectors, anchor_set.ids)
            swapped = head.join(new, layer.to(new.network.device))
        else:
            fit = _fitting(head, new, vectors, inputs)
            swapped, map_recipe = _mapped(head, new, vectors, inputs, matcher, fit)
            baseline_layers = {str(name): fit(name) for name in (BASELINES if baselines is None else baselines)}
        swapped.anchors = anchor_set
        swapped.config.recipe = {**_recipe(anchor_set, anchors_passed, anchors_paired, new), **map_recipe}
        return _scored(swapped, data, paired_data, head.whole, baseline_layers, run)


def _fitting(head: Headed, new: Encoder, vectors: Tensor, head_inputs: Tensor) -> Fit:
    """Return a function that fits a matcher from the new encoder's vectors to the input of the head, on the anchors."""
    rows = {"body": Features().update(vectors, head_inputs)}
    collected = CollectedParts(new.spec, head.spec, new.pooling, rows)
    return lambda matcher: registries.matchers.build(matcher).match(collected).only.to(new.network.device)


def _mapped(
    head: Headed, new: Encoder, vectors: Tensor, head_inputs: Tensor, matcher: Named | Matcher, fit: Fit
) -> tuple[StitchedModel, dict[str, Any]]:
    """Join encoder and head with the map of a matcher; return the model and its recipe."""
    candidates = choices(vectors, head_inputs) if matcher == AUTO else {"": registries.matchers.build(matcher)}
    matcher_used, *rest = candidates.values()
    swapped = head.join(new, fit(matcher_used))
    errors: dict[str, float] = {}
    if rest:
        errors = held_out_errors(candidates, vectors, head_inputs, _outputs(swapped, new.run.batch_size))
    best = min(errors, key=lambda name: (math.isnan(errors[name]), errors[name]), default=None)
    if best is not None and candidates[best] is not matcher_used:
        matcher_used = candidates[best]
        swapped.stitch = fit(matcher_used)
        swapped.config.stitch = swapped.stitch.to_dict()
    if (r2 := float((swapped.stitch.body.fitted or {}).get("r2", 0))) < 0:
        warn(
            f"the map is worse than the mean of the anchors (R² {r2:.2f}), so the swapped model may ignore its input; "
            f"use more anchors{'' if matcher == AUTO else ', or remove matcher='}"
        )
    assert head.space is not None
    versions_used = versions([("matchers", matcher_used.name)] if matcher_used.name in registries.matchers else ())
    recipe = {"matcher": matcher_used.to_dict(), "space": as_space(*head.space), "versions": versions_used}
    if errors:
        recipe["held_out_errors"] = {
            name: float(f"{error:.4g}") for name, error in errors.items() if math.isfinite(error)
        }
    return swapped, recipe


def _recipe(anchors: AnchorSet, passed: Anchors | None, paired: Anchors | None, new: Encoder) -> dict[str, Any]:
    """Return the common recipe of all swaps, as JSON values."""
    recipe: dict[str, Any] = {"pooling": new.pooling, "anchors": anchors.fingerprint, "samples": len(anchors)}
    encoded_anchors = passed if paired is None else paired
    if encoded_anchors is not None and encoded_anchors.samples is not None:
        recipe[FITTED] = ContentSketch.of(encoded_anchors.samples).to_dict()
    if paired is not None:
        recipe["paired_anchors"] = paired.set.fingerprint
    return {**recipe, "batch_size": new.run.batch_size, "versions": versions()}


def _scored(
    swapped: StitchedModel, data: Any, paired_data: Any, original: Any, baselines: dict[str, StitchingLayer], run: Run
) -> StitchedModel:
    """Return the model, scored if data are passed; one sample runs first, so that errors occur early."""
    if data is None:
        return swapped
    if swapped.task is None:
        raise ValueError(f"{type(swapped).__name__} cannot be scored without a head; remove data")
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
    """Encode one batch of the anchors, and extrapolate; return the model with an unfitted map, and the costs."""
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
    """Return the plan, including the scoring if data are passed."""
    if data is not None:
        planning_options: Any = {**run.options, PLANNING: True}
        scoring: Any = evaluate(swapped, data, target=original, paired_data=paired_data, **planning_options)
        stages, memory = {**stages, **scoring.stages}, {**memory, **scoring.memory}
    return Plan.of("swap", stages, memory, {}, swapped.device, run)


def choices(vectors: Tensor, head_inputs: Tensor) -> dict[str, Any]:
    """Return the matchers that ``auto`` compares, by name; the identity only for equal widths."""
    equal = vectors.shape[1] == head_inputs.shape[1]
    return {
        name: registries.matchers.build(name, **options)
        for name, options in CHOICES.items()
        if equal or name != "identity"
    }


@torch.no_grad()
def held_out_errors(
    candidates: Mapping[str, Any], vectors: Tensor, head_inputs: Tensor, outputs: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """Return how much each candidate changes the outputs on held-out anchors, relative to their variation.

    The result is empty for fewer than three anchors, which are too few to hold out any.
    """
    if (count := len(vectors)) < 3:
        return {}
    errors, expected, folds = dict.fromkeys(candidates, 0.0), outputs(head_inputs), min(FOLDS, count)
    for fold in range(folds):
        held_out = torch.arange(count) % folds == fold
        moments = Moments(vectors.shape[1], head_inputs.shape[1]).update(vectors[~held_out], head_inputs[~held_out])
        for name, matcher in candidates.items():
            mapped = matcher.fit(moments)(vectors[held_out])
            errors[name] += (outputs(mapped) - expected[held_out]).square().sum().item()
    if not any(map(math.isfinite, errors.values())):
        raise ValueError("matcher='auto' cannot choose: the head outputs NaN or infinite values for the anchors")
    variation = (expected - expected.mean(0)).square().sum().item()
    return {name: error / (variation or 1) for name, error in errors.items()}


def _outputs(swapped: StitchedModel, batch_size: int) -> Callable[[Tensor], Tensor]:
    """Return the back half as a function of vectors, in the layout of its stitching layer."""
    spec, pooling, width = swapped.stitch.target, swapped.stitch.pooling, swapped.stitch.widths[1]
    layer = StitchingLayer(RepresentationSpec("bd", width), spec, pooling, IdentityStitch(width, width))

    def outputs(vectors: Tensor) -> Tensor:
        chunks = []
        for rows in vectors.to(swapped.device).split(batch_size):
            output = tensor_of(_through_head(swapped, layer(Representation(rows, "bd"))), len(rows))
            if output is None:
                raise ValueError(
                    "matcher='auto' requires a head with a floating-point output of one row per sample; pass another "
                    "matcher, for example matcher='ridge'"
                )
            chunks.append(output.flatten(1).double())
        return torch.cat(chunks)

    return outputs


def _through_head(swapped: StitchedModel, activations: Representation) -> Any:
    try:
        return swapped.head(activations)
    except Exception as error:
        raise ValueError(
            f"the model cannot run on activations with pooling={swapped.stitch.pooling!r} ({type(error).__name__}: "
            f"{error}); use another layer or pooling"
        ) from error
