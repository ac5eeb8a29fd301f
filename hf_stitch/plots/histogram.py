"""Histograms of groups over the same bins, with marked values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#31688e", "#e6550d", "#35b779", "#756bb1")


def binned(values: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return edges of bins and how many of the values are in each, for :func:`histogram`."""
    numbers = np.asarray(values, np.float64)
    if numbers.ndim != 1 or not numbers.size or not np.isfinite(numbers).all():
        raise ValueError(f"values must be a list of at least one finite number, got {numbers}")
    counts, edges = np.histogram(numbers, bins=min(30, max(5, numbers.size // 8)))
    return edges, counts.astype(np.float64)


def histogram(
    edges: ArrayLike,
    counts: Mapping[str, ArrayLike],
    *,
    marks: Mapping[str, float] | None = None,
    label: str = "",
    title: str = "",
) -> Figure:
    """Draw the histograms of several groups over each other, each as shares of its group.

    Args:
        edges: ``(bins + 1,)`` ascending edges; the first and the last may be infinite, and are drawn as wide as the
            bin beside them.
        counts: Group -> ``(bins,)`` counts, not all zero.
        marks: Name -> finite value, both written beside a vertical line; ``None`` (default) for none.
        label: Label of the horizontal axis (default: none).
        title: Title of the figure (default: none).

    Returns:
        The figure.

    Raises:
        ValueError: If there are fewer than three bins, too many groups, counts and edges do not fit, or a mark is not
            finite.

    Example:
        >>> figure = histogram([-np.inf, 0, 1, np.inf], {"own": [5, 4, 1], "stitched": [0, 2, 8]}, marks={"limit": 0.5})
        >>> [text.get_text() for text in (*figure.axes[0].get_legend().get_texts(), *figure.axes[0].texts)]
        ['own', 'stitched', 'limit 0.500']
    """
    from matplotlib.figure import Figure

    places, marked = np.array(edges, np.float64), marks or {}
    rows = {name: np.asarray(values, np.float64) for name, values in counts.items()}
    if len(places) < 4 or any(row.shape != (len(places) - 1,) for row in rows.values()):
        shapes = {name: row.shape for name, row in rows.items()}
        raise ValueError(f"each group needs one count per bin of at least 3, got {len(places)} edges and {shapes}")
    if not (np.diff(places) > 0).all():
        raise ValueError(f"edges must ascend, got {places.tolist()}")
    if not 0 < len(rows) <= len(COLOURS) or not all(row.sum() > 0 for row in rows.values()):
        raise ValueError(f"give 1 to {len(COLOURS)} groups that are not empty, got {', '.join(rows) or 'none'}")
    if not np.isfinite(list(marked.values())).all():
        raise ValueError(f"marks must be finite, got {marked}")
    places[0] = places[0] if np.isfinite(places[0]) else 2 * places[1] - places[2]
    places[-1] = places[-1] if np.isfinite(places[-1]) else 2 * places[-2] - places[-3]

    figure = Figure(figsize=(6.0, 3.0), layout="constrained")
    axes = figure.add_subplot()
    for colour, (name, row) in zip(COLOURS, rows.items(), strict=False):
        axes.stairs(row / row.sum(), places, fill=True, color=colour, alpha=0.4, label=name)
    for place, (name, value) in enumerate(marked.items()):
        axes.axvline(value, color=COLOURS[1], linewidth=2)
        axes.annotate(
            f"{name} {value:.3f}", (value, 0.96 - 0.09 * place), (5, 0), xycoords=("data", "axes fraction"),
            textcoords="offset points", va="top", fontsize=9,
        )  # fmt: skip
    axes.margins(x=0.2 if marked else 0.05)
    axes.set_xlabel(label)
    axes.set_ylabel("share")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    figure.suptitle(title, fontsize="large")
    return figure
