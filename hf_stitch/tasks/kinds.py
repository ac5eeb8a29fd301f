"""The tasks by name."""

from __future__ import annotations

from hf_stitch.registry import registries
from hf_stitch.tasks.base import Task
from hf_stitch.tasks.heads import WITHOUT_HEAD

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
