"""Difference between the accuracies of two networks, from their logits or probabilities and the true classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from hf_stitch.analysis import ConfidenceInterval, bootstrap
from hf_stitch.metrics import MeanMetric, of_rows
from hf_stitch.metrics._rows import Array, check_widths, paired
from hf_stitch.papers import KLABUNDE_2023

__all__ = ["accuracy_difference", "bootstrap_accuracy_difference"]


@of_rows
def accuracy_difference(x: Tensor, y: Tensor, *, labels: Tensor | Array) -> Tensor:
    """Absolute difference between the accuracies of two networks (Klabunde et al. 2023).

    It is not a registered metric, because metrics do not accept labels.

    Args:
        x: Logits or probabilities of the first network, ``(n, classes)``. Ties go to the first class.
        y: Logits or probabilities of the second network, ``(n, classes)``.
        labels: True classes, ``(n,)`` integers from 0 to classes - 1.

    Returns:
        Distance in [0, 1]; a float for arrays, a 0-d float64 tensor for tensors.

    Raises:
        ValueError: If the widths differ, or ``labels`` is not an integer array of shape ``(n,)`` with values in range.

    Example:
        >>> import torch
        >>> accuracy_difference(torch.eye(4), torch.eye(4).flip(0), labels=torch.arange(4)).item()
        1.0
    """
    correct_x, correct_y = _correct_predictions(x, y, labels)
    return (correct_x - correct_y).mean().abs()


def bootstrap_accuracy_difference(
    x: Tensor | Array,
    y: Tensor | Array,
    *,
    labels: Tensor | Array,
    samples: Sequence[Any] | ArrayLike | Tensor | None = None,
    resamples: int = 200,
    seed: int = 0,
    confidence: float = 0.95,
) -> ConfidenceInterval:
    """Compute :func:`accuracy_difference` with a confidence interval by a half-sample bootstrap.

    Args:
        x: As in :func:`accuracy_difference`.
        y: As in :func:`accuracy_difference`.
        labels: As in :func:`accuracy_difference`.
        samples: As in :func:`hf_stitch.analysis.bootstrap`.
        resamples: Number of resamples, at least 2.
        seed: Seed of the resamples.
        confidence: Confidence level of the interval, between 0 and 1.

    Returns:
        The value on all samples with its interval.

    Raises:
        ValueError: As in :func:`accuracy_difference` and :func:`hf_stitch.analysis.bootstrap`.

    Example:
        >>> import torch
        >>> labels = torch.arange(40) % 4
        >>> right = torch.eye(4)[labels]
        >>> wrong = torch.cat([right[:20], right[20:].roll(1, 1)])
        >>> interval = bootstrap_accuracy_difference(right, wrong, labels=labels, resamples=50)
        >>> interval.low < interval.value == 0.5 < interval.high
        True
    """
    correct = _correct_predictions(*paired("accuracy_difference", x, y), labels)
    options: dict[str, Any] = {"samples": samples, "resamples": resamples, "seed": seed, "confidence": confidence}
    return bootstrap(AccuracyDifference, *(side[:, None] for side in correct), **options)


def _correct_predictions(x: Tensor, y: Tensor, labels: Tensor | Array) -> tuple[Tensor, Tensor]:
    """Return ``(n,)`` for each side: 1 where the prediction is correct, 0 elsewhere."""
    check_widths("accuracy_difference", x, y)
    labels = torch.as_tensor(labels, device=x.device)
    integers = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    if not integers or labels.shape != x.shape[:1]:
        raise ValueError(
            f"accuracy_difference: labels must be {len(x)} integers, got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    outside = (labels < 0) | (labels >= x.shape[1])
    if outside.any():
        row = int(outside.nonzero()[0])
        raise ValueError(
            f"accuracy_difference: the label of row {row} must be from 0 to {x.shape[1] - 1}, got {labels[row].item()}"
            "; drop samples without a label"
        )
    return (x.argmax(1) == labels).to(x), (y.argmax(1) == labels).to(x)


@of_rows
def _difference(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).mean().abs()


class AccuracyDifference(MeanMetric):
    """Absolute difference between the means of two columns, which are 1 for correct predictions and 0 otherwise."""

    name = "accuracy_difference"
    title = "difference of accuracies"
    papers = (KLABUNDE_2023,)
    function = staticmethod(_difference)
    values = staticmethod(torch.sub)
    statistic = "outputs"
    higher_is_better = False
