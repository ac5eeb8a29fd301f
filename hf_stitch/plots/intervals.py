"""Values with their intervals, one below the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOUR = "#31688e"


def intervals(scores: Mapping[str, tuple[float, float, float]], label: str) -> Figure:
    """Draw one point with its interval for each name.

    Args:
        scores: Name -> ``(value, lower end, upper end)`` of the interval, in order from top to bottom.
        label: Label of the horizontal axis.

    Returns:
        The figure. The row of a name whose value is NaN stays empty.

    Raises:
        ValueError: If there are no scores, or an interval ends before it begins.

    Example:
        >>> figure = intervals({"stitched": (0.95, 0.93, 0.97), "chance": (0.10, 0.08, 0.12)}, "accuracy")
        >>> [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
        ['stitched', 'chance']
    """
    from matplotlib.figure import Figure

    if not scores:
        raise ValueError("there are no scores to draw: scores must contain at least one name")
    values, lows, highs = np.array(list(scores.values()), np.float64).T
    for name, low, high in zip(scores, lows, highs, strict=True):
        if low > high:
            raise ValueError(f"the interval of {name!r} ends at {high}, before it begins at {low}")

    figure = Figure(figsize=(6.0, 0.42 * len(scores) + 1.0), layout="constrained")
    axes = figure.add_subplot()
    places = np.arange(len(scores))
    axes.hlines(places, lows, highs, color=COLOUR, linewidth=3, alpha=0.45)
    axes.plot(values, places, "o", color=COLOUR, markersize=7)
    for place, value, high in zip(places, values, highs, strict=True):
        if np.isfinite(value):
            axes.annotate(
                f"{value:.3f}", (max(value, high), place), (8, 0), textcoords="offset points", va="center", fontsize=9
            )
    axes.set_yticks(places, list(scores))
    axes.set_ylim(len(scores) - 0.4, -0.6)
    axes.set_xlabel(label)
    axes.margins(x=0.12)
    axes.grid(axis="x", alpha=0.25)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure
