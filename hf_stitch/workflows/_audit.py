"""Audit of a stitched model, accuracy and distribution of its activations: :func:`audit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_stitch.adapters import Adapter
from hf_stitch.adapters.cutting.modes import evaluating
from hf_stitch.analysis.auditing import Audit
from hf_stitch.analysis.distribution import Rows, compare_distributions
from hf_stitch.analysis.scoring import whole_target
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.data import Samples, check_same_order, paired_batches
from hf_stitch.registry import registries
from hf_stitch.representation import Pooling, Representation
from hf_stitch.statistics import Moments
from hf_stitch.stitches.layer import paired_rows
from hf_stitch.workflows._evaluate import evaluate, fitted_share

MOST_FITTED = 0.05
"""Maximum share of samples to which the stitching layer was fitted; data sets contain duplicates."""

Parts = Mapping[str, tuple[Tensor, Tensor, Tensor]]
"""Part of a stitching layer -> stitched rows, the target's rows, and for each row the index of its sample."""


def audit(
    stitched: StitchedModel,
    data: Any,
    *,
    target: Any = None,
    source: Any = None,
    paired_data: Any = None,
    train_data: Any = None,
    pooling: Pooling | None = None,
    min_relative_accuracy: float = 0.8,
    batch_size: int = 64,
    seed: int = 0,
    resamples: int = 1000,
    progress: bool = True,
) -> Audit:
    """Check whether a stitched model is accurate and whether its activations follow the target's distribution.

    A stitching layer that is trained on the task can drive the target with activations that the target never produces.
    The score of such a model is no evidence of similarity (Balogh and Jelasity 2025). The audit therefore checks both:

    - *Accurate*: the model reaches at least ``min_relative_accuracy`` of the target's accuracy (for language models: a
      relative perplexity of at most its inverse), and its whole 95% interval is better than the baselines ``mean_only``
      and ``chance``.
    - *In distribution*: a likelihood ratio from moments cannot separate the stitched activations from the target's
      activations on the same samples, or could not if they had not regressed to the mean
      (:func:`compare_distributions`). The whole 95% interval of its AUROC over samples lies below .64.
    - *Out of distribution*: the interval lies above .64 and above the control. The control separates the target's
      activations on ``data`` from those on ``train_data`` with the same score. In all other cases the result is
      undecided.

    The moments are computed from all rows. One row per sample is scored; with ``pooling="none"`` this is one position
    drawn at random (determined by the sample's id). By default the rows are the ones that the stitching layer maps. On
    other rows, for example means over positions, even a least-squares map of positions is not a conditional mean.

    The verdict is also written to ``stitched.config.recipe``, so the model card contains it after saving or pushing.

    Args:
        stitched: The stitched model. It must have a head.
        data: Held-out raw samples on which the stitching layer was not fitted, in any form that
            :meth:`hf_stitch.Samples.of` accepts.
        target: The whole target network. Default: as in :func:`hf_stitch.evaluate`.
        source: The whole source network, for its score. Default: as in :func:`hf_stitch.evaluate`.
        paired_data: Samples for the target, if it takes other samples than the source. They need the same ids in the
            same order as ``data``.
        train_data: Samples on which the target was trained, for the control, in the form that the target takes. As many
            as in ``data`` are enough. Default: no control.
        pooling: The pooling of the rows. Default: the pooling of the stitching layer.
        min_relative_accuracy: Threshold on the relative accuracy, above 0 and at most 1. The default is the threshold
            of Csiszárik et al. 2021, section 8.
        batch_size: Number of samples per forward pass.
        seed: Seed of the bootstrap and of the random choice of rows.
        resamples: Number of bootstrap resamples.
        progress: Whether to show progress bars.

    Returns:
        The audit: ``verdict`` (one sentence), ``is_accurate``, ``in_distribution`` (``None`` if undecided), the
        ``evaluation`` with its baselines, and per part of the stitching layer the AUROCs (``distributions``) and the
        relative ``residual``.

    Raises:
        ValueError: If ``min_relative_accuracy`` is out of range, the model has no head, or the stitching layer was
            fitted to more than 5% of the samples; in all cases in which
            :func:`hf_stitch.evaluate` raises it; if the rows of source and target do not correspond under the pooling;
            or if there are too few samples for moments of this width.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Flatten, Linear, ReLU, Sequential
        >>> _ = torch.manual_seed(0)  # some random networks give all images one class
        >>> net = Sequential(Flatten(), Linear(12, 8), ReLU(), Linear(8, 2))
        >>> images = torch.randn(300, 3, 2, 2)
        >>> net = hf_stitch.load(net, example_inputs=images[:2])
        >>> itself = hf_stitch.stitch(net, net, images, source_layer="2", target_layer="2", matcher="identity")
        >>> hf_stitch.audit(itself, images).verdict
        'accurate and in distribution'
    """
    if not 0 < min_relative_accuracy <= 1:
        raise ValueError(f"min_relative_accuracy must be above 0 and at most 1, got {min_relative_accuracy}")
    whole, samples = whole_target(stitched, target), Samples.of(data)
    others = samples if paired_data is None else Samples.of(paired_data)
    check_same_order(samples, others)
    pooling = pooling or stitched.stitch.pooling
    if stitched.task is None:
        raise ValueError(f"{type(stitched).__name__} has no head, so it cannot be scored; stitch with a task")
    if (fitted := fitted_share(stitched, samples) or 0) > MOST_FITTED:
        raise ValueError(
            f"the stitching layer was fitted to {fitted:.1%} of these samples, on which an audit shows nothing; pass "
            "samples that it was not fitted to"
        )
    options: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "progress": progress}
    found = _collect(samples, others, partial(_stitched_rows, stitched, whole, pooling), **options)
    seen = None if train_data is None else Samples.of(train_data)
    trained = {} if seen is None else _collect(seen, seen, partial(_target_rows, stitched, whole, pooling), **options)
    distributions = {
        part: compare_distributions(of_part, trained.get(part), resamples=resamples, seed=seed)
        for part, of_part in found.items()
    }
    residual = registries.metrics.get("direct_matching").formula
    audited = Audit(
        evaluate(
            stitched, samples, target=whole, source=source, paired_data=paired_data, resamples=resamples, **options
        ),
        min_relative_accuracy,
        pooling,
        {part: float(residual(_merged(of_part.moments))) for part, of_part in found.items()},
        distributions,
        None if seen is None else seen.fingerprint,
        seed,
    )
    verdict = {"verdict": audited.verdict, "data": samples.fingerprint, "seed": seed}
    stitched.config.recipe = {**(stitched.config.recipe or {}), "audit": verdict}
    return audited


