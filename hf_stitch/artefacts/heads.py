"""Which class a stitched model has, by the task of its target's head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_stitch.registry import registries

if TYPE_CHECKING:
    from hf_stitch.artefacts.modeling import StitchedModel


def class_for(task: str | None) -> type[StitchedModel]:
    """The class with the head for a task.

    Args:
        task: A name of ``registries.heads``; ``None`` for the class without a head, ``StitchedModel`` itself.

    Raises:
        UnknownNameError: If there is none.

    Example:
        >>> class_for("image-classification").__name__
        'StitchedModelForImageClassification'
    """
    kind: type[StitchedModel] = registries.heads.base if task is None else registries.heads.get(task)
    return kind
