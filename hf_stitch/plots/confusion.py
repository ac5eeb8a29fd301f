"""Confusion matrices, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from hf_stitch.plots.heatmap import COLOURS, MOST_COLUMNS, UNDEFINED, draw_frames, write_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def confusion(
    counts: Mapping[str, ArrayLike],
    labels: Sequence[str],
    *,
    row_title: str = "",
    column_title: str = "",
    label: str = "share",
) -> Figure:
    """Draw confusion matrices as heat maps of the shares of each row, with a frame around the diagonal.

    Args:
        counts: Title -> (n, n) non-negative counts: how often the object of a row was taken for that of a column.
        labels: Names of the objects.
        row_title: What the rows are (default: nothing).
        column_title: What the columns are (default: nothing).
        label: Label of the colour bar.

    Returns:
        The figure, with one axes per matrix and then that of the colour bar, from 0 to 1. Rows without counts are grey.

    Raises:
        ValueError: If there are no matrices, or one is not (n, n) finite non-negative numbers for n labels.

    Example:
        >>> figure = confusion({"CKA": [[9, 1], [0, 5]]}, ["a", "b"])
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['0.90', '0.10', '0.00', '1.00']
    """
    from matplotlib import colormaps
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    known = {title: np.asarray(matrix, np.float64) for title, matrix in counts.items()}
    size = len(labels)
    if not known or not size:
        raise ValueError("there is nothing to draw: counts needs at least one matrix, and labels one name")
    for title, matrix in known.items():
        if matrix.shape != (size, size) or not (np.isfinite(matrix) & (matrix >= 0)).all():
            wrong = f"the shape {matrix.shape}" if matrix.shape != (size, size) else "a negative or non-finite number"
            raise ValueError(f"{title!r} must be finite non-negative counts of the shape {(size, size)}, got {wrong}")
    side = max(0.5 * min(size, MOST_COLUMNS) + 0.075 * max(map(len, labels)) + 0.8, 2.6)
    figure = Figure(figsize=(side * len(known) + 1.0, side + 0.6), layout="constrained")
    panels = figure.subplots(1, len(known), squeeze=False)[0]
    colours = colormaps[COLOURS].with_extremes(bad=UNDEFINED)
    for axes, (title, matrix) in zip(panels, known.items(), strict=True):
        totals = matrix.sum(1, keepdims=True)
        shares = np.divide(matrix, totals, out=np.full(matrix.shape, np.nan), where=totals > 0)
        image = axes.imshow(np.ma.masked_invalid(shares), cmap=colours, norm=Normalize(0, 1))
        axes.set_title(title, fontsize="medium")
        axes.set_xticks(range(size), labels, rotation=90)
        axes.set_yticks(range(size), labels)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set(xlabel=column_title, ylabel=row_title)
        if size <= MOST_COLUMNS:
            write_numbers(axes, shares, image, np.zeros(shares.shape, bool))
        draw_frames(axes, np.eye(size, dtype=bool))
    figure.colorbar(image, ax=list(panels), label=label).outline.set_visible(False)
    return figure
