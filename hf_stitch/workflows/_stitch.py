"""Stitching of two networks, from raw samples to a scored model: :func:`stitch`."""

from __future__ import annotations

from typing import Any

from hf_stitch.analysis.evaluation import class_names
from hf_stitch.analysis.planning import planned
from hf_stitch.artefacts.joining import join_all
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Data, PairedSamples, Samples
from hf_stitch.data.overlap import FITTED, ContentSketch
from hf_stitch.matchers import Matcher
from hf_stitch.options import checked
from hf_stitch.pairs import CollectedPair, Pair, Split
from hf_stitch.pairs.pair import Align
from hf_stitch.printing import warn
from hf_stitch.provenance import versions
from hf_stitch.registry import registries
from hf_stitch.representation import Pooling
from hf_stitch.running import WITHOUT_STATE, Run
from hf_stitch.stitches import StitchingLayer
from hf_stitch.tasks.heads import task_named
from hf_stitch.workflows._checks import Named, Runs
from hf_stitch.workflows._compare import compare
from hf_stitch.workflows._evaluate import evaluate

AUTO = "auto"
"""Value of ``source_layer`` and ``target_layer`` that selects the most similar layer."""

PREDICTORS = 3
"""Number of predictors that run the target's back half to score a stitch: the stitch, the identity, the mean only."""


@checked
def stitch(
    source: Runs, target: Runs, data: Data, *, source_layer: str = AUTO, target_layer: str = AUTO,
    matcher: Named | Matcher = "lstsq", paired_data: Data | None = None, pooling: Pooling = "none",
    test_size: float | int | None = None, test_data: Data | None = None, task: str | None = "auto",
    align: Align = "tokens", own: bool = False, unpaired: tuple[Data, Data] | None = None, **options: Any,
) -> StitchedModel:  # fmt: skip
    """Stitch two networks: run the source up to a layer, map its activations, and continue in the target.

    The stitching layer between the two halves is fitted on a training split and scored on the held-out split, compared
    with baselines: the identity, the target's mean activations, the source and the target alone, and chance
    (:func:`hf_stitch.evaluate`).

    Args:
        source: The network of the front half: an adapter, a module, or a name for :func:`hf_stitch.load`.
        target: The network of the back half, in the same form.
        data: Raw samples, in any form that :meth:`hf_stitch.Samples.of` accepts.
        source_layer: The cut of the source; ``"auto"`` selects the cut with the highest linear CKA to the target's cut,
            on the mean over positions of the training samples (:func:`hf_stitch.compare`).
        target_layer: The cut of the target; ``"auto"`` selects the cut most similar to the source's; if both are
            ``"auto"``, the most similar pair.
        matcher: The method that fits the map: a name in ``hf_stitch.registries.matchers`` or a matcher object.
        paired_data: Samples for the target, if they differ from the samples for the source (the same sentences in
            another language), with the same ids in the same order as ``data``.
        pooling: Which vectors are mapped: each position (``none``), or one vector per sample (``mean``, ``cls``,
            ``last``, ``flatten``); see :meth:`hf_stitch.Representation.rows`.
        test_size: Held-out samples of ``data``: a share below 1 (by default 0.2), or their number.
        test_data: Separate held-out samples, instead of a split of ``data``.
        task: Task of the stitched model, which determines its class. ``"auto"`` uses the task of the target. ``None``
            builds a model without a head; its outputs are compared with the outputs of the target.
        align: How positions of texts correspond: ``"tokens"`` if both networks share a tokenizer, ``"prefix"`` for two
            decoders with different tokenizers. At each token of the target, the source reads the text up to the end of
            that token (:class:`hf_stitch.adapters.prefixes.PrefixAdapter`).
        own: With ``align="prefix"``, whether the map also uses the embedding of each token in the target. ``evaluate``
            then has a further baseline, ``own``: a map of this embedding alone.
        unpaired: Samples for the source and other samples for the target without known pairs, for matchers that learn
            from such samples (:class:`hf_stitch.matchers.UnpairedMatcher`). ``"seeded_refinement"`` uses the training
            samples of ``data`` as pairs. ``"unsupervised"`` uses only the unpaired samples: the test part of ``data``
            scores the model, and only the choice of ``"auto"`` layers uses the training part.
        **options: Options of the run (:class:`hf_stitch.running.RunOptions`): ``batch_size``, ``seed``, ``progress``,
            ``accelerator``; and options of the matcher, if ``matcher`` is a name (``ridge=1.0``, ``rank=16``).

    Returns:
        The stitched model. Its ``evaluation`` attribute contains the scores, its ``stitcher`` property the stitching
        layer as a small artefact to share.

    Raises:
        NotACutError: If a network cannot be cut at the layer.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> nets = [Sequential(Linear(4, 8), ReLU(), Linear(8, 2)) for _ in range(2)]
        >>> a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 4)) for net in nets)
        >>> hf_stitch.stitch(a, b, torch.randn(200, 4), source_layer="1", target_layer="1").stitch.body.fitted["n"]
        160
    """
    with Run.of(stitch, options, WITHOUT_STATE, rest=True) as run:
        method = registries.matchers.build(matcher, **options)
        pair = Pair.of(run, source, target, pooling=pooling, task=task, align=align, own=own)
        samples = Split.of(
            pair, run, data, paired_data=paired_data, test_data=test_data, test_size=test_size, unpaired=unpaired
        )
        method.check(pair, samples)
        recipe = {
            "matcher": method.to_dict(), **pair.record, **samples.record, "batch_size": run.batch_size,
            "versions": versions([("matchers", method.name)]),
        }  # fmt: skip
        run.processes.check_same({**recipe, **pair.hashes})
        pair, auto_arguments = _select_layers(pair, samples.train, source_layer, target_layer, run)
        (cell,) = pair.cells
        pair.rehearse(samples.train, samples.test.a)
        method.rehearse(pair, samples)
        if run.planning:
            job = f"stitch, {cell[0]} → {cell[1]}, {len(samples.train)} + {len(samples.test)} samples"
            omitted = filter(
                None, ["the search for the most similar layers" if auto_arguments else "", method.unplanned]
            )
            left_out = " and ".join(omitted)
            left_out = f"{left_out} is not included" if left_out else ""
            return planned(job, pair, samples, run, [method], scored=PREDICTORS, left_out=left_out)
        recipe |= dict.fromkeys(auto_arguments, AUTO)
        stitched = join_all(pair, {cell: pair.identity(cell)}, recipe)[cell]
        _name_classes(stitched, samples.test.a)
        collected = CollectedPair(pair, samples.train, run, unpaired=samples.unpaired)
        stitched.stitch = method.match(collected).only
        stitched.config.stitch = stitched.stitch.to_dict()
        if any(True for _ in stitched.stitch.parameters()):  # an identity is not fitted
            sketch = ContentSketch.of(*method.reads(samples)).to_dict()
            stitched.config.recipe = {**recipe, FITTED: sketch}
        return _scored(stitched, pair, samples.test, method.baselines(collected, stitched.stitch), run)


