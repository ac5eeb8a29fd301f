"""Texts of one length run together, for networks whose activations any padding changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
    counts = real.sum(1)
    if real.shape != ids.shape or bool(real.all()) or not bool(counts.all()):
        return run(given)
    groups = [(counts == count).nonzero()[:, 0] for count in counts.unique()]

    def part(value: Any, rows: Tensor) -> Any:
        if isinstance(value, Mapping):
            return {name: part(each, rows) for name, each in value.items()}
        if isinstance(value, Representation):
            return value.replace(**{name: part(getattr(value, name), rows) for name in ("values", "mask", "context")})
        if not isinstance(value, Tensor) or value.shape[:1] != real.shape[:1]:
            return value
        tokens = value.shape[:2] == real.shape
        return value[rows][real[rows]].unflatten(0, (len(rows), -1)) if tokens else value[rows]

    def whole(parts: list[Any]) -> Any:
        first = parts[0]
        if isinstance(first, Representation):
            values, mask = whole([each.values for each in parts]), real if first.layout == "bnd" else None
            return first.replace(values=values, mask=mask, context=interface.erase(inputs))
        if not isinstance(first, Tensor):
            return first
        tokens = [each.shape[1:2] for each in parts] == [(int(counts[rows[0]]),) for rows in groups]
        found = first.new_zeros(*(real.shape if tokens else real.shape[:1]), *first.shape[1 + tokens :])
        for rows, each in zip(groups, parts, strict=True):
            together = found[rows]
            together[real[rows] if tokens else ...] = each.flatten(0, 1) if tokens else each
            found[rows] = together
        return found

    outputs = [run(part(given, rows)) for rows in groups]
    found = outputs[0]
    for path, _ in tree.leaves(found):
        found = tree.put(found, path, whole([tree.get(each, path) for each in outputs]))
    return found
