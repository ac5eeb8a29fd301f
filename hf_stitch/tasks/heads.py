"""Heads that can be scored, their logits and their loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hf_stitch.adapters import Adapter
from hf_stitch.data import Batch, Samples
from hf_stitch.registry import registries

CLASSIFIES = ("image-classification", "text-classification")
"""Tasks whose labels are classes of the network."""
TASKS = (*CLASSIFIES, "text-generation")
"""Tasks by which stitched models are scored and trained."""
SCORED = "only heads for classification with one class per sample and causal language models can be scored"
EXCLUDED = 1e30
"""Logits of this size are not computed but set, to exclude a token."""

TOLERANCE = {True: 1e-4, False: 3e-2}
"""Largest change of the logits of earlier tokens, relative to the largest logit, in float32 and above, and in half
precision, that is rounding."""


class Headed(Protocol):
    """A network that may have a head: an adapter or a stitched model."""

    @property
    def unscored(self) -> str:
        """What the head predicts, in words, if it cannot be scored; empty otherwise."""


def check_head(network: Headed) -> None:
    """Check that the head of a network can be scored. A network without a head passes."""
    if network.unscored:
        name = type(network.model if isinstance(network, Adapter) else network).__name__
        raise ValueError(
            f"{name} has a head for {network.unscored}, and {SCORED}: stitch with task=None to map activations without "
            "scores, or load the body of the network (hf_stitch.load(…, task='feature-extraction'), or .base_model of "
            "a live one)"
        )


def task_of(target: Adapter, task: str | None) -> str | None:
    """Return the task by which stitched models with a target are scored."""
    if task is None:
        return None
    check_head(target)
    own = target.task
    found = own if task == "auto" else task
    if found is None:
        return None
    registries.heads.get(found)
    name = type(target.model).__name__
    if found not in TASKS:
        raise ValueError(f"task={found!r} has no scores, and {SCORED}: use task=None")
    if own not in (None, found) and not {own, found} <= {*CLASSIFIES}:
        raise ValueError(f"task={found!r} is not the task of {name}, whose head is for {own}: leave out task")
    if why := _difference(target, found):
        remedy = "use task=None" if own == found else "leave out task, or use task=None"
        raise ValueError(f"task={found!r} needs {why}: {remedy}")
    return found


@torch.no_grad()
def _difference(target: Adapter, task: str) -> str:
    """Return what a task needs and the outputs of a network are not; empty if they are."""
    name, inputs = type(target.model).__name__, dict(target.example)
    try:
        output = target.forward(inputs)
    except Exception as error:
        return f"logits, but {name} does not run on its example inputs ({type(error).__name__}: {error})"
    if isinstance(output, Mapping) and "logits" not in output:
        return f"logits, but {name} outputs {', '.join(output)}"
    logits = logits_of(output)
    shape = tuple(logits.shape)
    if task in CLASSIFIES:
        wrong = len(shape) != 2 or shape[1] < 2
        return f"logits (samples, at least 2 classes), but {name} outputs {shape}" if wrong else ""
    content = target.interface.content[0]
    ids = inputs[content]
    if ids.is_floating_point() or shape[:-1] != tuple(ids.shape):
        return f"logits (samples, tokens, vocabulary) for token ids {tuple(ids.shape)}, but {name} outputs {shape}"
    changed = torch.cat((ids[:, :-1], ids[:, :1]), 1)
    other = logits_of(target.forward({**inputs, content: changed}))
    found, expected = (each[:, :-1].float().clamp(-EXCLUDED, EXCLUDED) for each in (other, logits))
    if not found.numel():
        return ""
    most = TOLERANCE[torch.finfo(logits.dtype).bits >= 32] * expected.abs().where(expected.abs() < EXCLUDED, 0).max()
    return (
        ""
        if bool(((found - expected).abs() <= most).all())
        else f"a causal language model, but the logits of {name} for a token depend on later tokens"
    )


def logits_of(output: Any) -> Tensor:
    """Return the logits in the output of a model with a head."""
    if isinstance(output, Mapping):
        return output["logits"]
    return output if isinstance(output, Tensor) else output.logits if hasattr(output, "logits") else output[0]


def check_labels(samples: Samples | Batch, classes: int) -> None:
    """Check that labels are classes of the target. Unlabelled data pass."""
    for id_, label in zip(samples.ids, samples.labels or (), strict=False):
        if not 0 <= label < classes:
            raise ValueError(f"sample {id_!r} has label {label}, and the target predicts classes 0 to {classes - 1}")


def class_loss(logits: Tensor, labels: Tensor | None, problem_type: str | None) -> Tensor | None:
    """Return the loss of a classification head, computed in float32 or higher precision."""
    if labels is None:
        return None
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = labels.to(logits.device)
    if problem_type == "multi_label_classification":
        return functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
    if problem_type == "regression" or (problem_type is None and logits.shape[-1] == 1):
        return functional.mse_loss(logits, labels.reshape(logits.shape).to(logits.dtype))
    return functional.cross_entropy(logits, labels.to(logits.dtype) if labels.is_floating_point() else labels)
