"""Stitching of two networks, from raw samples to a scored model: :func:`stitch`."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from hf_stitch.adapters import Adapter, load_on
from hf_stitch.adapters.compatibility import check_meet
from hf_stitch.adapters.prefixes import PrefixAdapter
from hf_stitch.analysis.classes import numbered_as
from hf_stitch.analysis.differences import class_names
from hf_stitch.analysis.grid.measuring import Sides
from hf_stitch.analysis.grid.plan import planned
from hf_stitch.analysis.scoring import check_labels
from hf_stitch.artefacts.joining import join
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Samples, check_same_order
from hf_stitch.data.overlap import FITTED, ContentSketch
from hf_stitch.matchers import ClosedFormMatcher, Matcher, RowsMatcher, TrainedMatcher, UnpairedMatcher
from hf_stitch.matchers.fitting import (
    PairedRows,
    Statistics,
    collect,
    collect_rows,
    collect_unpaired,
    fit_layer,
)
from hf_stitch.provenance import versions
from hf_stitch.registry import check_choice, check_name, registries
from hf_stitch.representation import POOLINGS, Pooling
from hf_stitch.running import WITHOUT_STATE, Run
from hf_stitch.statistics import Moments
from hf_stitch.stitches import IdentityStitch, LinearStitch, StitchingLayer
from hf_stitch.stitches.layer import POOLED, paired_rows, part_widths
from hf_stitch.tasks import CLASSIFIES, logits_of, task_of
from hf_stitch.workflows._compare import compare
from hf_stitch.workflows._evaluate import evaluate
from hf_stitch.workflows._methods import check_causal
from hf_stitch.workflows._networks import ALIGN, Align, aligned, check_lengths, check_runs, read_by

AUTO = "auto"
"""Value of ``source_layer`` and ``target_layer`` that selects the most similar layer."""

PREDICTORS = 3
"""Predictors that run through the target's part when a stitch is scored: the stitch, the identity, the mean only."""


