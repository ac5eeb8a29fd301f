"""Methods that are given as a list, by their labels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hf_stitch.registry import registries


def labelled(kind: str, entries: Iterable[Any]) -> dict[str, Any]:
    """Build matchers or detectors.

    Args:
        kind: ``matchers`` or ``detectors``.
        entries: Names, records or objects.

    Returns:
        By label: the name with all options that differ from their defaults.

    Raises:
        TypeError: If it is a single name.
        ValueError: If there is no such method, an option is wrong, or a method is named twice.
    """
    if isinstance(entries, str) or not isinstance(entries, Iterable):
        raise TypeError(f"{kind} must be a list, got {entries!r}; write [{entries!r}]")
    built = [registries[kind].build(entry) for entry in entries]
    found = {entry.label: entry for entry in built}
    if len(found) < len(built):
        raise ValueError(f"{kind} must name each method once, got {', '.join(entry.label for entry in built)}")
    return found
