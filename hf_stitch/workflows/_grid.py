"""Every layer of one network stitched into every layer of another: :func:`stitch_grid`."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import nn

from hf_stitch.adapters import Adapter, load_on
from hf_stitch.adapters.compatibility import check_meet
from hf_stitch.analysis.classes import numbered_as, warn_of_other_classes, warn_of_unused_labels
from hf_stitch.analysis.detection.result import Evidence, detect
from hf_stitch.analysis.detection.watching import Seen, check_needs, fit_watch, see_all
from hf_stitch.analysis.grid.figures import differences_from_best, drawn_figures, with_interval
from hf_stitch.analysis.grid.measuring import Cell, Measures, Sides, collect_moments, run_both
from hf_stitch.analysis.grid.plan import planned
from hf_stitch.analysis.grid.residuals import residuals
from hf_stitch.analysis.grid.result import StitchGrid, cell_name
from hf_stitch.analysis.resampling import check_count
from hf_stitch.analysis.scoring import check_labels, head_difference, not_beaten
from hf_stitch.artefacts.joining import join_all
from hf_stitch.data import Samples
from hf_stitch.data.overlap import FITTED, ContentSketch
from hf_stitch.detectors import Detector
from hf_stitch.matchers import Matcher, RowsMatcher, TrainedMatcher
from hf_stitch.matchers.fitting import PairMoments, fit_layer
from hf_stitch.provenance import versions
from hf_stitch.registry import check_choice
from hf_stitch.representation import POOLINGS, Pooling
from hf_stitch.running import Run, RunOptions
from hf_stitch.stitches import IdentityStitch, StitchingLayer
from hf_stitch.stitches.layer import paired_rows, part_widths
from hf_stitch.storage.checkpoint import Checkpoint
from hf_stitch.tasks import CLASSIFIES, logits_of
from hf_stitch.training.loop import DivergedError
from hf_stitch.workflows._held_out import check_far, check_held_out
from hf_stitch.workflows._methods import check_causal, labelled
from hf_stitch.workflows._networks import (
    ALIGN,
    Align,
    aligned,
    check_lengths,
    check_runs,
    read_by,
    scored_task,
    verified_cuts,
)


def stitch_grid(
    a: str | nn.Module | Adapter,
    b: str | nn.Module | Adapter,
    data: Any,
    *,
    test_data: Any = None,
    layers_a: Iterable[str] | None = None,
    layers_b: Iterable[str] | None = None,
    matchers: Iterable[str | Matcher] = ("lstsq",),
    detectors: Iterable[str | Detector] = (),
    auxiliary_data: Any = None,
    far_data: Any = None,
    pooling: Pooling = "none",
    test_size: float | int = 0.2,
    task: str = "auto",
    resamples: int = 1000,
    align: Align = "tokens",
    own: bool = False,
    **options: Unpack[RunOptions],
) -> StitchGrid:
    """Stitch every layer of one network into every layer of another, and score all stitches.

    Each network runs once per batch. For each stitch, only its map and the part of the target after the cut run in
    addition (Balogh and Jelasity 2025, sections 2 and 3). Under ``accelerate launch`` each process takes a part of the
    samples and all processes return the same grid, without any change to the call.

    Args:
        a: The source: an adapter, a module, or a name for :func:`hf_stitch.load`.
        b: The target, given in the same way.
        data: Raw samples to which stitches are fitted, in any form that :meth:`hf_stitch.Samples.of` accepts.
        test_data: Separate held-out samples for the scores, instead of a split of ``data``.
        layers_a: Layers of the source. Default: all its verified cuts (:attr:`hf_stitch.Adapter.layers`).
        layers_b: Layers of the target. Default: all its verified cuts.
        matchers: Names in ``hf_stitch.registries.matchers``, or matcher objects, closed-form or trained. Where one is
            undefined for a pair of layers (too few samples for the width, or its training diverges), its scores are NaN
            and ``StitchGrid.undefined`` has the reason.
        detectors: Names in ``hf_stitch.registries.detectors``, or detectors: how unlike the target's own activations
            are stitched ones? They are fitted to the target's activations of the samples in ``data``, once for each
            layer, for which the target runs once more (more often if its activations take more than 2 GiB). Those that
            learn from stitched activations are fitted to one half of the test samples and score the other; for them, 8
            positions of each test sample are kept in memory and in checkpoints, for each stitch and 16 times for each
            layer of the target: without noise, and with three kinds of it in five doses.
        auxiliary_data: Samples of other data, for detectors that are fitted to the target's activations of such
            (``energy``).
        far_data: Samples unlike those in ``data`` (noise, other motifs), as a control: where a detector does
            not tell these from the test samples, its figures are no evidence. Other ones than ``auxiliary_data``.
        pooling: Which vectors are mapped, as in :func:`hf_stitch.stitch`.
        test_size: Held-out samples: a share (float) or a number (int).
        task: Task of the stitched models. ``"auto"`` takes the task of the target.
        resamples: Number of bootstrap resamples, at least 2. Samples are resampled jointly for all stitches.
        align: How positions of texts correspond, as in :func:`hf_stitch.stitch`: ``"prefix"`` for two decoders with
            different tokenizers.
        own: With ``align="prefix"``, whether maps also take the embedding of each token in the target.
        **options: Options of the run (:class:`hf_stitch.running.RunOptions`): ``batch_size``,
            ``seed``, ``progress``, ``accelerator``, ``checkpoint_dir``.

    Returns:
        The scores of all stitches and of baselines, with intervals. ``grid.stitched(a, b)`` builds one of the stitched
        models.

    Raises:
        NotACutError: If a network cannot be cut at one of the layers.
        TypeError: If ``matchers``, ``detectors`` or layers are a single name.
        ValueError: If the networks take different kinds of samples, the target has no task or its task no logits, a
            layer is named twice, more than 5% of the test samples are also training samples, or of the far samples
            either, activations cannot be joined under the pooling, a detector lacks labels or auxiliary data, there are
            far samples without detectors, a matcher is undefined for all pairs of layers, labels are not classes of the
            target, or the folder contains the state of another grid.
        DivergedError: If the training of all stitches of a matcher diverges.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> nets = [Sequential(Linear(4, 8), ReLU(), Linear(8, 8), ReLU(), Linear(8, 2)) for _ in range(2)]
        >>> a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
        >>> points = hf_stitch.Samples.of(torch.randn(200, 4), label=[0, 1] * 100)
        >>> grid = stitch_grid(a, b, points, layers_a=["1", "3"], layers_b=["1", "3"], task="image-classification")
        >>> grid["lstsq"].shape, grid.n
        ((2, 2), 40)
    """
    check_choice("pooling", pooling, POOLINGS)
    check_choice("align", align, ALIGN)
    with Run.of(stitch_grid, options) as run:
        processes, checkpoint_dir = run.processes, run.checkpoint_dir
        check_runs(a=a, b=b)
        source, target = load_on(a, processes.device), load_on(b, processes.device)
        source = read_by(source, target, align, own)
        chosen, watching = labelled("matchers", matchers), labelled("detectors", detectors)
        if not chosen:
            raise ValueError("matchers must name at least one matcher, got none")
        check_count("resamples", resamples)
        check_meet(source, target, pooling)
        task = scored_task(target, task)
        layers = verified_cuts("layers_a", source, layers_a), verified_cuts("layers_b", target, layers_b)
        train, test = _apart(target, data, test_data, test_size, run.seed)
        if task in CLASSIFIES:
            warn_of_other_classes(test, getattr(target.model, "config", None))
        else:
            warn_of_unused_labels(test, task)
        for label, matcher in chosen.items():
            check_causal(matcher, task)
            if isinstance(matcher.fitted_first, RowsMatcher):
                raise ValueError(
                    f"matcher {label!r} is fitted to rows, and a grid keeps moments only, since rows of all layers "
                    "take too much memory: stitch single pairs with hf_stitch.stitch"
                )
            if isinstance(matcher, TrainedMatcher):
                matcher.check(train, task)
        check_lengths(source, train, test)
        outliers, far = (None if other is None else Samples.of(other) for other in (auxiliary_data, far_data))
        check_needs(watching, train, outliers, far)
        check_far(far, (train, test), detectors=watching)
        sides = Sides(source, target, *layers, pooling, task)
        _rehearse(sides, train, test)
        if run.planning:
            return planned(
                f"stitch_grid, {len(chosen) * len(sides.pairs)} stitches", sides, list(chosen.values()), train, test,
                run, left_out="detectors are not included" if watching else "",
            )  # fmt: skip
        others = {"auxiliary_data": outliers, "far_data": far}
        recipe = _recipe(sides, chosen, watching, train, test, others, run) | aligned(align, own)
        if processes.count > 1:
            recipe["processes"] = processes.count
            processes.check_same(recipe)
        with ExitStack() as stack:
            folder = Path(checkpoint_dir or stack.enter_context(tempfile.TemporaryDirectory()))
            state = Checkpoint(folder, processes.rank, lasting=checkpoint_dir is not None)
            state.begin(recipe, dict)
            moments = collect_moments(sides, train, state, len(train) + len(test), run)
            kept = {f"moments.{key}": tensor for key, tensor in moments.state_dict().items()}
            moments.all_reduce(processes)
            fitted = {label: _fit(sides, matcher, moments) for label, matcher in chosen.items()}
            for number, (label, matcher) in enumerate(chosen.items()):
                if isinstance(matcher, TrainedMatcher):
                    place = folder / f"trained-{number}"
                    fitted[label] = _train(
                        sides, matcher, fitted[label], train, place if checkpoint_dir else None, run.progress
                    )
            stitches: dict[Cell, StitchingLayer] = {}
            undefined: dict[str, str] = {}
            for label, found in fitted.items():
                for (la, lb), layer in found.items():
                    if isinstance(layer, str):
                        undefined[cell_name(label, la, lb)] = layer
                    else:
                        stitches[label, la, lb] = layer
            alone = head_difference(source, target, task) == ""
            means = {lb: _mean_only(sides, moments, lb) for lb in sides.layers_b}
            left = residuals(sides, moments, train, run.seed) if watching else None
            watch = fit_watch(
                watching, target, sides.layers_b, train, pooling, run, outliers=outliers, residuals=left,
            )  # fmt: skip
            measures = Measures(sides, stitches, test, with_source=alone, means=means, watch=watch)
            measures.collect(state, len(train), kept, run)
        # Figures are computed anew from the state, which does not depend on these.
        recipe |= {"resamples": resamples, "test_size": test_size if test_data is None else None}
        grid = _scored(measures, tuple(chosen), undefined, recipe, resamples, run.seed)
        return _watched(grid, measures, train, far, run) if watching else grid


def _apart(target: Adapter, data: Any, test_data: Any, test_size: float | int, seed: int) -> tuple[Samples, Samples]:
    """Return training and test samples, with the classes numbered as those of the target."""
    classes = getattr(target.model, "config", None)
    samples = numbered_as(Samples.of(data), classes)
    if test_data is None:
        return samples.split(test_size, seed)
    test = numbered_as(Samples.of(test_data), classes)
    check_held_out(samples, test)
    return samples, test


def _recipe(
    sides: Sides,
    matchers: Mapping[str, Matcher],
    detectors: Mapping[str, Detector],
    train: Samples,
    test: Samples,
    others: Mapping[str, Samples | None],
    run: Run,
) -> dict[str, Any]:
    """Return what determines the scores, as JSON values."""
    described = {
        "a": sides.source.pinned.public.to_dict(), "b": sides.target.pinned.public.to_dict(),
        "layers_a": sides.layers_a, "layers_b": sides.layers_b, "pooling": sides.pooling, "task": sides.task,
        "matchers": {label: matcher.to_dict() for label, matcher in matchers.items()},
        "detectors": {label: detector.to_dict() for label, detector in detectors.items()},
        "data": train.fingerprint, "samples": len(train), "test_data": test.fingerprint,
        **{name: None if samples is None else samples.fingerprint for name, samples in others.items()},
        "batch_size": run.batch_size,
        "seed": run.seed, "versions": versions(
            (kind, entry.name) for kind, found in (("matchers", matchers), ("detectors", detectors))
            for entry in found.values()
        ),
        FITTED: ContentSketch.of(train).to_dict(),
    }  # fmt: skip
    recipe: dict[str, Any] = json.loads(json.dumps(described))
    return recipe


@torch.no_grad()
def _rehearse(sides: Sides, train: Samples, test: Samples) -> None:
    """Run one sample through both networks and every cut of the target, so that errors occur before all data are read.

    Raises:
        ValueError: If the sample has another size than the one for which a network is cut, rows do not correspond, the
            target cannot run on what the pooling leaves, or labels are not classes of the target.
    """
    found = run_both(sides, next(iter(train.batches(1))), complete=True)
    for name, adapter, representations in (
        ("source", sides.source, found.x),
        ("target", sides.target, found.y),
    ):
        for layer, representation in representations.items():
            if representation.spec != adapter.spec(layer):
                raise ValueError(
                    f"on these samples layer {layer!r} of the {name} outputs {representation.spec}, but the network is "
                    f"cut for {adapter.spec(layer)}: load it with example_inputs of the size of the samples"
                )
    for la, lb in sides.pairs:
        paired_rows(found.x[la], found.y[lb], sides.pooling)
    la = sides.layers_a[0]
    for lb in sides.layers_b:
        mapped = _identity(sides, la, lb)(found.x[la])
        try:
            sides.target.decode(mapped.replace(values=mapped.values.to(found.y[lb].values.dtype)), lb)
        except Exception as error:
            raise ValueError(
                f"the target cannot run from layer {lb!r} on the activations that pooling={sides.pooling!r} leaves "
                f"({type(error).__name__}: {error}); use another pooling, or other layers_b"
            ) from error
    if not sides.is_language_model:
        check_labels(test, logits_of(found.target).shape[-1])


def _identity(sides: Sides, la: str, lb: str, means: Mapping[str, torch.Tensor] | None = None) -> StitchingLayer:
    specs = sides.source.spec(la), sides.target.spec(lb)
    maps = {part: IdentityStitch(*widths) for part, widths in part_widths(*specs, sides.pooling).items()}
    return StitchingLayer(*specs, sides.pooling, maps["body"], maps.get("prefix"), means)


def _mean_only(sides: Sides, moments: PairMoments, lb: str) -> StitchingLayer:
    """Return the stitching layer that outputs the mean of a layer of the target, whether or not a map is defined."""
    la = sides.layers_a[0]
    means = {part: found.mean_y for part, found in moments.of(la, lb).items()}
    return _identity(sides, la, lb, means).mean_only().eval()


def _fit(sides: Sides, matcher: Matcher, moments: PairMoments) -> dict[tuple[str, str], StitchingLayer | str]:
    """Fit all pairs of layers in closed form: (layer of a, layer of b) -> stitching layer, or why it is undefined."""
    first = matcher.fitted_first
    found: dict[tuple[str, str], StitchingLayer | str] = {}
    for la, lb in sides.pairs:
        specs = sides.source.spec(la), sides.target.spec(lb)
        try:
            found[la, lb] = fit_layer(first, moments.of(la, lb), *specs, sides.pooling)
        except (ValueError, torch.linalg.LinAlgError) as error:
            found[la, lb] = str(error)
    if all(isinstance(layer, str) for layer in found.values()):
        raise ValueError(f"matcher {matcher.label} is undefined for all pairs of layers: {next(iter(found.values()))}")
    return found


def _train(
    sides: Sides,
    matcher: TrainedMatcher,
    initial: Mapping[tuple[str, str], StitchingLayer | str],
    samples: Samples,
    folder: Path | None,
    progress: bool,
) -> dict[tuple[str, str], StitchingLayer | str]:
    """Train all stitches of a matcher in one call, which computes the activations of the source once.

    Returns:
        (layer of a, layer of b) -> stitching layer, or why it is undefined: a stitch that diverges spares the others.

    Raises:
        DivergedError: If no stitch is left.
    """
    defined = {pair: layer for pair, layer in initial.items() if isinstance(layer, StitchingLayer)}
    models = join_all(sides.source, sides.target, defined, task=sides.task)
    try:
        found: list[StitchingLayer | str] = matcher.fit(
            list(models.values()), samples, target=sides.target, checkpoint_dir=folder, progress=progress
        )
    except DivergedError as error:
        found = [error.reasons[i] if layer is None else layer for i, layer in enumerate(error.trained)]
        if all(isinstance(layer, str) for layer in found):
            first = cell_name(matcher.label, *next(iter(models)))
            raise DivergedError(
                f"no stitch of the matcher is left, first {first}: {error.reasons.get(0, error)}", error.reasons
            ) from error
    return {**initial, **dict(zip(models, found, strict=True))}


def _scored(
    measures: Measures,
    matchers: Sequence[str],
    undefined: Mapping[str, str],
    recipe: Mapping[str, Any],
    resamples: int,
    seed: int,
) -> StitchGrid:
    sides, arrays = measures.sides, measures.arrays
    arrays |= _chance(measures)
    columns = [sides.layers_b.index(lb) for _, _, lb in measures.stitches]
    baselines = tuple(name for name in ("mean_only", "source", "target", "chance") if f"{name}.agreement" in arrays)
    drawn = drawn_figures(arrays, arrays["norm"][:, columns], ("stitched", *baselines), resamples=resamples, seed=seed)
    shape = (len(sides.layers_a), len(sides.layers_b))
    scores: dict[str, dict[str, Any]] = {}
    p_values: dict[str, dict[str, Any]] = {}
    for label in matchers:
        scores[label], p_values[label] = {}, {}
        for figure, values in drawn["stitched"].items():
            cells = np.full((len(values), *shape), np.nan)
            for place, (matcher, la, lb) in enumerate(measures.stitches):
                if matcher == label:
                    cells[:, sides.layers_a.index(la), sides.layers_b.index(lb)] = values[:, place]
            scores[label][figure] = with_interval(cells)
            p_values[label][figure] = differences_from_best(cells, figure)
    no_better = [
        cell_name(*cell)
        for place, cell in enumerate(measures.stitches)
        if not_beaten(
            {
                "stitched": {figure: values[:, place] for figure, values in drawn["stitched"].items()},
                "mean_only": {figure: values[:, columns[place]] for figure, values in drawn["mean_only"].items()},
                **{name: drawn[name] for name in ("chance",) if name in drawn},
            }
        )
    ]
    grid = StitchGrid(
        scores,
        {name: {figure: with_interval(values) for figure, values in drawn[name].items()} for name in baselines},
        p_values, sides.layers_a, sides.layers_b, sides.task, sides.pooling, len(measures.samples), undefined=undefined,
        recipe=recipe, no_better=tuple(no_better), stitches=measures.stitches, networks=(sides.source, sides.target),
    )  # fmt: skip
    if no_better:
        warnings.warn(grid.cautions[0], stacklevel=3)
    return grid


def _watched(
    grid: StitchGrid,
    measures: Measures,
    train: Samples,
    far: Samples | None,
    run: Run,
) -> StitchGrid:
    """Add what the detectors found."""
    sides, watch = measures.sides, measures.watch
    seen: Mapping[str, Seen] = {}
    if far is not None:
        seen = see_all(watch, sides.target, far, sides.pooling, run)
    evidence = Evidence(
        measures.samples.ids,
        {lb: measures.seen("own", j) for j, lb in enumerate(sides.layers_b)},
        {lb: measures.seen("doses", j) for j, lb in enumerate(sides.layers_b)},
        {cell: measures.seen("stitched", place) for place, cell in enumerate(measures.stitches)},
        train.ids, seen, () if far is None else far.ids,
    )  # fmt: skip
    found = {
        label: detect(watch, label, sides.layers_a, evidence, two_sided=detector.two_sided)
        for label, detector in watch.detectors.items()
    }
    return replace(grid, detections=found)


def _chance(measures: Measures) -> dict[str, Any]:
    """Measures of the predictor that ignores the input: it always predicts the most frequent class."""
    labels = None if measures.sides.is_language_model else measures.samples.labels
    if labels is None:
        return {}
    frequent = np.bincount(labels).argmax()
    predicted = measures.arrays["target.class"]
    return {
        "chance.right": (np.asarray(labels) == frequent).astype(float),
        "chance.agreement": (predicted == frequent).astype(float),
    }
