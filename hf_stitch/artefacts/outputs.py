"""Logits and loss of models with a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def logits_of(output: Any) -> Tensor:
    """Return the logits in the output of a model with a head.

    Args:
        output: Output of the model: a tensor, an object or mapping with ``logits``, or a tuple whose first item is the
            logits.

    Returns:
        The logits.

    Example:
        >>> logits_of({"logits": torch.zeros(2, 3)}).shape
        torch.Size([2, 3])
    """
    if isinstance(output, Mapping):
        return output["logits"]
    return output if isinstance(output, Tensor) else output.logits if hasattr(output, "logits") else output[0]


def class_loss(logits: Tensor, labels: Tensor | None, problem_type: str | None) -> Tensor | None:
    """Return the loss of a classification head, computed in float32 or higher precision.

    Args:
        logits: (batch, classes).
        labels: Classes (batch,) int64, or probabilities (batch, classes); 0 or 1 (batch, classes) for multi-label
            classification. ``None``: no loss.
        problem_type: ``problem_type`` of the target's config in transformers: ``multi_label_classification`` (binary
            cross-entropy), ``regression`` (mean squared error), or anything else (cross-entropy).

    Returns:
        The mean loss, a scalar; ``None`` without labels.

    Example:
        >>> float(class_loss(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]), "multi_label_classification")) < 0.7
        True
    """
    if labels is None:
        return None
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = labels.to(logits.device)
    match problem_type:
        case "multi_label_classification":
            return functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
        case "regression":
            return functional.mse_loss(logits.squeeze(), labels.squeeze().to(logits.dtype))
        case _:
            return functional.cross_entropy(logits, labels.to(logits.dtype) if labels.is_floating_point() else labels)
