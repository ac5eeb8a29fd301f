"""The tasks by name."""

from __future__ import annotations

from hf_stitch.tasks.base import Task
from hf_stitch.tasks.classification import Classification
from hf_stitch.tasks.heads import CLASSIFIES, TASKS
from hf_stitch.tasks.tokens import NextToken
from hf_stitch.tasks.vectors import Vectors


def task_named(name: str | None) -> Task:
    """Return a task; a model without one is compared with its target by outputs."""
    if name not in TASKS:
        return Vectors()
    return Classification() if name in CLASSIFIES else NextToken()