def _select_layers(
    pair: Pair, samples: PairedSamples, source_layer: str, target_layer: str, run: Run
) -> tuple[Pair, list[str]]:
    """Return the pair at one pair of layers, and the names of the automatically chosen layers."""
    layer_arguments = {"source_layer": source_layer, "target_layer": target_layer}
    auto_arguments = [name for name, layer in layer_arguments.items() if layer == AUTO]
    if not auto_arguments:
        return pair.at([(source_layer, target_layer)]), []
    layers = [
        network.layers if layer == AUTO else [layer]
        for network, layer in ((pair.source, source_layer), (pair.target, target_layer))
    ]
    if run.planning:
        return pair.at([(layers[0][-1], layers[1][0])]), auto_arguments
    atlas = compare(
        pair.source, pair.target, samples.a, paired_data=samples.b if samples.differ else None, layers_a=layers[0],
        layers_b=layers[1], rows="mean", **run.options,
    )  # fmt: skip
    return pair.at([atlas.best_pair()]), auto_arguments


def _scored(
    stitched: StitchedModel, pair: Pair, test: PairedSamples, baselines: dict[str, StitchingLayer], run: Run
) -> StitchedModel:
    """Return the model with its scores, if its outputs can be scored."""
    try:
        evaluation = evaluate(
            stitched, test.a, target=pair.target, paired_data=test.b if test.differ else None, baselines=baselines,
            **run.options,
        )  # fmt: skip
    except ValueError as error:
        if stitched.task is not None:
            raise
        unused = ", and the labels of the data are not used" if test.a.is_labelled else ""
        warn(f"the stitched model is not scored{unused}: {error}")
        return stitched
    stitched.keep_scores(evaluation)
    return stitched


def _name_classes(stitched: StitchedModel, samples: Samples) -> None:
    """Copy the class names from the data if the target lacks them, for example timm networks and user code."""
    if task_named(stitched.task).classifies:
        names = class_names(stitched, samples)
        stitched.config.id2label = names
        stitched.config.label2id = {name: index for index, name in names.items()}
