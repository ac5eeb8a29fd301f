"""Forwards of a network or a part of it: in eval mode, on PyTorch's unfused path, with texts grouped by length."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, compiler, nn
from torch.backends import mha

from hf_stitch.adapters.cutting import tree
from hf_stitch.adapters.cutting.interface import Interface
from hf_stitch.representation import Representation

_SWITCHING = threading.Lock()
_STATES: list[bool] = []
"""The previous state of PyTorch's fused path, global to all threads, for each active :func:`plain` context."""


@contextmanager
def plain() -> Iterator[None]:
    """Disable the fused path of PyTorch modules; the last thread that leaves the context restores the state.

    In eval mode without gradients and hooks, ``nn.MultiheadAttention`` and modules that contain it round differently on
    this path, and ``nn.TransformerEncoder`` passes nested tensors. Compiled code uses separate kernels.
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

    Gradient checkpointing of timm is disabled meanwhile: a backward pass would repeat the forward in the restored mode.
    (Layers of transformers use checkpoints in training mode only, layers of timm in both modes.) ``fused`` enables the
    fused path of PyTorch modules.
    """
    flags = ("training", "grad_checkpointing")
    enabled = [(module, flag) for module in model.modules() for flag in flags if vars(module).get(flag) is True]
    try:
        for module, flag in enabled:
            setattr(module, flag, False)
        with nullcontext() if fused else plain():
            yield
    finally:
        for module, flag in enabled:
            setattr(module, flag, True)


def run_by_length(run: Callable[[Any], Any], start: Any, interface: Interface) -> Any:
    """Run a network, or a part of it, on texts; if any padding changes activations, run each length separately.

    ``start`` is either inputs or a representation with its context. ``run`` returns a tree of tensors and
    representations. They are merged for all texts, with zeros at padding. Without a mask, padding ids at the ends of
    texts count as padding.
    """
    inputs = start.context if isinstance(start, Representation) else start
    ids, mask = inputs.get(interface.content[0]), inputs.get(interface.mask)
    if interface.sides or not isinstance(ids, Tensor):
        return run(start)
    words = ids.ne(int(interface.pad_id or 0)).int() if mask is None else mask
    real = (words.cummax(1).values * words.flip(1).cummax(1).values.flip(1) if mask is None else words).bool()
    used = real | ~real.any(1, keepdim=True)  # a text of only padding keeps its length
    if real.shape != ids.shape or bool(used.all()):
        return run(start)
    counts = used.sum(1)
    groups = [(counts == count).nonzero()[:, 0] for count in counts.unique()]

    def select(value: Any, rows: Tensor, used: Tensor) -> Any:
        if isinstance(value, Mapping):
            return {name: select(branch, rows, used) for name, branch in value.items()}
        if isinstance(value, Representation):
            names = ("values", "mask", "context")
            return value.replace(**{name: select(getattr(value, name), rows, used) for name in names})
        if isinstance(value, Tensor) and value.shape == real[:1].shape:  # positions of all texts
            value = value.expand(real.shape)
        if not isinstance(value, Tensor) or value.shape[:1] != real.shape[:1]:
            return value
        tokens = value.shape[:2] == real.shape
        return value[rows][used[rows]].unflatten(0, (len(rows), -1)) if tokens else value[rows]

    def merge(pieces: list[Any]) -> Any:
        first = pieces[0]
        if isinstance(first, Representation):
            values, mask = merge([piece.values for piece in pieces]), real if first.layout == "bnd" else None
            return first.replace(values=values, mask=mask, context=interface.erase(inputs))
        if not isinstance(first, Tensor):
            return first
        axes = [axis for axis in range(1, first.dim()) if [piece.shape[axis] for piece in pieces] == sizes]
        texts = []
        for rows, values in zip(groups, pieces, strict=False):
            for axis in axes:
                tokens = values.movedim(axis, 1)
                padded = tokens.new_zeros(len(rows), real.shape[1], *tokens.shape[2:])
                padded[used[rows]] = tokens.flatten(0, 1)
                values = padded.movedim(1, axis)
            texts.append(values)
        return torch.cat(texts)[torch.cat(groups).argsort()]

    outputs, sizes = [run(select(start, rows, used)) for rows in groups], [int(counts[rows[0]]) for rows in groups]
    if len(groups) == 1:  # a second length distinguishes token axes from other axes of the same size
        longer = used.index_fill(1, used[0].int().argmin(), True)
        outputs.append(run(select(start, groups[0][:1], longer)))
        sizes.append(sizes[0] + 1)
    merged = outputs[0]
    for path, _ in tree.leaves(merged):
        merged = tree.put(merged, path, merge([tree.get(output, path) for output in outputs]))
    return merged


def is_compiled(model: nn.Module) -> bool:
    """Return whether a module of a network was compiled in place."""
    return any(module._compiled_call_impl is not None for module in model.modules())
