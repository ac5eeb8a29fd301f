"""Helpers of plots and report pages: titles of axes, and the colour range of heat maps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ends = tuple[float, float]
"""Values of the first and of the last colour."""


def ends_of(values: NDArray[np.float64], whole: Ends | None = None) -> Ends | None:
    """Return the colour range of the finite values; ``None`` if they are all equal.

    With ``whole``, the range of the figure, the ends are rounded outward to a tenth of it, to hide rounding errors.
    """
    finite = values[np.isfinite(values)]
    if not finite.size:
        return None
    low, high = float(finite.min()), float(finite.max())
    if whole is not None and np.isfinite(whole).all():
        step = 10.0 ** (np.round(np.log10(whole[1] - whole[0])) - 1)
        low, high = (
            float(np.round(f(np.round(x / step, 6)) * step, 12)) for f, x in ((np.floor, low), (np.ceil, high))
        )
        low = float(np.round(low - step, 12)) if low == high else low
    return (low, high) if low < high else None


def titles_of(a: Mapping[str, Any], b: Mapping[str, Any], sides: tuple[str, str] = ("a", "b")) -> tuple[str, str]:
    """Return titles of axes with the names of networks, from their records."""
    titles = (f"layers of {side}" + (f": {name}" if name else "")
             for side, name in zip(sides, names_of(a, b), strict=True))  # fmt: skip
    return next(titles), next(titles)


def names_of(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, str]:
    """Return the names of two networks from their records, with revision, size or weights if the names are equal."""
    first, second = name_of(a), name_of(b)
    for key in ("revision", "summary", "weights_hash"):
        values = ((side.get("reference") or {}).get(key) or f"no {key}" for side in (a, b))
        detail_a, detail_b = (value.rpartition(", ")[2].removeprefix("sha256:")[:24] for value in values)
        if first == second != "" and detail_a != detail_b:
            return f"{first} ({detail_a})", f"{second} ({detail_b})"
    return first, second


def name_of(side: Mapping[str, Any]) -> str:
    """Return the name, id or class of a network from its record; empty for saved activations."""
    reference = side.get("reference") or {}
    class_name = (reference.get("summary") or "").partition(", ")[0]
    name = side.get("name") or reference.get("id") or class_name or side.get("class") or ""
    return PurePath(name).name if PurePath(name).is_absolute() else str(name)
