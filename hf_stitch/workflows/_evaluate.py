"""How well a stitched model does, beside what it must beat: :func:`evaluate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hf_stitch.analysis.evaluation import Evaluation
from hf_stitch.analysis.scoring import Answers, Array, answers, as_score, check_place, figures_of, reference
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Samples
from hf_stitch.stitches import StitchingLayer


def evaluate(
    stitched: StitchedModel,
    data: Any,
    *,
    target: Any = None,
    paired_data: Any = None,
    baselines: Mapping[str, StitchingLayer] | None = None,
    batch_size: int = 64,
    seed: int = 0,
    resamples: int = 1000,
    progress: bool = True,
) -> Evaluation:
    """Score a stitched model on samples it was not fitted on, beside its baselines.

    Baselines share both halves: ``identity`` (no map; widths that differ are padded with zeros or cut), ``mean only``
    (the target's mean whatever the source says), the ``target`` alone, and ``chance`` (always the most frequent class,
    with the classes' shares as probabilities; for language, all tokens equally likely).

    Figures of classifiers: ``accuracy``; ``relative_accuracy`` (over the target's accuracy, Csiszárik et al. 2021,
    section 4; NaN where the target has none right); ``cross_entropy`` with the true
    labels, in nats; ``agreement`` (share of samples on which the prediction is the target's). Of language models:
    ``perplexity``, ``relative_perplexity``, ``cross_entropy`` per token in nats, ``agreement`` on the next token;
    tokens that have no real token before them do not count. Without labels, classifiers have ``agreement`` only.

    Args:
        stitched: The model, with a head.
        data: Held-out raw samples: what :meth:`hf_stitch.Samples.of` takes.
        target: The whole target network; default: the one it was made of, or the one that its config names. Or the
            stitched model that this one was before its encoder was swapped.
        paired_data: Where the target is to see other samples, with the same ids in the same order.
        baselines: More stitching layers of the same place, by what they are called.
        batch_size: Samples per forward.
        seed: Of the bootstrap.
        resamples: Number of bootstrap resamples; samples are resampled, jointly for all predictors.
        progress: Show a progress bar.

    Returns:
        The figures with 95% intervals.

    Raises:
        ValueError: If the model has no head, the target is neither live nor named, a baseline is of another place, or
            labels are missing or out of range.
    """
    samples = Samples.of(data)
    for name, layer in (baselines or {}).items():
        check_place(stitched, name, layer)
    layers = {
        "stitched": stitched.stitch,
        "identity": stitched.stitch.identity(),
        "mean_only": stitched.stitch.mean_only(),
        **(baselines or {}),
    }
    found = answers(
        stitched,
        layers,
        samples,
        reference(stitched, target),
        None if paired_data is None else Samples.of(paired_data),
        batch_size=batch_size,
        progress=progress,
    )
    drawn = figures_of(_with_chance(found, str(stitched.task)), str(stitched.task), resamples=resamples, seed=seed)
    scores = {name: {figure: as_score(values) for figure, values in row.items()} for name, row in drawn.items()}
    return Evaluation(str(stitched.task), len(samples), samples.fingerprint, scores)


def _with_chance(collected: Mapping[str, Answers], task: str) -> dict[str, Answers]:
    """The predictor that knows nothing of a sample: the most frequent class, or all tokens equally likely."""
    target = collected["target"]
    chance: dict[str, Array] = {}
    if task == "text-generation":
        chance = {**target, "cross_entropy": target["tokens"] * np.log(target["vocabulary"])}
        chance["agreement"] = target["tokens"] / target["vocabulary"]
    else:
        answers = target.get("label", target["class"])
        classes, inverse, counts = np.unique(answers, return_inverse=True, return_counts=True)
        chance["agreement"] = (target["class"] == classes[counts.argmax()]).astype(float)
        if "label" in target:
            chance["right"] = (inverse == counts.argmax()).astype(float)
            chance["cross_entropy"] = -np.log(counts / counts.sum())[inverse]
    return {**collected, "chance": chance}
