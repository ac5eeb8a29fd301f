"""Values with their intervals, one below the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOUR = "#31688e"


def intervals(scores: Mapping[str, tuple[float, float, float]], label: str) -> Figure:
    """Draw one point with its interval for each name.

    Args:
        scores: Name -> ``(value, lower end, upper end)`` of the interval, in order from top to bottom.
        label: Label of the horizontal axis.

    Example:
        >>> figure = intervals({"stitched": (0.95, 0.93, 0.97), "chance": (0.10, 0.08, 0.12)}, "accuracy")
        >>> [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
        ['stitched', 'chance']
    """
    return interval_panels({"": scores}, label)


def interval_panels(panels: Mapping[str, Mapping[str, tuple[float, float, float]]], label: str) -> Figure:
    """Draw panels of :func:`intervals` side by side, with the same horizontal axis.

    Args:
        panels: Title -> name -> ``(value, lower end, upper end)``. A row has the same name in all panels and stays
            empty where a panel does not have it.
        label: Label of the horizontal axis.

    Example:
        >>> figure = interval_panels({"first": {"a": (0.5, 0.4, 0.6)}, "second": {"b": (0.7, 0.6, 0.8)}}, "accuracy")
        >>> [axes.get_title() for axes in figure.axes], len(figure.axes[0].get_yticks())
        (['first', 'second'], 2)
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for scores in panels.values() for name in scores))
    if not names:
        raise ValueError("there are no scores to draw: scores must contain at least one name")
    for scores in panels.values():
        for name, (_, low, high) in scores.items():
            if low > high:
                raise ValueError(f"the interval of {name!r} ends at {high}, before it begins at {low}")

    width = 6.0 if len(panels) == 1 else 1.5 + 4.5 * len(panels)
    figure = Figure(figsize=(width, 0.42 * len(names) + 1.0), layout="constrained")
    for axes, (title, scores) in zip(
        figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0], panels.items(), strict=True
    ):
        _draw(axes, [scores.get(name, (np.nan,) * 3) for name in names])
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_title(title, fontsize=11)
        axes.set_xlabel(label)
    return figure


def _draw(axes: Axes, scores: list[tuple[float, float, float]]) -> None:
    values, lows, highs = np.array(scores, np.float64).T
    places = np.arange(len(scores))
    axes.hlines(places, lows, highs, color=COLOUR, linewidth=3, alpha=0.45)
    axes.plot(values, places, "o", color=COLOUR, markersize=7)
    for place, value, high in zip(places, values, highs, strict=True):
        if np.isfinite(value):
            end = high if np.isfinite(high) else value
            axes.annotate(
                f"{value:.3f}", (max(value, end), place), (8, 0), textcoords="offset points", va="center", fontsize=9
            )
    axes.margins(x=0.12)
    axes.grid(axis="x", alpha=0.25)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
