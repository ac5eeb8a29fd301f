"""How a network, or a part of it, runs: in eval mode, on PyTorch's plain path, and texts of one length together."""

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


def run_by_length(run: Callable[[Any], Any], given: Any, interface: Interface) -> Any:
    """Run a network, or a part of it, on texts: those of each length apart if any padding changes its activations.

    What is given are inputs, or a representation with its context; what is run returns a tree of tensors and
    representations, which are returned for all texts, with zeros at padding. Without a mask, the ids of padding at the
    ends of texts are padding.
    """
    inputs = given.context if isinstance(given, Representation) else given
    ids, mask = inputs.get(interface.content[0]), inputs.get(interface.mask)
    if interface.sides or not isinstance(ids, Tensor):
        return run(given)
    words = ids.ne(int(interface.pad_id or 0)).int() if mask is None else mask
    real = (words.cummax(1).values * words.flip(1).cummax(1).values.flip(1) if mask is None else words).bool()
    kept = real | ~real.any(1, keepdim=True)  # a text of padding alone keeps its length
    if real.shape != ids.shape or bool(kept.all()):
        return run(given)
    counts = kept.sum(1)
    groups = [(counts == count).nonzero()[:, 0] for count in counts.unique()]

    def part(value: Any, rows: Tensor, kept: Tensor) -> Any:
        if isinstance(value, Mapping):
            return {name: part(each, rows, kept) for name, each in value.items()}
        if isinstance(value, Representation):
            names = ("values", "mask", "context")
            return value.replace(**{name: part(getattr(value, name), rows, kept) for name in names})
        if isinstance(value, Tensor) and value.shape == real[:1].shape:  # positions of all texts
            value = value.expand(real.shape)
        if not isinstance(value, Tensor) or value.shape[:1] != real.shape[:1]:
            return value
        tokens = value.shape[:2] == real.shape
        return value[rows][kept[rows]].unflatten(0, (len(rows), -1)) if tokens else value[rows]

    def whole(parts: list[Any]) -> Any:
        first = parts[0]
        if isinstance(first, Representation):
            values, mask = whole([each.values for each in parts]), real if first.layout == "bnd" else None
            return first.replace(values=values, mask=mask, context=interface.erase(inputs))
        if not isinstance(first, Tensor):
            return first
        axes = [axis for axis in range(1, first.dim()) if [each.shape[axis] for each in parts] == sizes]
        texts = []
        for rows, values in zip(groups, parts, strict=False):
            for axis in axes:
                tokens = values.movedim(axis, 1)
                wide = tokens.new_zeros(len(rows), real.shape[1], *tokens.shape[2:])
                wide[kept[rows]] = tokens.flatten(0, 1)
                values = wide.movedim(1, axis)
            texts.append(values)
        return torch.cat(texts)[torch.cat(groups).argsort()]

    outputs, sizes = [run(part(given, rows, kept)) for rows in groups], [int(counts[rows[0]]) for rows in groups]
    if len(groups) == 1:  # with another length, which tells axes of tokens from others of the same size
        longer = kept.index_fill(1, kept[0].int().argmin(), True)
        outputs.append(run(part(given, groups[0][:1], longer)))
        sizes.append(sizes[0] + 1)
    found = outputs[0]
    for path, _ in tree.leaves(found):
        found = tree.put(found, path, whole([tree.get(each, path) for each in outputs]))
    return found


def is_compiled(model: nn.Module) -> bool:
    """Return whether a module of a network was compiled in place."""
    return any(module._compiled_call_impl is not None for module in model.modules())
