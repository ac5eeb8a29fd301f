"""Texts of one length run together, for networks whose activations any padding changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_stitch.adapters.cutting import tree
from hf_stitch.adapters.cutting.interface import Interface
from hf_stitch.representation import Representation


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
