"""Audit of stitched models, accuracy and distribution of their activations: :func:`audit`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from hf_stitch.adapters import Adapter
from hf_stitch.adapters.prefixes import PrefixFront
from hf_stitch.analysis.audit_pass import SOURCE, AuditPass, layer_of, views_of
from hf_stitch.analysis.auditing import STITCHED, Audit
from hf_stitch.analysis.detection.drawing import halves
from hf_stitch.analysis.detection.noise import MAX_DOSE
from hf_stitch.analysis.detection.recording import View
from hf_stitch.analysis.detection.result import Detection, Evidence, detect
from hf_stitch.analysis.detection.watching import Watch, check_needs, fit_watch, see_all
from hf_stitch.analysis.evaluation import Evaluation
from hf_stitch.analysis.planning import planned_scoring
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Data, PairedSamples, Samples
from hf_stitch.data.classes import numbered_as
from hf_stitch.data.overlap import MOST_SHARED
from hf_stitch.detectors import Detector
from hf_stitch.options import NonNegative, Several, Within, checked
from hf_stitch.registry import registries
from hf_stitch.resources import seconds_of
from hf_stitch.running import WITHOUT_STATE, Run, RunOptions
from hf_stitch.scoring.halves import HalvesOfModel, scored_target, source_alone
from hf_stitch.scoring.measured import as_score
from hf_stitch.scoring.passing import Scoring
from hf_stitch.tasks.heads import check_head
from hf_stitch.tasks.kinds import task_named
from hf_stitch.workflows._checks import fitted_share, samples_to_score
from hf_stitch.workflows._held_out import check_far
from hf_stitch.workflows._networks import Named, Runs

DETECTORS = ("mahalanobis", "knn")
"""Default of ``detectors``."""


@checked
def audit(
    stitched: StitchedModel | Iterable[StitchedModel],
    data: Data,
    *,
    detectors: Iterable[Named | Detector] = DETECTORS,
    max_dose: NonNegative = MAX_DOSE,
    train_data: Data | None = None,
    far_data: Data | None = None,
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
    detector that does not tell ``far_data`` from ``data``, or the target's own activations from these with noise of
    their size, is no evidence at this layer and does not count.

    Several models with the same target are audited together: the target runs once, and detectors are fitted once for
    each of its layers. Under ``accelerate launch`` each process takes a part of the samples and all processes return
    the same audit, without any change to the call.

    The verdict is also written to ``config.recipe`` of the model, so the model card contains it after saving or
    pushing.

    Args:
        stitched: The stitched model, or several with the same target. They must have heads.
        data: Held-out raw samples on which the stitching layer was not fitted, in any form that
            :meth:`hf_stitch.Samples.of` accepts.
        detectors: Names in ``hf_stitch.registries.detectors``, or detectors. The defaults read positions
            (``mahalanobis``) and their mean (``knn``); what one of them does not tell apart, the other may.
        max_dose: Relative residual of noise up to which activations do not count as strange. With noise of .2, Tiny-10
            keeps .69 to .87 of its accuracy, and at least ``min_relative_accuracy`` at six of its eight layers.
        train_data: Samples to which detectors are fitted, best those on which the target was trained, in the form that
            the target takes. Default: one half of ``data``, drawn by their ids; detectors then score the other half.
        far_data: Samples unlike ``data`` (noise, other motifs), in the form that the target takes, as a control.
            Default: no control.
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

    Returns:
        The audit, or a list of audits for several models: ``verdict`` (one sentence), ``is_accurate``,
        ``in_distribution`` (``None`` if undecided), ``doses`` by detector, the ``evaluation`` with its baselines, and
        per part of the stitching layer the ``detections`` with their controls and the relative ``residual``.

    Raises:
        ValueError: If an option is out of its range, a model has no head, models have different targets, a stitching
            layer was fitted to more than 5% of the samples, more than 5% of the far samples are also in ``data`` or
            ``train_data``, a detector lacks labels or auxiliary data or cannot be fitted; and in all cases in which
            :func:`hf_stitch.evaluate` raises it.

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
        models = [stitched] if isinstance(stitched, StitchedModel) else list(stitched)
        whole = _check(models, target)
        both = samples_to_score(models, data, paired_data)
        samples, others = both.a, both.b
        shares = [_check_samples(model, samples) for model in models]
        known, scored = _known(others, train_data, whole, run.seed)
        outliers, far = (None if other is None else Samples.of(other) for other in (auxiliary_data, far_data))
        watching = registries.detectors.build_all(detectors, needed=True)
        check_needs(watching, known, outliers, far)
        check_far(far, (known, others), detectors=watching)
        alone = [
            (None, "its tokens are not those of the target") if isinstance(model.source, PrefixFront)
            else source_alone(model, source, whole)
            for model in models
        ]  # fmt: skip
        if run.planning:
            return _planned(models, whole, [network for network, _ in alone], both, known, run)
        watches = _fit(models, watching, whole, known, outliers, run)
        found = AuditPass(
            models, whole, {i: network for i, (network, _) in enumerate(alone) if network is not None}, watches, scored
        )
        found.run(both, run)
        detections = _detections(found, others, known, far, run)
        audits = []
        evaluations = _evaluations(found, samples, shares, [why for _, why in alone], resamples, run.seed)
        for number, model in enumerate(models):
            audited = Audit(
                evaluations[number], min_relative_accuracy, max_dose, model.stitch.pooling,
                {part: float(left / norm) for part, (left, norm) in found.squares[number].items()}, detections[number],
                known.fingerprint, run.seed,
            )  # fmt: skip
            verdict = {"verdict": audited.verdict, "data": samples.fingerprint, "seed": run.seed}
            model.keep_scores(audit=verdict)
            audits.append(audited)
        return audits[0] if isinstance(stitched, StitchedModel) else audits


def _check(models: Sequence[StitchedModel], target: Any) -> Adapter:
    """Check that models have heads and one target, and return it."""
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


def _check_samples(model: StitchedModel, samples: Samples) -> float | None:
    """Check that a model was not fitted to the samples, and return the share of those that it was."""
    share = fitted_share(model, samples)
    if (share or 0) > MOST_SHARED:
        raise ValueError(
            f"the stitching layer was fitted to {share:.1%} of these samples, on which an audit shows nothing; pass "
            "samples that it was not fitted to"
        )
    return share


def _known(others: Samples, train_data: Any, whole: Adapter, seed: int) -> tuple[Samples, NDArray[np.bool_]]:
    """Return the samples to which detectors are fitted, and which of the others they score."""
    if train_data is not None:
        train = numbered_as(Samples.of(train_data), getattr(whole.model, "config", None))
        return train, np.ones(len(others), bool)
    second = halves(others.ids, seed, "audit")
    if second.all():
        raise ValueError(f"one half of the samples is needed to fit detectors, got {len(others)}: give more samples")
    return others.select(np.flatnonzero(~second).tolist()), second


def _fit(
    models: Sequence[StitchedModel],
    detectors: Mapping[str, Detector],
    whole: Adapter,
    known: Samples,
    outliers: Samples | None,
    run: Run,
) -> dict[View, Watch]:
    """Fit the detectors to all that they will be shown: one set for each pooling, and one for prefix tokens."""
    layers: dict[View, list[str]] = {}
    for model in models:
        for view in views_of(model).values():
            layers.setdefault(view, []).append(layer_of(model))
    return {
        view: fit_watch(
            detectors, whole, list(dict.fromkeys(of_view)), known, view, run, outliers=outliers,
            kinds=("coloured",),
        )
        for view, of_view in layers.items()
    }  # fmt: skip


def _planned(
    models: Sequence[StitchedModel], whole: Adapter, alone: Sequence[Adapter | None], samples: PairedSamples,
    known: Samples, run: Run,
) -> Any:  # fmt: skip
    """Score one batch with each model, run the target on one, and extrapolate."""
    batch = next(known.batches(min(run.batch_size, len(known))))
    with torch.no_grad():
        forward = seconds_of(lambda: whole.forward(whole.preprocess(batch.samples)), models[0].device)
    halves = {str(number): HalvesOfModel(*each) for number, each in enumerate(zip(models, alone, strict=True))}
    predictors = [
        predictor
        for name, own in halves.items()
        for predictor in own.predictors({"stitched": own.model.stitch, "mean_only": own.model.stitch.mean_only()}, name)
    ]
    scoring = Scoring(whole, halves, predictors, task_named(models[0].task))
    detecting = forward * len(known) / len(batch.samples) / run.processes.count
    job = f"audit of {len(models)} model{'s'[: len(models) > 1]}, {len(samples)} samples"
    return planned_scoring(
        job, scoring, samples, run, stages={"running the target on the samples of the detectors": detecting},
        left_out="detectors and bootstrap are not included",
    )  # fmt: skip


def _detections(
    found: AuditPass, others: Samples, known: Samples, far: Samples | None, run: Run
) -> list[dict[str, dict[str, Detection]]]:
    """Return what the detectors find, of each model, by part and detector."""
    ids = [others.ids[place] for place in np.flatnonzero(found.scored)]
    by_view: dict[View, dict[str, Detection]] = {}
    for view, watch in found.watches.items():
        seen = {}
        if far is not None:
            seen = see_all(watch, found.whole, far, view, run)
        own, doses, stitched = (found.kept(what, view) for what in ("own", "doses", "stitched"))
        evidence = Evidence(ids, own, doses, stitched, known.ids, seen, () if far is None else far.ids)
        by_view[view] = {label: detect(watch, label, [SOURCE], evidence, two_sided=False) for label in watch.detectors}
    return [
        {
            part: {
                label: detection.of(str(number), layer_of(model), STITCHED)
                for label, detection in by_view[view].items()
            }
            for part, view in views_of(model).items()
        }
        for number, model in enumerate(found.models)
    ]


def _evaluations(
    found: AuditPass,
    samples: Samples,
    shares: Sequence[float | None],
    without_source: Sequence[str],
    resamples: int,
    seed: int,
) -> list[Evaluation]:
    """Return the scores of each model, all on the same resamples."""
    task, evaluations = found.task, []
    order = ("stitched", "mean_only", "source", "target", "chance")
    for number, (measured, why) in enumerate(zip(found.answers, without_source, strict=True)):
        chance = {"chance": task.chance(measured, seed)}
        drawn = task.drawn({**measured, **chance}, resamples=resamples, seed=seed)
        scores = {who: {figure: as_score(values) for figure, values in row.items()} for who, row in drawn.items()}
        rows = {who: scores[who] for who in sorted(scores, key=order.index)}
        left_out = {"identity": "audits leave it out, see hf_stitch.evaluate"} | ({"source": why} if why else {})
        name = str(found.models[number].task)
        evaluations.append(Evaluation(name, len(samples), samples.fingerprint, rows, shares[number], left_out))
    return evaluations
