"""The class of a stitched model for a task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_stitch.registry import registries

if TYPE_CHECKING:
    from hf_stitch.artefacts.modeling import StitchedModel


def class_for(task: str | None) -> type[StitchedModel]:
    """Return the class of stitched models for a task.

    Args:
        task: A name in ``registries.heads``; ``None`` for ``StitchedModel``, the class without a head.

    Returns:
        The class.

    Raises:
        UnknownNameError: If no class is registered for the task.

    Example:
        >>> class_for("image-classification").__name__
        'StitchedModelForImageClassification'
    """
    kind: type[StitchedModel] = registries.heads.base if task is None else registries.heads.get(task)
    return kind
