"""Evaluation of a stitched model, compared with baselines: :func:`evaluate`."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from hf_stitch.analysis.differences import class_names, confused, differing
from hf_stitch.analysis.evaluation import Evaluation, StitchedParts
from hf_stitch.analysis.planning import NETWORKS, Plan, bytes_of_weights, seconds_of
from hf_stitch.analysis.scoring import (
    NULLS,
    answers,
    as_score,
    check_place,
    not_beaten,
    reference,
    source_alone,
)
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import PairedSamples, Samples
from hf_stitch.data.overlap import FITTED, ContentSketch
from hf_stitch.processes import ALONE
from hf_stitch.registry import check_number
from hf_stitch.resources import free_disk, free_memory
from hf_stitch.running import WITHOUT_STATE, Run, RunOptions
from hf_stitch.stitches import IdentityStitch, StitchingLayer
from hf_stitch.tasks.base import Answers, Whole
from hf_stitch.tasks.kinds import task_named
from hf_stitch.workflows._anchors import warn_of_other_activations, without_anchors


def evaluate(
    stitched: StitchedModel,
    data: Any,
    *,
    target: Any = None,
    source: Any = None,
    paired_data: Any = None,
    baselines: Mapping[str, StitchingLayer] | None = None,
    resamples: int = 1000,
    examples: int = 0,
    **options: Unpack[RunOptions],
) -> Evaluation:
    """Score a stitched model on held-out samples, compared with baselines.

    The baselines are:

    - ``identity``: both halves without a map between them. If the widths differ, vectors are padded with zeros or
      truncated.
    - ``mean_only``: the target's mean activations replace the mapped ones, whatever the input is.
    - ``source``: the whole source network, if its head has the same task and classes. A stitched model that is better
      than its target may only have a better source.
    - ``target``: the whole target network.
    - ``chance``: a predictor that ignores the input. For classifiers it always predicts the most frequent class, with
      the class frequencies as probabilities; for language models all tokens are equally likely.

    The figures of classifiers are ``accuracy``, ``relative_accuracy`` (divided by the target's accuracy, Csiszárik et
    al. 2021, section 4; NaN if the target predicts no sample correctly), ``cross_entropy`` with the true labels in
    nats, and ``agreement`` (share of samples with the same prediction as the target). Without labels there is only
    ``agreement``. The figures of language models are ``perplexity``, ``relative_perplexity``, ``cross_entropy`` per
    token in nats and ``agreement`` on the next token; tokens without a real token before them are not counted. With a
    fast tokenizer there are also ``bits_per_character`` and ``bits_per_byte`` of the predicted text, which can be
    compared between tokenizers. A source with another tokenizer than the target has only these.

    The outputs of a model without a head (features, embeddings, user code) are compared with those of the target, as
    one vector per sample: an embedding, the mean of ``last_hidden_state`` over positions, or the flattened output. The
    figures are ``r2`` (explained share of the variation), ``cosine`` (relative to the mean of the target's vectors),
    ``cka`` (linear CKA) and ``knn_overlap`` (shared ones of the 10 nearest neighbours). ``chance`` are then the
    stitched vectors of other samples; ``identity`` is left out if the widths differ. CKA and neighbours of constant
    vectors are undefined (NaN).

    Under ``accelerate launch`` each process takes a part of the samples and all processes return the same scores,
    without any change to the call.

    Args:
        stitched: The stitched model.
        data: Held-out raw samples on which the stitching layer was not fitted, in any form that
            :meth:`hf_stitch.Samples.of` accepts. Samples that it was fitted to are recognised by their content; a
            warning and the result state their share.
        target: The whole target network. Default: the network from which the model was made, or the one that its config
            names. After :func:`hf_stitch.swap`, this can also be the stitched model with its original encoder.
        source: The whole source network, for its score. Default: the network from which the model was made, if it is in
            memory; it is never downloaded for a baseline. What is missing is stated in ``Evaluation.left_out``.
            Refused for models without a head.
        paired_data: Samples for the target, if it takes other samples than the source. They need the same ids in the
            same order as ``data``.
        baselines: Further baselines: name -> stitching layer at the same cuts.
        resamples: Number of bootstrap resamples. Samples are resampled jointly for all predictors.
        examples: Number of samples to return on which the stitched model and the target differ most. They appear on
            the page of the result (:meth:`Evaluation.to_html`), so leave it at 0 for private data.
        **options: Options of the run (:class:`hf_stitch.running.RunOptions`): ``batch_size``,
            ``seed``, ``progress``, ``accelerator``.

    Returns:
        The figures of the model and of each baseline with 95% intervals. ``evaluation["accuracy"]`` is a figure of the
        stitched model.

    Raises:
        ValueError: If ``examples`` is out of range, it or ``source`` is given and the model has no head, all samples
            are anchors of the model, an output of a model without a head has no vector per sample, the target network
            is neither in memory nor named in the config, a baseline belongs to other cuts, or labels are missing or out
            of range.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Flatten, Linear, ReLU, Sequential
        >>> net = Sequential(Flatten(), Linear(12, 8), ReLU(), Linear(8, 2))
        >>> images = torch.randn(100, 3, 2, 2)
        >>> net = hf_stitch.load(net, example_inputs=images[:2])
        >>> itself = hf_stitch.stitch(net, net, images, source_layer="2", target_layer="2", matcher="identity")
        >>> evaluation = hf_stitch.evaluate(itself, images)
        >>> evaluation["agreement"].value
        1.0
        >>> sorted(evaluation.scores)
        ['chance', 'identity', 'mean_only', 'source', 'stitched', 'target']
    """
    if not isinstance(stitched, StitchedModel):
        raise TypeError(f"stitched must be a stitched model, got {type(stitched).__name__}")
    check_number(0, examples=examples)
    check_number(2, resamples=resamples)
    if examples and stitched.task is None:
        raise ValueError(f"examples needs predictions, but {type(stitched).__name__} has no head: leave it out")
    if source is not None and stitched.task is None:
        raise ValueError(
            f"source is only scored for models with a head, and {type(stitched).__name__} has none: leave it out"
        )
    with Run.of(evaluate, options, WITHOUT_STATE) as run:
        both = PairedSamples.of(data, paired_data)
        whole, left_out = reference(stitched, target), {}
        task = task_named(stitched.task)
        both = both.with_first(task.numbered(both.a, stitched.config))
        task.warn_of_labels(both.a, stitched.config)
        both = without_anchors(stitched, both)
        samples = both.a
        warn_of_other_activations(stitched, samples)
        for name, layer in (baselines or {}).items():
            check_place(stitched, name, layer)
        layers = {
            "stitched": stitched.stitch,
            "identity": stitched.stitch.identity(),
            "mean_only": stitched.stitch.mean_only(),
            **(baselines or {}),
        }
        if stitched.task is None and not stitched.stitch.equal_widths:
            left_out["identity"] = "the widths of both layers differ"
            del layers["identity"]
        if run.planning:
            return _planned(stitched, layers, both, whole, source, run)
        alone, why = source_alone(stitched, source, whole)
        if why:
            left_out["source"] = why
        predicted = answers(stitched, layers, both, whole, run, alone=alone)
        chance = {"chance": task.chance(predicted, run.seed)}
        drawn = task.drawn({**predicted, **chance}, resamples=resamples, seed=run.seed)
        names = class_names(stitched, samples)
        confusion = confused(predicted, names) if task.classifies else {}
        shown = differing(task, predicted, samples, names, examples)
        fitted = fitted_share(stitched, samples)
        if fitted:
            warnings.warn(
                f"the stitching layer was fitted to {fitted:.1%} of these samples: the scores are too good; pass "
                "samples that it was not fitted to (if the data contain some twice, drop the duplicates before)",
                stacklevel=2,
            )
        parts = StitchedParts.of(stitched, alone, whole)
        exact = parts.at_one_layer or isinstance(stitched.stitch.body, IdentityStitch)
        result = Evaluation(
            stitched.task or "feature-extraction", len(samples), samples.fingerprint,
            {name: {figure: as_score(values) for figure, values in row.items()} for name, row in drawn.items()},
            fitted, left_out, parts, confusion, shown, not_beaten(task, drawn, NULLS[1:] if exact else NULLS),
        )  # fmt: skip
        if result.no_better:
            warnings.warn(result.cautions[0], stacklevel=2)
        return result


def _planned(
    stitched: StitchedModel, layers: Mapping[str, StitchingLayer], samples: PairedSamples, whole: Whole,
    source: Any, run: Run,
) -> Any:  # fmt: skip
    """Score one batch a few times, and extrapolate."""
    count, quiet = min(run.batch_size, len(samples)), replace(run, progress=False, processes=ALONE)
    few = samples.take(count)
    device = stitched.device
    networks = [each for each in (stitched, getattr(whole, "model", whole)) if isinstance(each, nn.Module)]
    memory = {NETWORKS: bytes_of_weights(*networks)}
    alone, _ = source_alone(stitched, source, whole)
    found: list[Mapping[str, Answers]] = []
    seconds = seconds_of(lambda: found.append(answers(stitched, layers, few, whole, quiet, alone=alone)), device)
    if size := sum(row["vector"].nbytes for row in found[0].values() if "vector" in row):
        memory["vectors"] = len(samples) * size // count
    stages = {"scoring": seconds * len(samples) / count / run.processes.count}
    free = free_memory(device), free_disk(Path(tempfile.gettempdir()))
    job = f"evaluate, {len(layers)} predictors and whole networks, {len(samples)} samples"
    return Plan(job, stages, memory, {}, *free, run.processes.count, "the bootstrap is not included")


def fitted_share(stitched: StitchedModel, samples: Samples) -> float | None:
    """Return the share of samples to which the stitching layer of a model was fitted."""
    recorded = (stitched.config.recipe or {}).get(FITTED)
    return None if recorded is None else ContentSketch.from_dict(recorded).share(samples)
