"""Methods that are given as a list, by their labels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hf_stitch.registry import registries


def labelled(kind: str, entries: Iterable[Any], argument: str | None = None, least: int = 0) -> dict[str, Any]:
    """Build matchers or detectors."""
    argument = argument or kind
    if isinstance(entries, str) or not isinstance(entries, Iterable):
        raise TypeError(f"{argument} must be a list, got {entries!r}; write [{entries!r}]")
    built = [registries[kind].build(entry) for entry in entries]
    found = {entry.label: entry for entry in built}
    if len(found) < len(built):
        raise ValueError(f"{argument} must name each method once, got {', '.join(entry.label for entry in built)}")
    if len(found) < least:
        raise ValueError(f"{argument} must contain at least one {kind[:-1]}, got none")
    return found
