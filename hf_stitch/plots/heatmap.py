"""Heat maps of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

COLOURS = "viridis"
UNDEFINED = "#d9d9d9"
MOST_COLUMNS = 24
"""Largest number of columns for which numbers are written into the cells and stay readable."""


def heatmap(
    values: ArrayLike,
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    *,
    title: str = "",
    label: str = "",
    low: float | None = None,
    high: float | None = None,
    marked: ArrayLike | None = None,
) -> Figure:
    """Draw a matrix as a heat map, with the numbers in the cells of up to 24 columns.

    Args:
        values: (rows, columns) real numbers; NaN for undefined values, whose cells are grey with a dash.
        row_labels: Labels of the rows, from top to bottom.
        column_labels: Labels of the columns, from left to right.
        title: Title of the figure (default: none).
        label: Label of the colour bar (default: none).
        low: Value of the darkest colour; ``None`` (default) for the smallest of the values.
        high: Value of the brightest colour; ``None`` (default) for the largest of the values.
        marked: (rows, columns) bool, cells to frame, for example the best ones; ``None`` (default) for none.

    Returns:
        The figure; its size depends on the number of cells.

    Raises:
        ValueError: If the values are not a matrix, contain infinity or only NaN, or do not match the labels or marks;
            or if ``low`` is not less than ``high``.

    Example:
        >>> figure = heatmap([[0.9, float("nan")], [0.2, 0.7]], ["a", "b"], ["c", "d"], label="CKA")
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['0.90', '–', '0.20', '0.70']
    """
    from matplotlib import colormaps
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    matrix = _checked(values, row_labels, column_labels)
    frames = np.zeros(matrix.shape, bool) if marked is None else np.asarray(marked, bool)
    if frames.shape != matrix.shape:
        raise ValueError(f"marked must have the shape of the values, {matrix.shape}, got {frames.shape}")
    if low is not None and high is not None and low >= high:
        raise ValueError(f"low must be less than high, got {low} and {high}")

    figure = Figure(figsize=_size(row_labels, column_labels), layout="constrained")
    axes = figure.add_subplot()
    colours = colormaps[COLOURS].with_extremes(bad=UNDEFINED)
    image = axes.imshow(np.ma.masked_invalid(matrix), cmap=colours, norm=Normalize(low, high), aspect="auto")
    axes.set_xticks(range(matrix.shape[1]), column_labels)
    if max(map(len, column_labels)) > 11:
        axes.tick_params(axis="x", rotation=35)
        for tick in axes.get_xticklabels():
            tick.set(ha="right", rotation_mode="anchor")
    axes.set_yticks(range(matrix.shape[0]), row_labels)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if matrix.shape[1] <= MOST_COLUMNS:
        _write_numbers(axes, matrix, image)
    _draw_frames(axes, frames)
    figure.colorbar(image, label=label).outline.set_visible(False)
    figure.suptitle(title, fontsize="large")
    return figure


def _checked(values: ArrayLike, row_labels: Sequence[str], column_labels: Sequence[str]) -> NDArray[np.float64]:
    matrix = np.asarray(values, np.float64)
    labels = (len(row_labels), len(column_labels))
    if matrix.ndim != 2 or matrix.shape != labels or not matrix.size:
        raise ValueError(f"values must have a row and a column for each label, {labels}, got the shape {matrix.shape}")
    if np.isinf(matrix).any() or np.isnan(matrix).all():
        raise ValueError("values must be finite, or NaN where undefined; got infinities, or NaN only")
    return matrix


def _size(row_labels: Sequence[str], column_labels: Sequence[str]) -> tuple[float, float]:
    """Return width and height in inches, with room for cells, row labels and the colour bar."""
    width = 0.85 * min(len(column_labels), MOST_COLUMNS) + 0.075 * max(map(len, row_labels)) + 1.2
    return max(width, 3.5), max(0.34 * len(row_labels) + 1.2, 2.5)


def _write_numbers(axes: Axes, matrix: NDArray[np.float64], image: ScalarMappable) -> None:
    colours = image.to_rgba(np.ma.masked_invalid(matrix))
    for (row, column), value in np.ndenumerate(matrix):
        bright = np.dot(colours[row, column, :3], [0.299, 0.587, 0.114]) > 0.5
        text = "–" if np.isnan(value) else f"{value:.2f}"
        axes.text(column, row, text, ha="center", va="center", fontsize=9, color="black" if bright else "white")


def _draw_frames(axes: Axes, frames: NDArray[np.bool_]) -> None:
    from matplotlib.patches import Rectangle

    for row, column in np.argwhere(frames):
        axes.add_patch(Rectangle((column - 0.47, row - 0.45), 0.94, 0.9, fill=False, edgecolor="#e6550d", linewidth=2))
