"""Running a network in eval mode, and leaving it in the mode that it was in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; every module's mode as it was afterwards, also on error.

    Nothing is checkpointed meanwhile: what a backward pass computes again, it would compute in the mode of then. (The
    layers of transformers checkpoint in training only, those of timm always.)
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