def stitch(
    source: str | nn.Module | Adapter,
    target: str | nn.Module | Adapter,
    data: Any,
    *,
    source_layer: str = AUTO,
    target_layer: str = AUTO,
    matcher: str | Matcher = "lstsq",
    paired_data: Any = None,
    pooling: Pooling = "none",
    test_size: float | int = 0.2,
    test_data: Any = None,
    task: str | None = "auto",
    align: Align = "tokens",
    own: bool = False,
    unpaired: tuple[Any, Any] | None = None,
    **options: Any,
) -> StitchedModel:
    """Stitch two networks: run the source up to a layer, map its activations, and continue in the target.

    The stitching layer between the two halves is fitted on a training split and scored on the held-out split, compared
    with baselines: the identity, the target's mean activations, the source and the target alone, and chance
    (:func:`hf_stitch.evaluate`).

    Under ``accelerate launch`` each process takes a part of the samples and all processes return the same model,
    without any change to the call.

    Args:
        source: The network of the front half: an adapter, a module, or a name for :func:`hf_stitch.load`.
        target: The network of the back half, given in the same way.
        data: Raw samples, in any form that :meth:`hf_stitch.Samples.of` accepts.
        source_layer: The layer at which the source is cut. ``"auto"`` selects the cut with the highest linear CKA to
            the target's cut, on the mean over positions of the training samples (:func:`hf_stitch.compare`).
        target_layer: The layer at which the target is cut. ``"auto"`` selects the cut most similar to the source's; if
            both are ``"auto"``, the most similar pair.
        matcher: The method that fits the map: a name in ``hf_stitch.registries.matchers`` or a matcher object.
        paired_data: Samples for the target, if it takes other samples than the source (the same sentences in another
            language). They need the same ids in the same order as ``data``.
        pooling: Which vectors are mapped: each position (``none``), or one vector per sample (``mean``, ``cls``,
            ``last``, ``flatten``); see :meth:`hf_stitch.Representation.rows`.
        test_size: Held-out samples: a share (float) or a number (int).
        test_data: Separate held-out samples, instead of a split of ``data``.
        task: Task of the stitched model, which determines its class. ``"auto"`` takes the task of the target. ``None``
            builds a model without a head, whose outputs are compared with those of the target.
        align: How positions of texts correspond. ``"tokens"``: both networks have one tokenizer. ``"prefix"``: two
            decoders with different tokenizers. At each token of the target, the source reads the text up to the end of
            that token (:class:`hf_stitch.adapters.prefixes.PrefixAdapter`).
        own: With ``align="prefix"``, whether the map also takes the embedding of each token in the target.
            ``evaluate`` then has a further baseline, ``own``: a map of this embedding alone.
        unpaired: Samples for the source and other samples for the target, of which nobody knows which belong together,
            for matchers that learn from such samples (:class:`hf_stitch.matchers.UnpairedMatcher`).
            ``"seeded_refinement"`` takes the training samples of ``data`` as pairs; ``"unsupervised"`` then reads only
            these samples, and ``data`` only scores the model, its training part left out; but ``"auto"`` layers are
            chosen by the pairs.
        **options: Options of the run (:class:`hf_stitch.running.RunOptions`): ``batch_size``, ``seed``, ``progress``,
            ``accelerator``; and options of the matcher, if it is given by name (``ridge=1.0``, ``rank=16``).

    Returns:
        The stitched model. Its ``evaluation`` attribute holds the scores, its ``stitcher`` property the stitching layer
        as a small artefact to share.

    Raises:
        NotACutError: If a network cannot be cut at the given layer.
        ValueError: If the networks take different kinds of samples, their activations cannot be joined under the
            pooling, the samples of both do not correspond, there are too few samples for the matcher, or labels are not
            classes of the target. Except for too few samples, a run of a single sample finds this before the data are
            read.
        TypeError: If a network is saved activations.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> nets = [Sequential(Linear(4, 8), ReLU(), Linear(8, 2)) for _ in range(2)]
        >>> a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
        >>> hf_stitch.stitch(a, b, torch.randn(200, 4), source_layer="1", target_layer="1").stitch.body.fitted["n"]
        160
    """
    check_choice("pooling", pooling, POOLINGS)
    check_choice("align", align, ALIGN)
    check_name(source_layer=source_layer, target_layer=target_layer)
    with Run.of(stitch, options, WITHOUT_STATE, rest=True) as run:
        processes = run.processes
        check_runs(source=source, target=target)
        a, b = load_on(source, processes.device), load_on(target, processes.device)
        if align == "prefix" and paired_data is not None:
            raise ValueError("with align='prefix' both networks read the same texts: leave out paired_data")
        a = read_by(a, b, align, own)
        fitted_by = registries.matchers.build(matcher, **options)
        first = fitted_by.fitted_first
        lonely = _without_partners(first, unpaired)
        check_meet(a, b, pooling)
        task = task_of(b, task)
        if task == "text-generation" and pooling in POOLED:
            raise ValueError(
                f"pooling={pooling!r} leaves one token per text, so that no next token could be predicted; use "
                "pooling='none'"
            )
        check_causal(fitted_by, task)
        if paired_data is not None and test_data is not None:
            raise ValueError("paired_data is split together with data: leave out test_data")
        given, other = Samples.of(data), None if paired_data is None else Samples.of(paired_data)
        samples = numbered_as(given, getattr(b.model, "config", None)) if task in CLASSIFIES else given
        (train, test, other_train, other_test), recipe = _parts(samples, other, test_data, test_size, run.seed)
        recipe = {
            "matcher": fitted_by.to_dict(), "pooling": pooling,
            **aligned(align, own), "data": given.fingerprint, **recipe,
            **({"unpaired": [side.fingerprint for side in lonely]} if lonely else {}),
            "samples": len(train), "batch_size": run.batch_size, "versions": versions([("matchers", fitted_by.name)]),
        }  # fmt: skip
        networks = {name: each.pinned.weights_hash for name, each in (("source", a), ("target", b))}
        processes.check_same({**recipe, **networks})
        if isinstance(fitted_by, TrainedMatcher):
            fitted_by.check(train, task)
        check_lengths(a, train, test, *(lonely or ())[:1])
        chosen = [
            name for name, layer in (("source_layer", source_layer), ("target_layer", target_layer)) if layer == AUTO
        ]
        if run.planning and chosen:
            source_layer = a.layers[-1] if source_layer == AUTO else source_layer
            target_layer = b.layers[0] if target_layer == AUTO else target_layer
        elif chosen:
            layers_a, layers_b = (
                adapter.layers if layer == AUTO else [layer]
                for adapter, layer in ((a, source_layer), (b, target_layer))
            )
            atlas = compare(
                a, b, train, paired_data=other_train, layers_a=layers_a, layers_b=layers_b, pooling="mean",
                **run.options,
            )  # fmt: skip
            source_layer, target_layer = atlas.best_pair()
            recipe |= dict.fromkeys(chosen, AUTO)
        place = _rehearse(
            a, source_layer, b, target_layer, train, other_train or train, pooling, test if task in CLASSIFIES else None
        )
        if lonely is not None:  # so that errors of these samples occur before all are read, too
            few = (lonely[0].take(1), lonely[1].take(1))
            collect_unpaired(a, b, (source_layer, target_layer), few, pooling, progress=False)
        if run.planning:
            job = f"stitch, {source_layer} → {target_layer}, {len(train)} + {len(test)} samples"
            searching = (["the search for the most similar layers"] if chosen else []) + (
                ["the search for pairs"] if isinstance(first, UnpairedMatcher) else []
            )
            searched = f"{' and '.join(searching)} is not included" if searching else ""
            sides = Sides(a, b, (source_layer,), (target_layer,), pooling, task or "")
            return planned(
                job, sides, [fitted_by], train, test, run, twins=other_train,
                unpaired=lonely, scored=PREDICTORS, left_out=searched,
            )  # fmt: skip
        stitched = join(a, source_layer, place, b, target_layer, task=task, recipe=recipe)
        _name_classes(stitched, test)
        if isinstance(fitted_by, TrainedMatcher):
            fitted_by.rehearse(stitched, train, target=b, paired_data=other_train)

        pair = (source_layer, target_layer)
        reading: Any = {"batch_size": run.batch_size, "progress": run.progress, "processes": processes}
        both: Any = {"target_samples": other_train, **reading}
        rows = None if lonely is None else collect_unpaired(a, b, pair, lonely, pooling, **reading)
        statistics: Statistics | PairedRows
        by_these: tuple[Samples, ...] = (train,)
        if isinstance(first, UnpairedMatcher) and not first.least_pairs and lonely is not None:
            statistics = {}  # pairs are for the scores alone
            by_these = (*by_these, *lonely) if isinstance(fitted_by, TrainedMatcher) else lonely
        elif isinstance(first, RowsMatcher):
            by_these = (*by_these, *(lonely or ()))
            statistics = collect_rows(a, b, pair, train, pooling, **both)
        else:
            statistics = collect(a, b, [pair], train, pooling, **both)[pair]
        baselines: dict[str, StitchingLayer] = {}
        specs = a.spec(source_layer), b.spec(target_layer)
        stitched.stitch = fit_layer(first, statistics, *specs, pooling, unpaired=rows)
        if isinstance(fitted_by, TrainedMatcher):
            stitched.stitch = fitted_by.fit(stitched, train, target=b, paired_data=other_train, progress=run.progress)
        if isinstance(a, PrefixAdapter) and a.own is not None and not isinstance(first, RowsMatcher):
            baselines = _of_own_alone(first, statistics, stitched.stitch, a.own.embedding_dim)
        stitched.config.stitch = stitched.stitch.to_dict()
        if any(True for _ in stitched.stitch.parameters()):  # an identity is fitted to nothing
            stitched.config.recipe = {**recipe, FITTED: ContentSketch.of(*by_these).to_dict()}
        try:
            evaluation = evaluate(
                stitched, test, target=b, paired_data=other_test, baselines=baselines, **run.options,
            )  # fmt: skip
        except ValueError as error:
            if task is not None:
                raise
            unused = ", and the labels of the data are not used" if test.is_labelled else ""
            warnings.warn(f"the stitched model has no scores{unused}: {error}", stacklevel=2)
            return stitched
        stitched.keep_scores(evaluation)
        return stitched


