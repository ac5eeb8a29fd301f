"""Traversal and modification of module outputs: trees of tuples, lists, mappings and model outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

Path = tuple[int | str, ...]


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Iterate over the leaves of a tree of tuples, lists and mappings."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, (tuple, list)) and not isinstance(value, PackedSequence):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


def tensors(value: Any) -> dict[Path, Tensor]:
    """Return the tensors of a tree."""
    return {path: leaf for path, leaf in leaves(value) if isinstance(leaf, Tensor)}


def arguments(args: tuple[Any, ...], kwargs: Mapping[Any, Any]) -> dict[int | str, Any]:
    """Merge the positional and keyword arguments of a call into one mapping."""
    return {**dict(enumerate(args)), **kwargs}


def is_plain(value: Any) -> bool:
    """Return whether a tree contains only tuples, lists, dicts, tensors, numbers, strings and ``None``.

    The outline of such a tree can be stored as JSON.
    """
    if type(value) in (tuple, list):
        return all(map(is_plain, value))
    if type(value) is dict:
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, (Tensor, bool, int, float, str))


def transform(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to every leaf of a tree; model outputs and named tuples keep their type."""
    if isinstance(value, Mapping):
        items = {key: transform(item, function) for key, item in value.items()}
        if type(value) is dict:
            return items
        twin = copy.copy(value)
        for key, item in items.items():
            twin[key] = item  # type: ignore[index]
        return twin
    if isinstance(value, PackedSequence):  # a named tuple, but treated as a leaf
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(transform(item, function) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(transform(item, function) for item in value)
    return function(value)


def put(value: Any, path: Path, leaf: Any) -> Any:
    """Replace the leaf at a path."""
    if not path:
        return leaf
    head, rest = path[0], path[1:]
    if isinstance(value, tuple):
        items = [put(item, rest, leaf) if index == head else item for index, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    twin = copy.copy(value)
    twin[head] = put(value[head], rest, leaf)
    return twin


def get(value: Any, path: Path) -> Any:
    """Return the leaf at a path."""
    for key in path:
        value = value[key]
    return value
