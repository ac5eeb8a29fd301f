"""The class of a stitched model for a task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_stitch.artefacts.configuration import StitchConfig
from hf_stitch.tasks.kinds import task_named

if TYPE_CHECKING:
    from hf_stitch.artefacts.modeling import StitchedModel


def class_for(config: StitchConfig) -> type[StitchedModel]:
    """Return the class of the stitched model of a config."""
    source = config.source or {}
    kind: type[StitchedModel] = task_named(config.task).model_for(source.get("interface", {}).get("modality", ""))
    return kind
