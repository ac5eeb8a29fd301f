"""Evaluation of a stitched model, compared with baselines: :func:`evaluate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

from hf_stitch.analysis.evaluation import Evaluation, StitchedParts, class_names, confused, differing
from hf_stitch.analysis.planning import planned_scoring
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Data
from hf_stitch.options import Natural, Several, checked
from hf_stitch.printing import warn
from hf_stitch.running import WITHOUT_STATE, Run, RunOptions
from hf_stitch.scoring.halves import ONLY, HalvesOfModel, check_place, reference
from hf_stitch.scoring.measured import NULLS, not_beaten, scores_of
from hf_stitch.scoring.passing import Scoring
from hf_stitch.stitches import StitchingLayer
from hf_stitch.tasks.heads import task_named
from hf_stitch.workflows._checks import Runs, fitted_share, samples_to_score

TAKEN = ("stitched", "source", "target", "chance")
"""Names that further baselines must not have; ``identity`` and ``mean_only`` may be replaced."""


@checked
def evaluate(
    stitched: StitchedModel,
    data: Data,
    *,
    target: Runs | None = None,
    source: Runs | None = None,
    paired_data: Data | None = None,
    baselines: Mapping[str, StitchingLayer] | None = None,
    resamples: Several = 1000,
    examples: Natural = 0,
    **options: Unpack[RunOptions],
) -> Evaluation:
    """Score a stitched model on held-out samples, compared with baselines.

    The baselines are:

    - ``identity``: both halves without a map between them. If the widths differ, vectors are padded with zeros or
      truncated.
    - ``mean_only``: the target's mean activations replace the mapped activations of any input.
    - ``source``: the whole source network, if its head has the same task and classes. A stitched model that is better
      than its target may only have a better source.
    - ``target``: the whole target network.
    - ``chance``: a predictor that ignores the input. For classifiers it always predicts the most frequent class, with
      the class frequencies as probabilities; for language models all tokens are equally likely.

    The figures of classifiers are ``accuracy``, ``relative_accuracy`` (divided by the target's accuracy, Csiszárik et
    al. 2021, section 4; NaN if the target predicts no sample correctly), ``cross_entropy`` with the true labels in
    nats, and ``agreement`` (share of samples with the same prediction as the target). Without labels, ``agreement`` is
    the only figure. The figures of language models are ``perplexity``, ``relative_perplexity``, ``cross_entropy`` per
    token in nats and ``agreement`` on the next token; tokens without a real token before them are not counted. Fast
    tokenizers add ``bits_per_character`` and ``bits_per_byte`` of the predicted text, which are comparable between
    tokenizers. A source with a different tokenizer than the target has only these two.

    The outputs of a model without a head (features, embeddings, user code) are compared with the outputs of the target,
    as one vector per sample: an embedding, the mean of ``last_hidden_state`` over positions, or the flattened output.
    The figures are ``r2`` (explained share of the variation), ``cosine`` (relative to the mean of the target's
    vectors), ``cka`` (linear CKA) and ``knn_overlap`` (shared neighbours among the 10 nearest). ``chance`` then uses
    the stitched vectors of other samples; ``identity`` is left out if the widths differ. CKA and neighbours of constant
    vectors are undefined (NaN).

    Args:
        stitched: The stitched model.
        data: Held-out raw samples, not used to fit the stitching layer, in any form that :meth:`hf_stitch.Samples.of`
            accepts. Samples used to fit it are recognised by their content; a warning and the result state their share.
        target: The whole target network. Default: the original network of the model, or the network that its config
            names; for a relative model with its first encoder, the relative model. After :func:`hf_stitch.swap`, this
            can also be the stitched model with its original encoder.
        source: The whole source network, to score it as well. Default: the original network of the model, if it is in
            memory; it is never downloaded for a baseline. ``Evaluation.left_out`` lists missing baselines. Not allowed
            for models without a head.
        paired_data: Samples for the target, if they differ from the samples for the source, with the same ids in the
            same order as ``data``.
        baselines: Further baselines: name -> stitching layer at the same cuts.
        resamples: Number of bootstrap resamples. Samples are resampled jointly for all predictors.
        examples: Number of samples to return with the largest differences between the stitched model and the target.
            They appear on the page of the result (:meth:`Evaluation.to_html`), so leave it at 0 for private data.
        **options: Options of the run (:class:`hf_stitch.running.RunOptions`): ``batch_size``,
            ``seed``, ``progress``, ``accelerator``.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Flatten, Linear, ReLU, Sequential
        >>> net = Sequential(Flatten(), Linear(12, 8), ReLU(), Linear(8, 2))
        >>> images = torch.randn(100, 3, 2, 2)
        >>> net = hf_stitch.load(net, example_inputs=images[:2])
        >>> stitched = hf_stitch.stitch(net, net, images, source_layer="2", target_layer="2", matcher="identity")
        >>> evaluation = hf_stitch.evaluate(stitched, images)
        >>> evaluation["agreement"].value
        1.0
        >>> sorted(evaluation.scores)
        ['chance', 'identity', 'mean_only', 'source', 'stitched', 'target']
    """
    if stitched.task is None and (examples or source is not None):
        option = "examples" if examples else "source"
        raise ValueError(f"{option} requires a model with a head, got {type(stitched).__name__}; remove {option}")
    with Run.of(evaluate, options, WITHOUT_STATE) as run:
        whole, task = reference(stitched, target), task_named(stitched.task).about(stitched)
        samples = samples_to_score([stitched], data, paired_data)
        stitches, left_out = _stitches(stitched, baselines or {})
        halves = HalvesOfModel.of(stitched, source, whole, other_tokens=True)
        scoring = Scoring(whole, {ONLY: halves}, list(halves.predictors(stitches)), task, sizes=True)
        if run.planning:
            job = f"evaluate, {len(stitches)} predictors and whole networks, {len(samples)} samples"
            return planned_scoring(job, scoring, samples, run, left_out="the bootstrap is not included")
        measured = scoring.run(samples, run)
        resampled, answers = measured.drawn(ONLY, resamples, run.seed), measured.answers[ONLY]
        names = class_names(stitched, samples.a)
        parts = StitchedParts.of(stitched, halves.alone, whole)
        is_identity = parts.at_one_layer or stitched.stitch.is_identity
        result = Evaluation(
            stitched.task or "feature-extraction", len(samples), samples.a.fingerprint, scores_of(resampled),
            fitted_share(stitched, samples.a), left_out | halves.left_out, parts,
            confused(answers, names) if task.classifies else {}, differing(task, answers, samples.a, names, examples),
            not_beaten(task, resampled, NULLS[1:] if is_identity else NULLS),
        )  # fmt: skip
        _warn(result)
        return result


def _stitches(
    stitched: StitchedModel, baselines: Mapping[str, StitchingLayer]
) -> tuple[dict[str, StitchingLayer], dict[str, str]]:
    """Return the stitching layers to score, by name, and the reasons for omitted layers."""
    for name, layer in baselines.items():
        if name in TAKEN:
            raise ValueError(f"baselines must not contain the reserved name {name!r}; rename this stitching layer")
        check_place(stitched, name, layer)
    stitch, left_out = stitched.stitch, dict[str, str]()
    layers = {"stitched": stitch, "identity": stitch.identity(), "mean_only": stitch.mean_only(), **baselines}
    if stitched.task is None and not stitch.equal_widths and "identity" not in baselines:
        left_out["identity"] = "the widths of both layers differ"
        del layers["identity"]
    return layers, left_out


def _warn(evaluation: Evaluation) -> None:
    if evaluation.fitted_share:
        warn(
            f"the stitching layer was fitted to {evaluation.fitted_share:.1%} of these samples, so the scores are too "
            "high; pass held-out samples (if the data contain duplicates, drop them first)"
        )
    if evaluation.no_better:
        warn(evaluation.cautions[0])
