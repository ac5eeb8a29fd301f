"""Running a network in eval mode, on PyTorch's plain path, and restoring its mode and the path afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import compiler, nn
from torch.backends import mha

_SWITCHING = threading.Lock()
_STATES: list[bool] = []
"""The state of PyTorch's fused path, which all threads share, as every thread that keeps to the plain path met it."""


@contextmanager
def plain() -> Iterator[None]:
    """Keep modules of PyTorch from their fused path; the last thread that leaves restores its state.

    In eval mode without gradients and hooks, ``nn.MultiheadAttention`` and modules that contain it round differently on
    this path, and ``nn.TransformerEncoder`` passes nested tensors. Compiled code has its own kernels.
    """
    if compiler.is_dynamo_compiling():
        yield
        return
    with _SWITCHING:
        _STATES.append(mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _SWITCHING:
            state = _STATES.pop()
            if not _STATES:
                mha.set_fastpath_enabled(state)


@contextmanager
def evaluating(model: nn.Module, *, fused: bool = False) -> Iterator[None]:
    """Set a model to eval mode and restore the mode of every module afterwards, also after an error.

    Gradient checkpointing of timm is off meanwhile: a backward pass would repeat the forward in the restored mode.
    (Layers of transformers use checkpoints in training mode only, those of timm in both modes.) Modules of PyTorch take
    their plain path, unless ``fused`` is set.
    """
    flags = ("training", "grad_checkpointing")
    on = [(module, flag) for module in model.modules() for flag in flags if vars(module).get(flag) is True]
    try:
        for module, flag in on:
            setattr(module, flag, False)
        with nullcontext() if fused else plain():
            yield
    finally:
        for module, flag in on:
            setattr(module, flag, True)
