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
from torch import nn

from hf_stitch.adapters import Adapter
from hf_stitch.analysis.detection.result import Evidence, detect
from hf_stitch.analysis.detection.watching import Seen, check_needs, fit_watch, see_all
from hf_stitch.analysis.grid.figures import differences_from_best, with_interval
from hf_stitch.analysis.grid.measuring import Labelled, Measures
from hf_stitch.analysis.grid.plan import planned
from hf_stitch.analysis.grid.residuals import residuals
from hf_stitch.analysis.grid.result import StitchGrid, cell_name
from hf_stitch.analysis.resampling import check_count
from hf_stitch.analysis.scoring import head_difference, not_beaten
from hf_stitch.data import Samples
from hf_stitch.data.overlap import FITTED, ContentSketch
from hf_stitch.detectors import Detector
from hf_stitch.matchers import Matcher
from hf_stitch.pairs import CollectedPair, Pair, Split
from hf_stitch.pairs.pair import Align
from hf_stitch.provenance import versions
from hf_stitch.representation import Pooling
from hf_stitch.running import Run, RunOptions
from hf_stitch.stitches import StitchingLayer
from hf_stitch.storage.checkpoint import Checkpoint
from hf_stitch.tasks.kinds import task_named
from hf_stitch.workflows._held_out import check_far, check_held_out
from hf_stitch.workflows._methods import labelled
from hf_stitch.workflows._networks import check_runs


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
    with Run.of(stitch_grid, options) as run:
        check_runs(a=a, b=b)
        chosen, watching = labelled("matchers", matchers), labelled("detectors", detectors)
        if not chosen:
            raise ValueError("matchers must name at least one matcher, got none")
        check_count("resamples", resamples)
        pair = Pair.of(run, a, b, pooling=pooling, task=task, scored=True, align=align, own=own)
        pair = pair.over(layers_a, layers_b)
        samples = Split.of(pair, run, data, test_data=test_data, test_size=test_size)
        train, test = samples.train.a, samples.test.a
        if test_data is not None:
            check_held_out(train, test)
        task_named(pair.task).warn_of_labels(test, getattr(pair.target.model, "config", None))
        for matcher in chosen.values():
            matcher.check(pair, samples)
        outliers, far = (None if other is None else Samples.of(other) for other in (auxiliary_data, far_data))
        check_needs(watching, train, outliers, far)
        check_far(far, (train, test), detectors=watching)
        pair.rehearse(samples.train, test)
        if run.planning:
            return planned(
                f"stitch_grid, {len(chosen) * len(pair.cells)} stitches", pair, samples, run, list(chosen.values()),
                left_out="detectors are not included" if watching else "",
            )  # fmt: skip
        recipe = _recipe(pair, chosen, watching, samples, {"auxiliary_data": outliers, "far_data": far}, run)
        if run.processes.count > 1:
            recipe["processes"] = run.processes.count
            run.processes.check_same(recipe)
        with ExitStack() as stack:
            folder = run.checkpoint_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            state = Checkpoint(folder, run.processes.rank, lasting=run.checkpoint_dir is not None)
            state.begin(recipe, dict)
            collected = CollectedPair(pair, samples.train, run, state=state)
            stitches, undefined = _matched(chosen, collected)
            means = {lb: _mean_only(collected, lb) for lb in pair.layers_b}
            watch = fit_watch(
                watching, pair.target, pair.layers_b, train, pooling, run, outliers=outliers,
                residuals=residuals(collected) if watching else None,
            )  # fmt: skip
            alone = head_difference(pair.source, pair.target, str(pair.task)) == ""
            measures = Measures(pair, stitches, test, with_source=alone, means=means, watch=watch)
            measures.collect(state, len(train), collected.sums, run)
        # Figures are computed anew from the state, which does not depend on these.
        recipe |= {"resamples": resamples, "test_size": test_size if test_data is None else None}
        grid = _scored(measures, tuple(chosen), undefined, recipe, resamples, run.seed)
        return _watched(grid, measures, train, far, run) if watching else grid


