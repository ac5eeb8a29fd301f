"""Is a stitched model accurate, and are its representations such as the target has: :func:`audit`."""

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
from hf_stitch.workflows._evaluate import evaluate

Parts = Mapping[str, tuple[Tensor, Tensor, Tensor]]
"""Part of a stitching layer -> stitched rows, the target's rows, and the sample of the batch that each belongs to."""


def audit(
    stitched: StitchedModel,
    data: Any,
    *,
    target: Any = None,
    paired_data: Any = None,
    train_data: Any = None,
    pooling: Pooling | None = None,
    min_relative_accuracy: float = 0.8,
    batch_size: int = 64,
    seed: int = 0,
    resamples: int = 1000,
    progress: bool = True,
) -> Audit:
    """Say whether a stitched model is accurate, and whether its representations are such as the target has.

    A stitch that is trained on the task may drive the target's half by representations that the target never has: its
    score says nothing of similarity (Balogh and Jelasity 2025). Only accurate *and* in distribution is evidence.

    *Accurate*: at least ``min_relative_accuracy`` of the target's accuracy, and above the mean alone and chance.
    *In distribution*: a likelihood ratio from moments does not tell the stitched representations from the target's, of
    the same samples, or would not if they had not regressed to the mean (:func:`compare_distributions`): AUROC, with
    its whole 95% interval over samples, below .64. *Out*: above .64 and above the control; this tells the target's
    representations of ``data`` from those of ``train_data`` by the same score. Otherwise it cannot be told.

    The moments are those of all rows; one row of each sample is scored, under ``none`` one position drawn at
    random (by the sample's id). The rows are those that the stitch maps: of others, such as means of positions, even a
    least-squares map of positions is no conditional mean.

    The verdict goes into the model's recipe too, so that its card says it when it is saved or pushed.

    Args:
        stitched: The model, with a head.
        data: Held-out raw samples, which the stitch was not fitted on.
        target: The whole target; default: as in :func:`hf_stitch.evaluate`.
        paired_data: Where the target is to see other samples, with the same ids in the same order.
        train_data: Samples that the target was trained on, for the control, as it sees them; as many as in ``data`` will do.
        pooling: Another pooling than the stitch's own.
        min_relative_accuracy: Between 0 and 1; the default is the threshold of Csiszárik et al. 2021, section 8.
        batch_size: Samples per forward.
        seed: Of the bootstrap and of the rows drawn.
        resamples: Number of bootstrap resamples.
        progress: Show progress bars.

    Raises:
        ValueError: As :func:`hf_stitch.evaluate`; also if rows do not correspond under the pooling, or there are too
            few samples for moments of that width.

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
        raise ValueError(f"{type(stitched).__name__} has no head that could be scored; stitch with a task")
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
        evaluate(stitched, samples, target=whole, paired_data=paired_data, resamples=resamples, **options),
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
    """The target's own representation at its cut."""
    layer = (stitched.config.target or {})["cut"]["layer"]
    return whole.encode(whole.preprocess(raw), layer)[layer]


def _parts(mapped: Representation, real: Representation, pooling: Pooling, *, fitted: bool) -> Parts:
    """Rows that correspond, with their samples; under the stitch's own pooling, those that it was fitted on."""
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
    """The moments of all rows and a row of each sample, by part; the same whatever the order and the batches are."""
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
    """A random order of the samples and a number in [0, 1) for each, which go with the ids."""
    random = np.random.default_rng(seed)
    by_id = np.array(sorted(range(len(samples)), key=lambda place: repr(samples.ids[place])))
    draws = np.empty(len(samples))
    draws[by_id] = random.random(len(samples))
    return by_id[random.permutation(len(samples))], draws


def _one_of_each(owners: Tensor, draws: np.ndarray) -> Tensor:
    """For each sample of a batch one of its rows, which stand together."""
    counts = torch.bincount(owners, minlength=len(draws))
    if not bool(counts.all()):
        raise ValueError("a sample has no row under this pooling: it is masked entirely")
    return counts.cumsum(0) - counts + (torch.from_numpy(draws) * counts).long()


def _merged(halves: Sequence[Moments]) -> Moments:
    first, second = halves
    return Moments(first.dx, first.dy).merge(first).merge(second)
