"""Histograms with marked values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOUR = "#31688e"
MARK = "#e6550d"


def histogram(values: ArrayLike, marks: Mapping[str, float], *, label: str = "", title: str = "") -> Figure:
    """Draw a histogram, with named values marked by vertical lines.

    Args:
        values: (n,) finite numbers, at least one.
        marks: Name -> value; both are written beside the line.
        label: Label of the horizontal axis (default: none).
        title: Title of the figure (default: none).

    Returns:
        The figure.

    Raises:
        ValueError: If there are no values, or values or marks are not finite.

    Example:
        >>> figure = histogram([0.1, 0.2, 0.2, 0.3], {"observed": 0.9}, label="CKA")
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['observed 0.900']
    """
    from matplotlib.figure import Figure

    numbers = np.asarray(values, np.float64)
    if numbers.ndim != 1 or not numbers.size:
        raise ValueError(f"values must be a list of at least one number, got the shape {numbers.shape}")
    if not np.isfinite([*numbers, *marks.values()]).all():
        raise ValueError("values and marks must be finite, got NaN or infinity")

    figure = Figure(figsize=(6.0, 3.0), layout="constrained")
    axes = figure.add_subplot()
    axes.hist(numbers, bins=min(30, max(5, numbers.size // 8)), color=COLOUR, alpha=0.6)
    for place, (name, value) in enumerate(marks.items()):
        axes.axvline(value, color=MARK, linewidth=2)
        axes.annotate(
            f"{name} {value:.3f}", (value, 0.96 - 0.09 * place), (5, 0), xycoords=("data", "axes fraction"),
            textcoords="offset points", va="top", fontsize=9,
        )  # fmt: skip
    axes.margins(x=0.2)
    axes.set_xlabel(label)
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.suptitle(title, fontsize="large")
    return figure
