"""Histograms of several groups over the same bins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#31688e", "#e6550d", "#35b779", "#756bb1")


def overlaid(edges: ArrayLike, counts: Mapping[str, ArrayLike], *, label: str = "", title: str = "") -> Figure:
    """Draw the histograms of several groups over each other, each as shares of its group.

    Args:
        edges: ``(bins + 1,)`` ascending edges; the first and the last may be infinite, and are drawn as wide as the
            bin beside them.
        counts: Group -> ``(bins,)`` counts, not all zero.
        label: Label of the horizontal axis (default: none).
        title: Title of the figure (default: none).

    Returns:
        The figure.

    Raises:
        ValueError: If there are fewer than three bins, too many groups, or counts and edges do not fit.

    Example:
        >>> figure = overlaid([-np.inf, 0, 1, np.inf], {"own": [5, 4, 1], "stitched": [0, 2, 8]}, label="score")
        >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        ['own', 'stitched']
    """
    from matplotlib.figure import Figure

    places = np.array(edges, np.float64)
    rows = {name: np.asarray(values, np.float64) for name, values in counts.items()}
    if len(places) < 4 or any(row.shape != (len(places) - 1,) for row in rows.values()):
        shapes = {name: row.shape for name, row in rows.items()}
        raise ValueError(f"each group needs one count per bin of at least 3, got {len(places)} edges and {shapes}")
    if not (np.diff(places) > 0).all():
        raise ValueError(f"edges must ascend, got {places.tolist()}")
    if not 0 < len(rows) <= len(COLOURS) or not all(row.sum() > 0 for row in rows.values()):
        raise ValueError(f"give 1 to {len(COLOURS)} groups that are not empty, got {', '.join(rows) or 'none'}")
    places[0] = places[0] if np.isfinite(places[0]) else 2 * places[1] - places[2]
    places[-1] = places[-1] if np.isfinite(places[-1]) else 2 * places[-2] - places[-3]

    figure = Figure(figsize=(6.0, 3.0), layout="constrained")
    axes = figure.add_subplot()
    for colour, (name, row) in zip(COLOURS, rows.items(), strict=False):
        axes.stairs(row / row.sum(), places, fill=True, color=colour, alpha=0.4, label=name)
    axes.set_xlabel(label)
    axes.set_ylabel("share")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.suptitle(title, fontsize="large")
    return figure
