"""Audit of stitched models, accuracy and distribution of their activations: :func:`audit`."""

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
from hf_stitch.scoring.halves import SOURCE, HalvesOfModel, models_of, scored_target
from hf_stitch.scoring.measured import Measured, scores_of
from hf_stitch.scoring.passing import Scoring
from hf_stitch.tasks.heads import check_head, task_named
from hf_stitch.workflows._checks import Named, Runs, fitted_share, samples_to_score

DETECTORS = ("mahalanobis", "knn")
"""Default of ``detectors``."""
LEFT_OUT = {"identity": "audits leave it out, see hf_stitch.evaluate"}


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
    """Check whether stitched models are accurate, and whether the target gets activations like its own.

    A stitching layer that is trained on the task can drive the target with activations that the target never produces.
    The score of such a model is no evidence of similarity (Balogh and Jelasity 2025). The audit therefore checks both:

    - *Accurate*: the model reaches at least ``min_relative_accuracy`` of the target's accuracy (for language models: a
      relative perplexity of at most its inverse), and its whole 95% interval is better than the baselines ``mean_only``
      and ``chance``.
    - *Out of distribution*: a detector tells the stitched activations from the target's own as well as it tells these
      with noise of a relative residual above ``max_dose``, by the whole 95% interval. The noise is made of the target's
      activations of other samples, so it has their covariance. *In distribution*: the interval of every detector is at
      most ``max_dose``. In all other cases the result is undecided.

    Only higher scores are strange. Least squares shrinks activations towards their mean, so that they score lower than
    the target's own: they contain less, but nothing unusual for the target. The text of an audit mentions it. A
    detector is no evidence and does not count where it fails on what it must tell apart: the target's own activations
    from these with noise of their size (AUROC ``min_auroc``), ``far_data`` from ``data`` (.9), and where it takes
    ``data`` for strange beside the samples to which it was fitted (AUROC outside .45 to .55).

    Several models with the same target are audited together: the target runs once, and detectors are fitted once for
    each of its layers. The verdict is also written to ``config.recipe`` of the model, so the model card contains it.

    Args:
        stitched: The stitched model, or several with the same target. They must have heads.
        data: Held-out raw samples on which the stitching layer was not fitted, in any form that
            :meth:`hf_stitch.Samples.of` accepts.
        detectors: Detectors: names in ``hf_stitch.registries.detectors``, or objects. The defaults read positions
            (``mahalanobis``) and their mean (``knn``); what one of them does not tell apart, the other may.
        max_dose: Relative residual of noise up to which activations do not count as strange. With noise of .2, Tiny-10
            keeps .69 to .87 of its accuracy, and at least ``min_relative_accuracy`` at six of its eight layers.
        train_data: Samples to which detectors are fitted, best those on which the target was trained, in the form that
            the target takes. Default: one half of ``data``, drawn by their ids; detectors then score the other half.
        far_data: Samples unlike ``data`` (noise, other motifs), in the form that the target takes, as a control.
            Default: no control.
        min_auroc: AUROC with which a detector must tell noise as large as the activations apart to count. 0: all count.
        auxiliary_data: Samples of other data, for detectors that are fitted to the target's activations of such
            (``energy``). Other ones than ``far_data``.
        target: The whole target network. Default: as in :func:`hf_stitch.evaluate`.
        source: The whole source network, for its score. Default: as in :func:`hf_stitch.evaluate`.
        paired_data: Samples for the target, if it takes other samples than the source. They need the same ids in the
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
        >>> itself = hf_stitch.stitch(net, net, images, source_layer="2", target_layer="2", matcher="identity")
        >>> hf_stitch.audit(itself, images, far_data=5 * torch.rand(50, 3, 2, 2)).verdict
        'accurate, and no detector finds it out of distribution'
    """
    with Run.of(audit, options, WITHOUT_STATE) as run:
        models, several = models_of(stitched)
        whole = _check(models, target)
        samples = samples_to_score(models, data, paired_data)
        shares = [_check_unfitted(model, samples.a) for model in models]
        known, scored = _known(samples.b, train_data, whole, run.seed)
        named = registries.detectors.build_all(detectors, needed=True)
        watchers = Watchers.of(named, known, samples.b, auxiliary_data, far_data)
        halves = {str(number): HalvesOfModel.of(model, source, whole) for number, model in enumerate(models)}
        scoring = _scoring(whole, halves)
        if run.planning:
            return _planned(scoring, samples, known, run)
        watchers = replace(watchers, scored=scored).fitted(
            whole, {name: list(views_of(own.model.stitch).values()) for name, own in halves.items()},
            {name: [own.layer] for name, own in halves.items()}, run, task=scoring.task, kinds=("coloured",),
        )  # fmt: skip
        scoring.watch = watchers
        measured = scoring.run(samples, run)
        cells = {(name, STITCHED): (name, SOURCE, own.layer) for name, own in halves.items()}
        found = watchers.detections(measured.seen, samples.b.ids, cells, [SOURCE], min_auroc, two_sided=False)
        audits = []
        for (name, own), share in zip(halves.items(), shares, strict=True):
            scores = scores_of(measured.drawn(name, resamples, run.seed))
            evaluation = Evaluation(
                str(own.model.task), len(samples), samples.a.fingerprint, scores, share, LEFT_OUT | own.left_out
            )
            seen = _seen(watchers, measured, found, name, own)
            pooling = own.model.stitch.pooling
            audited = Audit(evaluation, min_relative_accuracy, max_dose, pooling, *seen, known.fingerprint, run.seed)
            own.model.keep_scores(audit={"verdict": audited.verdict, "data": samples.a.fingerprint, "seed": run.seed})
            audits.append(audited)
        return audits if several else audits[0]