def _without_partners(matcher: Matcher, unpaired: tuple[Any, Any] | None) -> tuple[Samples, Samples] | None:
    """Return the samples of both sides that have no partners, if there are any, and check that they have a use."""
    if unpaired is None:
        if isinstance(matcher, UnpairedMatcher) and matcher.least_pairs:
            raise ValueError(
                f"matcher {matcher.name!r} needs samples without partners: unpaired=(samples of the source, samples of "
                "the target)"
            )
        return None
    if not isinstance(matcher, UnpairedMatcher):
        raise ValueError(
            f"matcher {matcher.name!r} is fitted to pairs alone: leave out unpaired, or use 'seeded_refinement' or "
            "'unsupervised'"
        )
    if not isinstance(unpaired, tuple | list) or len(unpaired) != 2:
        raise ValueError(
            f"unpaired must be two sets of samples (of the source, of the target), got {type(unpaired).__name__}"
        )
    sides = Samples.of(unpaired[0]), Samples.of(unpaired[1])
    for name, side in zip(("source", "target"), sides, strict=True):
        if len(side) < 2:
            raise ValueError(f"unpaired samples of the {name} must be at least 2, got {len(side)}")
    return sides


def _of_own_alone(matcher: Matcher, statistics: Any, layer: StitchingLayer, width: int) -> dict[str, StitchingLayer]:
    """Fit a map of the target's own embedding, the last columns of the rows, which ignores the source."""
    found: Moments = statistics["body"]
    last = slice(found.sxx.shape[0] - width, None)
    own = Moments.of(
        found.n, found.mean_x[last], found.mean_y, found.sxx[last, last], found.syy, found.sxy[last]
    )  # fmt: skip
    fitted = matcher.fit(own) if isinstance(matcher, ClosedFormMatcher) else None
    if not isinstance(fitted, LinearStitch):
        return {}
    weight = torch.zeros(fitted.out_features, layer.widths[0], dtype=fitted.weight.dtype)
    weight[:, last] = fitted.weight.detach()
    return {"own": layer.with_maps(LinearStitch.of(weight=weight, bias=fitted.bias), None)}


