"""The class of a stitched model for a task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_stitch.registry import registries

if TYPE_CHECKING:
    from hf_stitch.artefacts.modeling import StitchedModel


def class_for(task: str | None) -> type[StitchedModel]:
    """Return the class of stitched models for a task."""
    kind: type[StitchedModel] = registries.heads.base if task is None else registries.heads.get(task)
    return kind