def _check(models: Sequence[StitchedModel], target: Any) -> Adapter:
    if not models:
        raise ValueError("there is no stitched model to audit: pass at least one")
    for model in models:
        if model.task is None:
            raise ValueError(f"{type(model).__name__} has no head, so it cannot be scored; stitch with a task")
        check_head(model)
    records = [(model.config.target or {}).get("reference") for model in models]
    for number, (record, model) in enumerate(zip(records, models, strict=True)):
        if record != records[0] or model.task != models[0].task:
            raise ValueError(
                f"models that are audited together must have the same target and task; model {number} has another one "
                "than model 0: audit them apart"
            )
    return scored_target(models[0], target)


def _check_unfitted(model: StitchedModel, samples: Samples) -> float | None:
    """Check that a model was not fitted to the samples, and return the share of those that it was."""
    share = fitted_share(model, samples)
    if (share or 0) > MOST_SHARED:
        raise ValueError(
            f"the stitching layer was fitted to {share:.1%} of these samples, on which an audit shows nothing; pass "
            "samples that it was not fitted to"
        )
    return share


def _known(others: Samples, train_data: Any, whole: Adapter, seed: int) -> tuple[Samples, frozenset[Id]]:
    """Return the samples to which detectors are fitted, and the ids of the others, which they score."""
    config = getattr(whole.model, "config", None)
    if train_data is not None:
        return numbered_as(Samples.of(train_data), config), frozenset(others.ids)
    others = numbered_as(others, config)
    second = halved(others.ids, seed, "audit")
    if second.all():
        raise ValueError(f"one half of the samples is needed to fit detectors, got {len(others)}: give more samples")
    first, rest = (others.select(np.flatnonzero(chosen).tolist()) for chosen in (~second, second))
    return first, frozenset(rest.ids)


def _scoring(whole: Adapter, halves: Mapping[str, HalvesOfModel]) -> Scoring:
    predictors = [
        predictor
        for name, own in halves.items()
        for predictor in own.predictors(
            {STITCHED: own.model.stitch, "mean_only": own.model.stitch.mean_only()}, name, constant=("mean_only",)
        )
    ]
    model = next(iter(halves.values())).model
    return Scoring(whole, halves, predictors, task_named(model.task).about(model))


def _planned(scoring: Scoring, samples: PairedSamples, known: Samples, run: Run) -> Any:
    """Run the target on one batch of the samples of the detectors, score one batch, and extrapolate."""
    batch = next(known.batches(min(run.batch_size, len(known))))
    with torch.no_grad():
        inputs = scoring.task.inputs(scoring.target, batch.samples)
        forward = seconds_of(lambda: scoring.target.forward(inputs), scoring.device)
    detecting = forward * len(known) / len(batch.samples) / run.processes.count
    job = f"audit of {len(scoring.halves)} model{'s'[: len(scoring.halves) > 1]}, {len(samples)} samples"
    return planned_scoring(
        job, scoring, samples, run, stages={"running the target on the samples of the detectors": detecting},
        left_out="detectors and bootstrap are not included",
    )  # fmt: skip


def _seen(
    watchers: Watchers, measured: Measured, found: Mapping[View, Mapping[str, Detection]], name: str, own: HalvesOfModel
) -> tuple[dict[str, float], dict[str, dict[str, Detection]]]:
    """Return the residual of a model and what the detectors find of it, by part of its stitching layer."""
    layer, views = own.layer, views_of(own.model.stitch)
    return {part: watchers.residual(measured.seen, view, layer, (name, STITCHED)) for part, view in views.items()}, {
        part: {label: each.of(name, layer, STITCHED) for label, each in found[view].items()}
        for part, view in views.items()
    }