def _stitched_rows(
    stitched: StitchedModel, whole: Adapter, pooling: Pooling, raw: list[Any], other: list[Any]
) -> Parts:
    with evaluating(stitched):
        mapped = stitched.transfer(**stitched.preprocess(raw))
    return _parts(mapped, _own(stitched, whole, other), pooling, fitted=pooling == stitched.stitch.pooling)


def _target_rows(stitched: StitchedModel, whole: Adapter, pooling: Pooling, raw: list[Any], other: list[Any]) -> Parts:
    real = _own(stitched, whole, other)
    return _parts(real, real, pooling, fitted=pooling == stitched.stitch.pooling)


def _own(stitched: StitchedModel, whole: Adapter, raw: list[Any]) -> Representation:
    """Return the target's activations at its cut."""
    layer = (stitched.config.target or {})["cut"]["layer"]
    return whole.encode(whole.preprocess(raw), layer)[layer]


def _parts(mapped: Representation, real: Representation, pooling: Pooling, *, fitted: bool) -> Parts:
    """Return corresponding rows and their samples; with the stitching layer's own pooling, the rows of its fit."""
    pairs = paired_rows(mapped, real, pooling) if fitted else {"body": (mapped.rows(pooling), real.rows(pooling))}
    masked = real if mapped.mask is None else mapped
    owners = {"body": masked.row_samples(pooling).cpu(), "prefix": torch.arange(real.batch)}
    return {part: (x.double().cpu(), y.double().cpu(), owners[part]) for part, (x, y) in pairs.items()}


@torch.no_grad()
def _collect(
    samples: Samples,
    others: Samples,
    rows_of: Callable[[list[Any], list[Any]], Parts],
    *,
    batch_size: int,
    seed: int,
    progress: bool,
) -> dict[str, Rows]:
    """Collect the moments of all rows and one row per sample, by part; independent of order and batch size."""
    order, draws = _by_id(samples, seed)
    halves, start = np.empty(len(samples), np.int64), 0
    halves[order] = np.arange(len(samples)) % 2
    moments: dict[str, tuple[Moments, Moments]] = {}
    kept: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for batch, other in paired_batches(samples, others, batch_size, "auditing" if progress else None):
        places = slice(start, start := start + len(batch.ids))
        for part, (x, y, owners) in rows_of(batch.samples, other.samples).items():
            of_part = moments.setdefault(part, (Moments(x.shape[1], y.shape[1]), Moments(x.shape[1], y.shape[1])))
            in_half = torch.from_numpy(halves[places])[owners]
            for half in (0, 1):
                of_part[half].update(x[in_half == half], y[in_half == half])
            one = _one_of_each(owners, draws[places])
            kept.setdefault(part, []).append((x[one], y[one]))
    return {
        part: Rows(
            {
                side: torch.cat([pair[i] for pair in kept[part]]).numpy()[order]
                for i, side in enumerate(("stitched", "target"))
            },
            moments[part],
        )
        for part in moments
    }


def _by_id(samples: Samples, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a random order of the samples and a number in [0, 1) for each, both determined by the ids."""
    random = np.random.default_rng(seed)
    by_id = np.array(sorted(range(len(samples)), key=lambda place: repr(samples.ids[place])))
    draws = np.empty(len(samples))
    draws[by_id] = random.random(len(samples))
    return by_id[random.permutation(len(samples))], draws


def _one_of_each(owners: Tensor, draws: np.ndarray) -> Tensor:
    """Return the index of one row per sample; the rows of a sample are contiguous."""
    counts = torch.bincount(owners, minlength=len(draws))
    if not bool(counts.all()):
        raise ValueError("a sample has no row under this pooling because it is masked entirely; leave it out")
    return counts.cumsum(0) - counts + (torch.from_numpy(draws) * counts).long()


def _merged(halves: Sequence[Moments]) -> Moments:
    first, second = halves
    return Moments(first.dx, first.dy).merge(first).merge(second)
