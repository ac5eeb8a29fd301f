"""Curves with confidence bands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#000000", "#e69f00", "#0072b2", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#7f7f7f")
"""Colours that colour-blind readers can distinguish (Okabe and Ito 2008)."""
MARKERS = "osD^vP*X"
"""One marker for each colour, for figures in black and white."""
DASHES = ("-", "--", ":", "-.")
MOST_KINDS = len(DASHES)
"""Number of kinds of curves that dashes can distinguish."""
COLOUR = "#31688e"


def curves(
    series: Mapping[str, Mapping[float, tuple[float, float, float]]],
    *,
    axis: str,
    label: str,
    title: str = "",
    split: Mapping[str, tuple[str, str]] | None = None,
) -> Figure:
    """Draw one curve with a band of its intervals for each name.

    Curves differ in colour, and in marker or dashes, so that the figure can be read in black and white.

    Args:
        series: Name -> x coordinate -> ``(value, lower end, upper end)`` of the interval.
        axis: Label of the horizontal axis.
        label: Label of the vertical axis.
        title: Title of the figure (default: none).
        split: Name -> ``(colour, dashes)``, two texts for the legend. Curves with the same first text have the same
            colour and marker, those with the same second text the same dashes (up to 4). ``None`` (default): each curve
            has its own colour, and all are solid.

    Returns:
        The figure. Up to 8 colours are used, with a legend; if there are more curves (or first texts), all have one
        colour and no entry, because more colours could not be distinguished.

    Example:
        >>> figure = curves({"direct": {4: (0.5, 0.4, 0.6), 8: (0.9, 0.8, 1.0)}}, axis="rank", label="accuracy")
        >>> figure.axes[0].lines[0].get_xdata().tolist()
        [4.0, 8.0]
    """
    from matplotlib.figure import Figure

    if not series or not all(series.values()):
        raise ValueError("there are no curves to draw, or one has no points: pass at least one point for each name")
    kinds = {name: (name, "") for name in series} if split is None else {name: split[name] for name in series}
    colours, dashes = (list(dict.fromkeys(kind[place] for kind in kinds.values())) for place in (0, 1))
    if len(dashes) > MOST_KINDS:
        raise ValueError(f"at most {MOST_KINDS} kinds of dashes can be distinguished, got {', '.join(dashes)}")
    coloured = len(colours) <= len(PALETTE)
    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for name, points in series.items():
        place, dash = colours.index(kinds[name][0]), DASHES[dashes.index(kinds[name][1])]
        colour, marker = (PALETTE[place], MARKERS[place]) if coloured else (COLOUR, "o")
        xs = np.array(sorted(points), np.float64)
        values, lows, highs = np.array([points[x] for x in sorted(points)], np.float64).T
        style: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": dash, "markersize": 4}
        axes.plot(xs, values, label=name, alpha=1.0 if coloured else 0.5, **style)
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.2 if coloured else 0.05, linewidth=0)
    _explain(axes, colours if coloured else [], dashes)
    axes.set_xlabel(axis)
    axes.set_ylabel(label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize="large")
    return figure


def _explain(axes: Axes, colours: list[str], dashes: list[str]) -> None:
    from matplotlib.lines import Line2D

    found = [Line2D([], [], color=PALETTE[i], marker=MARKERS[i], markersize=4) for i in range(len(colours))]
    texts = list(colours)
    if len(dashes) > 1:
        found += [Line2D([], [], color="black", ls=dash) for dash in DASHES[: len(dashes)]]
        texts += dashes
    if texts:
        beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)} if len(texts) > 4 else {}
        axes.legend(found, texts, frameon=False, fontsize="small", **beside)
