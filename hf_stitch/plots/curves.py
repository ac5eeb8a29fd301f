"""Curves with confidence bands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_COLOURS = 8
"""With more curves, all are drawn in one colour, because more colours could not be distinguished."""
COLOUR = "#31688e"


def curves(
    series: Mapping[str, Mapping[float, tuple[float, float, float]]], *, axis: str, label: str, title: str = ""
) -> Figure:
    """Draw one curve with a band of its intervals for each name.

    Args:
        series: Name -> x coordinate -> ``(value, lower end, upper end)`` of the interval.
        axis: Label of the horizontal axis.
        label: Label of the vertical axis.
        title: Title of the figure (default: none).

    Returns:
        The figure. Up to 8 curves have different colours and a legend.

    Raises:
        ValueError: If there are no curves, or a curve has no points.

    Example:
        >>> figure = curves({"direct": {4: (0.5, 0.4, 0.6), 8: (0.9, 0.8, 1.0)}}, axis="rank", label="accuracy")
        >>> figure.axes[0].lines[0].get_xdata().tolist()
        [4.0, 8.0]
    """
    from matplotlib.figure import Figure

    if not series or not all(series.values()):
        raise ValueError("there are no curves to draw, or one has no points: pass at least one point for each name")
    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    coloured = len(series) <= MOST_COLOURS
    for place, (name, points) in enumerate(series.items()):
        colour = f"C{place}" if coloured else COLOUR
        xs = np.array(sorted(points), np.float64)
        values, lows, highs = np.array([points[x] for x in sorted(points)], np.float64).T
        axes.plot(xs, values, "o-", color=colour, label=name, markersize=4, alpha=1.0 if coloured else 0.5)
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.2 if coloured else 0.05, linewidth=0)
    if coloured:
        axes.legend(frameon=False)
    axes.set_xlabel(axis)
    axes.set_ylabel(label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize="large")
    return figure
