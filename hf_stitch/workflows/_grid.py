"""Every layer of one network stitched into every layer of another: :func:`stitch_grid`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Unpack

from hf_stitch.analysis.detection.evidence import Cell, Watchers
from hf_stitch.analysis.detection.recording import residuals
from hf_stitch.analysis.detection.result import MIN_AUROC
from hf_stitch.analysis.grid import StitchGrid, cell_name, grid_of, mean_name
from hf_stitch.analysis.planning import planned
from hf_stitch.data import Data
from hf_stitch.data.overlap import FITTED, ContentSketch
from hf_stitch.detectors import Detector
from hf_stitch.matchers import Matcher
from hf_stitch.options import Several, Within, checked
from hf_stitch.pairs import CollectedPair, Pair, Split
from hf_stitch.pairs.pair import Align
from hf_stitch.provenance import versions
from hf_stitch.reference import short_names
from hf_stitch.registry import registries
from hf_stitch.representation import Pooling
from hf_stitch.running import Run, RunOptions
from hf_stitch.scoring.halves import ONLY, HalvesOfPair, Predictor, head_difference
from hf_stitch.scoring.passing import Scoring, State
from hf_stitch.stitches import StitchingLayer
from hf_stitch.storage.checkpoint import Checkpoint
from hf_stitch.tasks.heads import task_named
from hf_stitch.workflows._checks import Named, Runs, check_held_out


@checked
def stitch_grid(
    a: Runs,
    b: Runs,
    data: Data,
    *,
    test_data: Data | None = None,
    layers_a: Iterable[str] | None = None,
    layers_b: Iterable[str] | None = None,
    matchers: Iterable[Named | Matcher] = ("lstsq",),
    detectors: Iterable[Named | Detector] = (),
    auxiliary_data: Data | None = None,
    far_data: Data | None = None,
    min_auroc: Annotated[float, Within(0, 1)] = MIN_AUROC,
    pooling: Pooling = "none",
    test_size: float | int | None = None,
    task: str = "auto",
    resamples: Several = 1000,
    align: Align = "tokens",
    own: bool = False,
    **options: Unpack[RunOptions],
) -> StitchGrid:
    """Stitch every layer of one network into every layer of another, and score all stitches.

    Each network runs once per batch. Each stitch adds only its map and the part of the target after the cut (Balogh and
    Jelasity 2025, sections 2 and 3).

    Args:
        a: The source: an adapter, a module, or a name for :func:`hf_stitch.load`.
        b: The target, in the same form.
        data: Raw samples to fit the stitches, in any form that :meth:`hf_stitch.Samples.of` accepts.
        test_data: Separate held-out samples for the scores, instead of a split of ``data``.
        layers_a: Layers of the source. Default: all its verified cuts (:attr:`hf_stitch.Adapter.layers`).
        layers_b: Layers of the target. Default: all its verified cuts.
        matchers: Matchers, closed-form or trained: names in ``hf_stitch.registries.matchers``, or objects. If a matcher
            is undefined for a pair of layers (too few samples for the width, or diverging training), its scores are NaN
            and ``StitchGrid.undefined`` has the reason.
        detectors: Detectors of stitched activations that are unlike the target's own: names in
            ``hf_stitch.registries.detectors``, or objects. They are fitted to the target's activations of ``data``,
            once for each layer. The target runs once more for this (more often for activations above 2 GiB). Detectors
            that learn from stitched activations are fitted to one half of the test samples and score the second half.
            They keep 8 positions of each test sample in memory and in checkpoints, for each stitch and 16 times for
            each layer of the target: without noise, and with three kinds of noise in five doses.
        auxiliary_data: Samples of another dataset, for detectors that are also fitted to such samples (``energy``).
        far_data: Samples unlike ``data`` (noise, other motifs), as a control: a detector must distinguish these from
            the test samples with an AUROC of .9, or its figures are NaN. They must differ from ``auxiliary_data``.
        min_auroc: AUROC that a detector must reach on coloured noise as large as the target's activations; below, its
            figures at this layer are NaN. 0 turns off all controls of detectors: no figure becomes NaN.
        pooling: Which vectors are mapped, as in :func:`hf_stitch.stitch`.
        test_size: Held-out samples of ``data``: a share below 1 (by default 0.2), or their number.
        task: Task of the stitched models. ``"auto"`` uses the task of the target.
        resamples: Number of bootstrap resamples, at least 2. Samples are resampled jointly for all stitches.
        align: How positions of texts correspond, as in :func:`hf_stitch.stitch`: ``"prefix"`` for two decoders with
            different tokenizers.
        own: With ``align="prefix"``, whether maps also use the embedding of each token in the target.
        **options: Options of the run (:class:`hf_stitch.running.RunOptions`): ``batch_size``,
            ``seed``, ``progress``, ``accelerator``, ``checkpoint_dir``.

    Raises:
        NotACutError: If a network cannot be cut at one of the layers.
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
        matchers_by_label = registries.matchers.build_all(matchers, needed=True)
        detectors_by_name = registries.detectors.build_all(detectors)
        pair = Pair.of(run, a, b, pooling=pooling, task=task, scored=True, align=align, own=own)
        pair = pair.over(layers_a, layers_b)
        samples = Split.of(pair, run, data, test_data=test_data, test_size=test_size)
        train, test = samples.train.a, samples.test.a
        if test_data is not None:
            check_held_out(train, test)
        task_named(pair.task).warn_of_labels(test, getattr(pair.target.model, "config", None))
        for matcher in matchers_by_label.values():
            matcher.check(pair, samples)
        watchers = Watchers.of(detectors_by_name, train, test, auxiliary_data, far_data)
        pair.rehearse(samples.train, test)
        if run.planning:
            job = f"stitch_grid, {len(matchers_by_label) * len(pair.cells)} stitches"
            left_out = "detectors are not included" if detectors_by_name else ""
            return planned(job, pair, samples, run, list(matchers_by_label.values()), left_out=left_out)
        recipe = _recipe(pair, matchers_by_label, watchers, samples, run)
        with _checkpoint(recipe, run) as checkpoint:
            collected = CollectedPair(pair, samples.train, run, state=checkpoint)
            stitches, undefined = _matched(matchers_by_label, collected)
            watchers = watchers.fitted(
                pair.target, {ONLY: [pooling]}, {ONLY: pair.layers_b}, run, task=task_named(pair.task),
                residuals=residuals(collected) if detectors_by_name else None,
            )  # fmt: skip
            scoring = _scoring(collected, stitches, watchers)
            measured = scoring.run(samples.test, run, State(checkpoint, len(train), collected.sums))
        # The checkpoint does not depend on these options: figures are always recomputed from it.
        recipe |= {"resamples": resamples, "test_size": samples.record.get("test_size"), "names": _names(pair)}
        grid = grid_of(pair, measured, stitches, undefined, recipe, len(test), resamples, run.seed)
        cells = {(ONLY, cell_name(*cell)): cell for cell in stitches}
        detections = watchers.detections(measured.seen, test.ids, cells, pair.layers_a, min_auroc)
        return replace(grid, detections=detections.get(pooling, {}))


