"""Running a network in eval mode and restoring its mode afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set a model to eval mode and restore the mode of every module afterwards, also after an error.

    Gradient checkpointing of timm is off meanwhile: a backward pass would repeat the forward in the restored mode.
    (Layers of transformers use checkpoints in training mode only, those of timm in both modes.)
    """
    flags = ("training", "grad_checkpointing")
    on = [(module, flag) for module in model.modules() for flag in flags if vars(module).get(flag) is True]
    try:
        for module, flag in on:
            setattr(module, flag, False)
        yield
    finally:
        for module, flag in on:
            setattr(module, flag, True)