def _parts(
    samples: Samples, other: Samples | None, test_data: Any, test_size: float | int, seed: int
) -> tuple[tuple[Samples, Samples, Samples | None, Samples | None], dict[str, Any]]:
    """Return training and test samples, those that are paired with them, and the record of all."""
    recipe: dict[str, Any] = {}
    if other is not None:
        check_same_order(samples, other)
        recipe["paired_data"] = other.fingerprint
    if test_data is None:
        train, test = samples.split(test_size, seed)
        recipe |= {"test_size": test_size, "seed": seed}
    else:
        train, test = samples, Samples.of(test_data)
        recipe["test_data"] = test.fingerprint
    if other is None:
        return (train, test, None, None), recipe
    return (train, test, _likewise(other, samples, train), _likewise(other, samples, test)), recipe


def _name_classes(stitched: StitchedModel, samples: Samples) -> None:
    """Take the names of the classes from the data if the target has none, as networks of timm and of user code."""
    if stitched.task in CLASSIFIES:
        names = class_names(stitched, samples)
        stitched.config.id2label = names
        stitched.config.label2id = {name: index for index, name in names.items()}


def _likewise(other: Samples, samples: Samples, part: Samples) -> Samples:
    """Return the paired samples with the ids of a part of the source's samples, in the same order."""
    place = {id_: index for index, id_ in enumerate(samples.ids)}
    return other.select(place[id_] for id_ in part.ids)


@torch.no_grad()
def _rehearse(
    source: Adapter,
    source_layer: str,
    target: Adapter,
    target_layer: str,
    samples: Samples,
    target_samples: Samples,
    pooling: Pooling,
    labelled: Samples | None,
) -> StitchingLayer:
    """Run one sample through both halves, so that errors occur before all data are read.

    Returns:
        A stitching layer with identity maps between the two cuts.

    Raises:
        ValueError: If inputs have another size than the one for which the network is cut, rows do not correspond, the
            target cannot run on the activations that the pooling leaves, or labels (of ``labelled``) are not classes of
            the target.
    """
    specs = source.spec(source_layer), target.spec(target_layer)
    first, twin = (next(iter(side.batches(1))) for side in (samples, target_samples))
    inputs = target.preprocess(twin.samples)
    x = source.encode(source.preprocess(first.samples), source_layer)[source_layer]
    y = target.encode(inputs, target_layer)[target_layer]
    for side, name, found, spec in (("source", source_layer, x, specs[0]), ("target", target_layer, y, specs[1])):
        if found.spec != spec:
            raise ValueError(
                f"on these samples layer {name!r} of the {side} outputs {found.spec}, but the network is cut for "
                f"{spec}: load it with example_inputs of the size of the samples, or resize the samples"
            )
    paired_rows(x, y, pooling)
    maps = {part: IdentityStitch(*widths) for part, widths in part_widths(*specs, pooling).items()}
    layer = StitchingLayer(*specs, pooling, maps["body"], maps.get("prefix"))
    joined = layer(x)
    try:
        target.decode(joined.replace(values=joined.values.to(y.values.dtype)), target_layer)
    except Exception as error:
        raise ValueError(
            f"the target cannot run from layer {target_layer!r} on the activations that pooling={pooling!r} leaves "
            f"({type(error).__name__}: {error}); use another pooling or layer"
        ) from error
    if labelled is not None:
        check_labels(labelled, logits_of(target.forward(inputs)).shape[-1])
    return layer