def _recipe(
    pair: Pair,
    matchers: Mapping[str, Matcher],
    detectors: Mapping[str, Detector],
    data: Split,
    others: Mapping[str, Samples | None],
    run: Run,
) -> dict[str, Any]:
    """Return what determines the scores, as JSON values."""
    train = data.train.a
    described = {
        "a": pair.source.pinned.public.to_dict(), "b": pair.target.pinned.public.to_dict(),
        "layers_a": pair.layers_a, "layers_b": pair.layers_b, **pair.record, "task": pair.task,
        "matchers": {label: matcher.to_dict() for label, matcher in matchers.items()},
        "detectors": {label: detector.to_dict() for label, detector in detectors.items()},
        "data": train.fingerprint, "samples": len(train), "test_data": data.test.a.fingerprint,
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


def _matched(
    matchers: Mapping[str, Matcher], collected: CollectedPair
) -> tuple[dict[Labelled, StitchingLayer], dict[str, str]]:
    """Return the stitches of all matchers, and why others are undefined."""
    stitches: dict[Labelled, StitchingLayer] = {}
    undefined: dict[str, str] = {}
    for number, (label, matcher) in enumerate(matchers.items()):
        kept = collected.run.checkpoint_dir
        found = matcher.match(collected, None if kept is None else kept / f"trained-{number}")
        if not found.layers:
            first = next(iter(found.undefined.values()))
            raise ValueError(f"matcher {label} is undefined for all pairs of layers: {first}")
        stitches |= {(label, *cell): layer for cell, layer in found.layers.items()}
        undefined |= {cell_name(label, *cell): str(error) for cell, error in found.undefined.items()}
    collected.pair.kept.clear()
    return stitches, undefined


def _mean_only(collected: CollectedPair, lb: str) -> StitchingLayer:
    """Return the stitching layer that outputs the mean of a layer of the target, whether or not a map is defined."""
    cell = collected.pair.layers_a[0], lb
    means = {part: found.mean_y for part, found in collected.moments(cell).items()}
    return collected.pair.identity(cell, means).mean_only().eval()


def _scored(
    measures: Measures,
    matchers: Sequence[str],
    undefined: Mapping[str, str],
    recipe: Mapping[str, Any],
    resamples: int,
    seed: int,
) -> StitchGrid:
    pair, task = measures.pair, measures.task
    drawn = {
        who: {name: row[name] for name in (*task.compared, "structural_error") if name in row}
        for who, row in task.drawn(measures.predictors, resamples=resamples, seed=seed).items()
    }
    shape = (len(pair.layers_a), len(pair.layers_b))
    scores: dict[str, dict[str, Any]] = {}
    p_values: dict[str, dict[str, Any]] = {}
    for label in matchers:
        scores[label], p_values[label] = {}, {}
        for figure, values in drawn["stitched"].items():
            cells = np.full((len(values), *shape), np.nan)
            for place, (matcher, la, lb) in enumerate(measures.stitches):
                if matcher == label:
                    cells[:, pair.layers_a.index(la), pair.layers_b.index(lb)] = values[:, place]
            scores[label][figure] = with_interval(cells)
            p_values[label][figure] = differences_from_best(cells, task.figures.get(figure, False))
    no_better = [
        cell_name(*cell)
        for place, cell in enumerate(measures.stitches)
        if not_beaten(
            task,
            {
                "stitched": {figure: values[:, place] for figure, values in drawn["stitched"].items()},
                "mean_only": {
                    figure: values[:, pair.layers_b.index(cell[2])] for figure, values in drawn["mean_only"].items()
                },
                **{name: drawn[name] for name in ("chance",) if name in drawn},
            },
        )
    ]
    grid = StitchGrid(
        scores,
        {
            name: {figure: with_interval(values) for figure, values in row.items()}
            for name, row in drawn.items()
            if name != "stitched"
        },
        p_values, pair.layers_a, pair.layers_b, str(pair.task), pair.pooling, len(measures.samples),
        undefined=undefined, recipe=recipe, no_better=tuple(no_better), stitches=measures.stitches,
        networks=(pair.source, pair.target),
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
    pair, watch = measures.pair, measures.watch
    seen: Mapping[str, Seen] = {}
    if far is not None:
        seen = see_all(watch, pair.target, far, pair.pooling, run)
    evidence = Evidence(
        measures.samples.ids,
        {lb: measures.seen("own", j) for j, lb in enumerate(pair.layers_b)},
        {lb: measures.seen("doses", j) for j, lb in enumerate(pair.layers_b)},
        {cell: measures.seen("stitched", place) for place, cell in enumerate(measures.stitches)},
        train.ids, seen, () if far is None else far.ids,
    )  # fmt: skip
    found = {
        label: detect(watch, label, pair.layers_a, evidence, two_sided=detector.two_sided)
        for label, detector in watch.detectors.items()
    }
    return replace(grid, detections=found)
