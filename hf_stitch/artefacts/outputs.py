"""What models with a head return, and its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def logits_of(output: Any) -> Tensor:
    """The logits in what a model with a head returns: the tensor itself, its ``logits``, or the first of a tuple.

    Args:
        output: Of the model.
    """
    if isinstance(output, Mapping):
        return output["logits"]
    return output if isinstance(output, Tensor) else output.logits if hasattr(output, "logits") else output[0]


def class_loss(logits: Tensor, labels: Tensor | None, problem_type: str | None) -> Tensor | None:
    """The loss of a head that classifies, as its target was trained for.

    Args:
        logits: ``(batch, classes)``.
        labels: As for the model's forward; ``None``: no loss.
        problem_type: As transformers has it in a config.
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
