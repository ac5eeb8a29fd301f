"""The tasks by name."""

from __future__ import annotations

from hf_stitch.registry import registries
from hf_stitch.tasks.base import Task
from hf_stitch.tasks.heads import WITHOUT_HEAD


def task_named(name: str | None) -> Task:
    """Return a task; a model without one is compared with its target by outputs."""
    return registries.tasks.build(name or WITHOUT_HEAD)
