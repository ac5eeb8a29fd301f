"""The tasks by name, and which of them a head is for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from hf_stitch.adapters import Adapter
from hf_stitch.printing import see
from hf_stitch.registry import registries
from hf_stitch.tasks.base import Task

WITHOUT_HEAD = "feature-extraction"
"""The task of models without a head, for which ``None`` stands too."""

SINGLE_LABEL = "single_label_classification"
"""What transformers calls classification with one class per sample."""


def task_named(name: str | None) -> Task:
    """Return a task; a model without one is compared with its target by outputs."""
    return registries.tasks.build(name or WITHOUT_HEAD)


def task_of_problem(name: str | None, problem_type: str | None) -> str | None:
    """Return the task of a head: its own, or another one that the problem type of its config names."""
    task = task_named(name)
    if problem_type in (None, task.problem_type or SINGLE_LABEL):
        return name
    for other in registries.tasks:
        kind = registries.tasks.get(other)
        if kind.family == task.family and problem_type == (kind.problem_type or SINGLE_LABEL):
            return other
    raise ValueError(f"config.problem_type is {problem_type!r}, but the head is for {name}")


class Headed(Protocol):
    """A network that may have a head: an adapter or a stitched model."""

    @property
    def unscored(self) -> str:
        """What the head predicts, in words, if it cannot be scored; empty otherwise."""


def check_trained(network: Headed) -> None:
    """Check that no weights of a network are new, which its loading asked for (:attr:`hf_stitch.Adapter.new`)."""
    if isinstance(network, Adapter) and network.new:
        raise ValueError(
            f"{type(network.model).__name__} has new weights, which are random: {', '.join(network.new)}. Train and "
            "save it first. To take it as it is, pass the live network, hf_stitch.load(adapter.model, "
            "processor=adapter.processor)" + see("missing-weights")
        )


def check_head(network: Headed) -> None:
    """Check that the head of a network is trained and can be scored. A network without a head passes."""
    check_trained(network)
    if network.unscored:
        name = type(network.model if isinstance(network, Adapter) else network).__name__
        raise ValueError(
            f"{name} has a head for {network.unscored}, which no task scores (tasks: {', '.join(registries.tasks)}): "
            "stitch with task=None to map activations without scores, or load the body of the network "
            "(hf_stitch.load(…, task='feature-extraction'), or .base_model of a live one)" + see("heads")
        )


def task_of_head(task: str | None, own: str | None) -> str | None:
    """Return the task of a head for numbers or several classes, which versions up to 0.2 recorded as classification."""
    if task is None or own is None or not registries.tasks.get(task).classifies:
        return task
    kind = registries.tasks.get(own)
    return own if kind.family == registries.tasks.get(task).family and not kind.classifies else task


def task_of(target: Adapter, task: str | None) -> str | None:
    """Return the task by which stitched models with a target are scored; ``None`` for outputs without a head."""
    if task is None:
        return None
    check_head(target)
    own = target.task
    found = own if task == "auto" else task
    if found in (None, WITHOUT_HEAD):
        return None
    wanted: Task = registries.tasks.build(found)
    name = type(target.model).__name__
    if own not in (None, found) and (not wanted.family or registries.tasks.get(own).family != wanted.family):
        raise ValueError(f"task={found!r} is not the task of {name}, whose head is for {own}: leave out task")
    if why := _difference(target, wanted):
        remedy = "use task=None" if own == found else "leave out task, or use task=None"
        raise ValueError(f"task={found!r} needs {why}: {remedy}")
    return found


@torch.no_grad()
def _difference(target: Adapter, task: Task) -> str:
    name = type(target.model).__name__
    try:
        output = target.forward(dict(target.example))
    except Exception as error:
        return f"logits, but {name} does not run on its example inputs ({type(error).__name__}: {error})"
    if isinstance(output, Mapping) and "logits" not in output:
        return f"logits, but {name} outputs {', '.join(output)}"
    return task.difference(target, output)
