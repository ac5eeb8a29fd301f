"""Layers that are given as a list of names."""

from __future__ import annotations

from collections.abc import Iterable

from hf_stitch.options import check


def layer_names(argument: str, layers: Iterable[str]) -> tuple[str, ...]:
    """Check a list of layers."""
    check(Iterable[str], **{argument: layers})
    names = tuple(layers)
    if not names:
        raise ValueError(f"{argument} must contain at least one layer, got none")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{argument} contains {twice[0]!r} more than once; name each layer once")
    return names