@contextmanager
def _checkpoint(recipe: Mapping[str, Any], run: Run) -> Iterator[Checkpoint]:
    """Begin the job, or continue from the checkpoint of an interrupted job."""
    if run.processes.count > 1:
        run.processes.check_same(recipe)  # raises an error if the processes run different jobs
    with ExitStack() as stack:
        folder = run.checkpoint_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkpoint = Checkpoint(folder, run.processes.rank, lasting=run.checkpoint_dir is not None)
        checkpoint.begin(recipe, dict)
        yield checkpoint


def _names(pair: Pair) -> dict[str, str]:
    """Return short names for networks from local folders, because their paths are not recorded."""
    references = {side: network.pinned for side, network in (("a", pair.source), ("b", pair.target))}
    local = {side: str(reference.id) for side, reference in references.items() if reference.is_local}
    names = short_names(local.values())
    return {side: names[path] for side, path in local.items()}


def _recipe(pair: Pair, matchers: Mapping[str, Matcher], watchers: Watchers, data: Split, run: Run) -> dict[str, Any]:
    train = data.train.a
    record = {
        "a": pair.source.pinned.public.to_dict(), "b": pair.target.pinned.public.to_dict(),
        "layers_a": pair.layers_a, "layers_b": pair.layers_b, **pair.record, "task": pair.task,
        "matchers": {label: matcher.to_dict() for label, matcher in matchers.items()},
        "data": train.fingerprint, "samples": len(train), "test_data": data.test.a.fingerprint,
        **watchers.record, "batch_size": run.batch_size,
        "seed": run.seed, "versions": versions(
            (kind, method.name) for kind, methods in (("matchers", matchers), ("detectors", watchers.detectors))
            for method in methods.values()
        ),
        FITTED: ContentSketch.of(train).to_dict(),
    }  # fmt: skip
    recipe: dict[str, Any] = json.loads(json.dumps(record))
    if run.processes.count > 1:
        recipe["processes"] = run.processes.count
    return recipe


def _matched(
    matchers: Mapping[str, Matcher], collected: CollectedPair
) -> tuple[dict[Cell, StitchingLayer], dict[str, str]]:
    stitches: dict[Cell, StitchingLayer] = {}
    undefined: dict[str, str] = {}
    for number, (label, matcher) in enumerate(matchers.items()):
        folder = collected.run.checkpoint_dir
        matched = matcher.match(collected, None if folder is None else folder / f"trained-{number}")
        if not matched.layers:
            first = next(iter(matched.undefined.values()))
            raise ValueError(f"matcher {label} is undefined for all pairs of layers: {first}")
        stitches |= {(label, *cell): layer for cell, layer in matched.layers.items()}
        undefined |= {cell_name(label, *cell): str(error) for cell, error in matched.undefined.items()}
    collected.pair.kept.clear()  # frees the copies of halves that trained matchers have made
    return stitches, undefined


def _scoring(collected: CollectedPair, stitches: Mapping[Cell, StitchingLayer], watchers: Watchers) -> Scoring:
    pair, task = collected.pair, task_named(collected.pair.task).about(collected.pair.target)
    predictors = [Predictor(cell_name(*cell), *cell[1:], layer) for cell, layer in stitches.items()]
    la = pair.layers_a[0]
    for lb in pair.layers_b:  # the mean of a layer of the target, whether or not a map is defined
        means = {part: moments.mean_y for part, moments in collected.moments((la, lb)).items()}
        mean_only = pair.identity((la, lb), means).mean_only().eval()
        predictors.append(Predictor(mean_name(lb), la, lb, mean_only, constant=True))  # the same for every source layer
    with_source = not head_difference(pair.source, pair.target, str(pair.task))  # the reason is empty: comparable heads
    halves = {ONLY: HalvesOfPair(pair, with_source=with_source)}
    return Scoring(pair.target, halves, predictors, task, watch=watchers, measures=task.kept)
