"""Audit of the accuracy and the activations of stitched models: :func:`audit`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Unpack

import numpy as np
import torch

from hf_stitch.adapters import Adapter
from hf_stitch.analysis.auditing import STITCHED, Audit
from hf_stitch.analysis.detection.evidence import Watchers, views_of
from hf_stitch.analysis.detection.noise import MAX_DOSE, halves as halved
from hf_stitch.analysis.detection.recording import View
from hf_stitch.analysis.detection.result import MIN_AUROC, Detection
from hf_stitch.analysis.evaluation import Evaluation
from hf_stitch.analysis.planning import planned_scoring
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Data, Id, PairedSamples, Samples
from hf_stitch.data.classes import numbered_as
from hf_stitch.data.overlap import MOST_SHARED
from hf_stitch.detectors import Detector
from hf_stitch.options import NonNegative, Several, Within, checked
from hf_stitch.registry import registries
from hf_stitch.resources import seconds_of
from hf_stitch.running import WITHOUT_STATE, Run, RunOptions
from hf_stitch.scoring.halves import SOURCE, HalvesOfModel, Predictor, models_of, scored_target
from hf_stitch.scoring.measured import Measured, scores_of
from hf_stitch.scoring.passing import Scoring
from hf_stitch.tasks.heads import check_head, task_named
from hf_stitch.workflows._checks import Named, Runs, fitted_share, samples_to_score

DETECTORS = ("mahalanobis", "knn")
"""Default of ``detectors``."""
LEFT_OUT = {"identity": "audits leave it out, see hf_stitch.evaluate"}
"""Baseline that audits do not score -> reason."""


@checked
def audit(
    stitched: StitchedModel | Iterable[StitchedModel],
    data: Data,
    *,
    detectors: Iterable[Named | Detector] = DETECTORS,
    max_dose: NonNegative = MAX_DOSE,
    train_data: Data | None = None,
    far_data: Data | None = None,
    min_auroc: Annotated[float, Within(0, 1)] = MIN_AUROC,
    auxiliary_data: Data | None = None,
    target: Runs | None = None,
    source: Runs | None = None,
    paired_data: Data | None = None,
    min_relative_accuracy: Annotated[float, Within(0, 1, above=True)] = 0.8,
    resamples: Several = 1000,
    **options: Unpack[RunOptions],
) -> Audit | list[Audit]:
    """Check whether stitched models are accurate, and whether the target receives activations like its own.

    A stitching layer trained on the task can feed the target activations that the target never produces. The score of
    such a model is not evidence of similarity (Balogh and Jelasity 2025). The audit therefore checks both:

    - *Accurate*: the model reaches at least ``min_relative_accuracy`` of the target's accuracy (for language models: a
      relative perplexity of at most its inverse), and its whole 95% interval is better than the baselines ``mean_only``
      and ``chance``.
    - *Out of distribution*: a detector distinguishes the stitched activations from the target's own as well as it
      distinguishes noisy target activations with a relative residual above ``max_dose``, by the whole 95% interval. The
      noise is sampled from the target's activations of other samples, so it has their covariance. *In distribution*:
      the interval of every detector is at most ``max_dose``. In all other cases the result is undecided.

    Only higher scores count as unusual. Least squares shrinks activations towards their mean, so that they score lower
    than the target's own: they contain less information, but nothing unusual for the target. The text of an audit
    mentions it. The audit ignores a detector that fails its controls: it must distinguish the target's activations from
    the same activations with noise of their size (AUROC ``min_auroc``) and ``far_data`` from ``data`` (AUROC .9), but
    not ``data`` from the samples that it was fitted to (AUROC .45 to .55).

    Several models with the same target are audited together: the target runs once, and detectors are fitted once for
    each of its layers. The verdict is also written to ``config.recipe`` of the model and appears in the model card.

    Args:
        stitched: The stitched model, or several models with the same target. They must have heads.
        data: Held-out raw samples, not used to fit the stitching layer, in any form that :meth:`hf_stitch.Samples.of`
            accepts.
        detectors: Detectors: names in ``hf_stitch.registries.detectors``, or objects. The defaults complement each
            other: ``mahalanobis`` uses positions, ``knn`` their mean.
        max_dose: Largest relative residual of noise that still counts as in distribution. With noise of .2, Tiny-10
            keeps .69 to .87 of its accuracy, and at least ``min_relative_accuracy`` at six of its eight layers.
        train_data: Samples to fit the detectors, preferably training samples of the target, in the form that the target
            accepts. Default: one half of ``data``, chosen by ids; detectors then score the second half.
        far_data: Samples unlike ``data`` (noise, other motifs), in the form that the target accepts, as a control.
            Default: no control.
        min_auroc: AUROC that a detector must reach on noise as large as the activations. 0: all detectors count.
        auxiliary_data: Samples of another dataset, for detectors that are also fitted to such samples (``energy``).
            They must differ from ``far_data``.
        target: The whole target network. Default: as in :func:`hf_stitch.evaluate`.
        source: The whole source network, to score it as well. Default: as in :func:`hf_stitch.evaluate`.
        paired_data: Samples for the target, if they differ from the samples for the source, with the same ids in the
            same order as ``data``.
        min_relative_accuracy: Threshold on the relative accuracy, above 0 and at most 1. The default is the threshold
            of Csiszárik et al. 2021, section 8.
        resamples: Number of bootstrap resamples for the scores.
        **options: Options of the run (:class:`hf_stitch.running.RunOptions`): ``batch_size``,
            ``seed``, ``progress``, ``accelerator``.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Flatten, Linear, ReLU, Sequential
        >>> _ = torch.manual_seed(0)  # some random networks give all images one class
        >>> net = Sequential(Flatten(), Linear(12, 8), ReLU(), Linear(8, 2))
        >>> images = torch.randn(300, 3, 2, 2)
        >>> net = hf_stitch.load(net, example_inputs=images[:2])
        >>> stitched = hf_stitch.stitch(net, net, images, source_layer="2", target_layer="2", matcher="identity")
        >>> hf_stitch.audit(stitched, images, far_data=5 * torch.rand(50, 3, 2, 2)).verdict
        'accurate, and no detector finds it out of distribution'
    """
    with Run.of(audit, options, WITHOUT_STATE) as run:
        models, several = models_of(stitched)
        whole = _check(models, target)
        samples = samples_to_score(models, data, paired_data)
        shares = [_check_unfitted(model, samples.a) for model in models]
        to_fit, scored = _samples_to_fit(samples.b, train_data, whole, run.seed)
        detectors_by_name = registries.detectors.build_all(detectors, needed=True)
        watchers = Watchers.of(detectors_by_name, to_fit, samples.b, auxiliary_data, far_data)
        halves = {str(number): HalvesOfModel.of(model, source, whole) for number, model in enumerate(models)}
        scoring = _scoring(whole, halves)
        if run.planning:
            return _planned(scoring, samples, to_fit, run)
        watchers = replace(watchers, scored=scored).fitted(
            whole, {name: list(views_of(of_model.model.stitch).values()) for name, of_model in halves.items()},
            {name: [of_model.layer] for name, of_model in halves.items()}, run, task=scoring.task, kinds=("coloured",)
        )  # fmt: skip
        scoring.watch = watchers
        measured = scoring.run(samples, run)
        cells = {(name, STITCHED): (name, SOURCE, of_model.layer) for name, of_model in halves.items()}
        detections = watchers.detections(measured.seen, samples.b.ids, cells, [SOURCE], min_auroc, two_sided=False)
        audits = []
        for (name, of_model), share in zip(halves.items(), shares, strict=True):
            scores = scores_of(measured.drawn(name, resamples, run.seed))
            model, data_hash, left_out = of_model.model, samples.a.fingerprint, LEFT_OUT | of_model.left_out
            evaluation = Evaluation(str(model.task), len(samples), data_hash, scores, share, left_out)
            findings = _seen(watchers, measured, detections, name, of_model)
            result = Audit(
                evaluation, min_relative_accuracy, max_dose, model.stitch.pooling, *findings, to_fit.fingerprint,
                run.seed,
            )  # fmt: skip
            model.keep_scores(audit={"verdict": result.verdict, "data": data_hash, "seed": run.seed})
            audits.append(result)
        return audits if several else audits[0]


def _check(models: Sequence[StitchedModel], target: Any) -> Adapter:
    if not models:
        raise ValueError("stitched must contain at least one model, got an empty sequence")
    for model in models:
        if model.task is None:
            raise ValueError(f"{type(model).__name__} cannot be scored without a head; stitch with a task")
        check_head(model)
    records = [(model.config.target or {}).get("reference") for model in models]
    for number, (record, model) in enumerate(zip(records, models, strict=True)):
        if record != records[0] or model.task != models[0].task:
            raise ValueError(
                f"models audited together must have the same target and task, but model {number} differs from model "
                "0; audit them separately"
            )
    return scored_target(models[0], target)


def _check_unfitted(model: StitchedModel, samples: Samples) -> float | None:
    """Return the share of samples that a model was fitted to, and raise an error if it is too large."""
    share = fitted_share(model, samples)
    if (share or 0) > MOST_SHARED:
        raise ValueError(
            f"the stitching layer was fitted to {share:.1%} of these samples; pass held-out samples to audit it"
        )
    return share


def _samples_to_fit(others: Samples, train_data: Any, whole: Adapter, seed: int) -> tuple[Samples, frozenset[Id]]:
    """Return the samples to fit the detectors, and the ids of the samples to score."""
    config = getattr(whole.model, "config", None)
    if train_data is not None:
        return numbered_as(Samples.of(train_data), config), frozenset(others.ids)
    others = numbered_as(others, config)
    scored_flags = halved(others.ids, seed, "audit")
    if scored_flags.all():
        raise ValueError(f"detectors are fitted to one half of the samples, got {len(others)}; pass more samples")
    fit_half, scored_half = (others.select(np.flatnonzero(flags).tolist()) for flags in (~scored_flags, scored_flags))
    return fit_half, frozenset(scored_half.ids)


def _scoring(whole: Adapter, halves: Mapping[str, HalvesOfModel]) -> Scoring:
    predictors: list[Predictor] = []
    for name, of_model in halves.items():
        stitches = {STITCHED: of_model.model.stitch, "mean_only": of_model.model.stitch.mean_only()}
        predictors += of_model.predictors(stitches, name, constant=("mean_only",))
    model = next(iter(halves.values())).model
    return Scoring(whole, halves, predictors, task_named(model.task).about(model))


def _planned(scoring: Scoring, samples: PairedSamples, to_fit: Samples, run: Run) -> Any:
    """Run the target on one batch of the detectors' samples, score one batch, and extrapolate."""
    batch = next(to_fit.batches(min(run.batch_size, len(to_fit))))
    with torch.no_grad():
        inputs = scoring.task.inputs(scoring.target, batch.samples)
        forward = seconds_of(lambda: scoring.target.forward(inputs), scoring.device)
    seconds = forward * len(to_fit) / len(batch.samples) / run.processes.count
    job = f"audit of {len(scoring.halves)} model{'s'[: len(scoring.halves) > 1]}, {len(samples)} samples"
    return planned_scoring(
        job, scoring, samples, run, stages={"running the target on the samples of the detectors": seconds},
        left_out="detectors and bootstrap are not included",
    )  # fmt: skip


def _seen(
    watchers: Watchers, measured: Measured, detections: Mapping[View, Mapping[str, Detection]], name: str,
    of_model: HalvesOfModel,
) -> tuple[dict[str, float], dict[str, dict[str, Detection]]]:  # fmt: skip
    """Return the residual of a model and the findings of the detectors, by part of its stitching layer."""
    layer, views = of_model.layer, views_of(of_model.model.stitch)
    return {part: watchers.residual(measured.seen, view, layer, (name, STITCHED)) for part, view in views.items()}, {
        part: {label: detection.of(name, layer, STITCHED) for label, detection in detections[view].items()}
        for part, view in views.items()
    }
