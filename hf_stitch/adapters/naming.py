"""Layers that are given as a list of names."""

from __future__ import annotations

from collections.abc import Iterable

from hf_stitch.registry import check_name


def layer_names(argument: str, layers: Iterable[str]) -> tuple[str, ...]:
    """Check a list of layers."""
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise TypeError(f"{argument} must be a list of names, got {layers!r}; write [{layers!r}]")
    names = tuple(layers)
    check_name(**{f"{argument}[{place}]": name for place, name in enumerate(names)})
    if not names:
        raise ValueError(f"{argument} must contain at least one layer, got none")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{argument} contains {twice[0]!r} more than once; name each layer once")
    return names
