"""Tasks by name, and the tasks of heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from hf_stitch.adapters import Adapter
from hf_stitch.printing import see
from hf_stitch.registry import registries
from hf_stitch.tasks.base import Task

WITHOUT_HEAD = "feature-extraction"
"""Task of models without a head; ``None`` is equivalent."""

SINGLE_LABEL = "single_label_classification"
"""``problem_type`` in transformers of classification with one class per sample."""


def task_named(name: str | None) -> Task:
    """Return a task; ``None`` compares the outputs of a model with its target."""
    return registries.tasks.build(name or WITHOUT_HEAD)


def task_of_problem(name: str | None, problem_type: str | None) -> str | None:
    """Return the task of a head: ``name``, or the related task that the problem type of its config requires."""
    task = task_named(name)
    if problem_type in (None, task.problem_type or SINGLE_LABEL):
        return name
    for related in registries.tasks:
        task_class = registries.tasks.get(related)
        if task_class.family == task.family and problem_type == (task_class.problem_type or SINGLE_LABEL):
            return related
    raise ValueError(f"config.problem_type {problem_type!r} does not fit a head for {name}")


class Headed(Protocol):
    """Interface of a network that may have a head: an adapter or a stitched model."""

    @property
    def unscored(self) -> str:
        """Predictions of a head that cannot be scored, in words; empty otherwise."""


def check_trained(network: Headed) -> None:
    """Raise an error if a network has newly initialised weights (:attr:`hf_stitch.Adapter.new`)."""
    if isinstance(network, Adapter) and network.new:
        raise ValueError(
            f"{type(network.model).__name__} has randomly initialised weights: {', '.join(network.new)}. Train and "
            "save it first. To use it as it is, pass the network in memory, hf_stitch.load(adapter.model, "
            "processor=adapter.processor)" + see("missing-weights")
        )


def check_head(network: Headed) -> None:
    """Raise an error if the head of a network is untrained or cannot be scored. A network without a head passes."""
    check_trained(network)
    if network.unscored:
        name = type(network.model if isinstance(network, Adapter) else network).__name__
        raise ValueError(
            f"{name} has a head for {network.unscored}, which cannot be scored (tasks: "
            f"{', '.join(registries.tasks)}): stitch with task=None to map activations without scores, or load the "
            "backbone (hf_stitch.load(…, task='feature-extraction'), or .base_model)" + see("heads")
        )


def task_of_head(task: str | None, head_task: str | None) -> str | None:
    """Return the task of a head; versions up to 0.2 recorded regression and multi-label heads as classification."""
    if task is None or head_task is None or not registries.tasks.get(task).classifies:
        return task
    head_class = registries.tasks.get(head_task)
    return head_task if head_class.family == registries.tasks.get(task).family and not head_class.classifies else task


def task_of(target: Adapter, task: str | None) -> str | None:
    """Return the task that scores stitched models with a target; ``None`` for outputs without a head."""
    if task is None:
        return None
    check_head(target)
    head_task = target.task
    task_name = head_task if task == "auto" else task
    if task_name in (None, WITHOUT_HEAD):
        return None
    task_object: Task = registries.tasks.build(task_name)
    class_name = type(target.model).__name__
    if head_task not in (None, task_name) and (
        not task_object.family or registries.tasks.get(head_task).family != task_object.family
    ):
        raise ValueError(f"task={task_name!r} is not the task of {class_name} (head for {head_task}); remove task")
    if requirement := _difference(target, task_object):
        remedy = "use task=None" if head_task == task_name else "remove task, or use task=None"
        raise ValueError(f"task={task_name!r} requires {requirement}; {remedy}")
    return task_name


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
