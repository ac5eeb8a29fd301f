"""Heat maps of matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.patches import Rectangle

COLOURS = "viridis"
"""Lightness rises with the value, so that the figure can be read in black and white and by colour-blind readers."""
UNDEFINED = "#d9d9d9"
MOST_COLUMNS = 24
"""Largest number of columns with readable numbers in the cells."""


def heatmap(
    values: ArrayLike,
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    *,
    row_title: str = "",
    column_title: str = "",
    title: str = "",
    label: str = "",
    low: float | None = None,
    high: float | None = None,
    marked: ArrayLike | None = None,
    marks: str = "",
    starred: ArrayLike | None = None,
    stars: str = "",
    part: SubFigure | None = None,
) -> Figure:
    """Plot a matrix as a heat map, with numbers in the cells of up to 24 columns.

    Args:
        values: (rows, columns) real numbers; cells of undefined values (NaN) are grey with a dash.
        row_labels: Labels of the rows, from top to bottom.
        column_labels: Labels of the columns, from left to right.
        row_title: Title of the rows, next to their labels (default: none).
        column_title: Title of the columns, below their labels (default: none).
        title: Title of the figure (default: none).
        label: Label of the colour bar (default: none).
        low: Value of the darkest colour; ``None`` (default) for the smallest of the values. Lower values have the same
            colour with exact numbers. Likewise ``high``.
        high: Value of the brightest colour; ``None`` (default) for the largest of the values.
        marked: (rows, columns) bool, cells to frame, for example the best ones; ``None`` (default) for none.
        marks: Meaning of a frame, for the legend (default: no entry).
        starred: (rows, columns) bool, cells with a star next to the number; ``None`` (default) for none.
        stars: Meaning of a star, for the legend (default: no entry).
        part: Part of a figure for the plot; ``None`` (default) for a new figure.

    Example:
        >>> figure = heatmap([[0.9, float("nan")], [0.2, 0.7]], ["a", "b"], ["c", "d"], label="CKA")
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['0.90', '–', '0.20', '0.70']
    """
    from matplotlib import colormaps
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    matrix = np.asarray(values, np.float64)
    if np.isinf(matrix).any():
        raise ValueError("values must be finite, or NaN where undefined; got infinities")
    is_framed, is_starred = (_flags(name, flags, matrix) for name, flags in (("marked", marked), ("starred", starred)))
    if np.isnan(matrix).all():  # a colour bar without colours has no ends
        low, high = (0, 1) if low is None or high is None else (low, high)
    figure = Figure(figsize=_size(row_labels, column_labels), layout="constrained") if part is None else part
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
    axes.set_xlabel(column_title)
    axes.set_ylabel(row_title)
    if matrix.shape[1] <= MOST_COLUMNS:
        _write_numbers(axes, matrix, image, is_starred)
    elif is_starred.any():
        rows, columns = np.nonzero(is_starred)
        axes.plot(columns, rows, "*", color="white", markeredgecolor="black", markersize=7, linestyle="none")
    for row, column in np.argwhere(is_framed):
        axes.add_patch(_frame((column - 0.46, row - 0.44), 0.92, 0.88))
    _add_legend(figure, marks if is_framed.any() else "", stars if starred is not None else "")
    figure.colorbar(image, label=label).outline.set_visible(False)
    figure.suptitle(title, fontsize="large")
    return figure.figure


def heatmaps(panels: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot several matrices as heat maps side by side.

    Args:
        panels: Arguments of :func:`heatmap` for each matrix, at least one.

    Example:
        >>> one = {"values": [[0.9, 0.1]], "row_labels": ["a"], "column_labels": ["c", "d"]}
        >>> len(heatmaps([one, one | {"title": "other"}]).subfigs)
        2
    """
    from matplotlib.figure import Figure

    sizes = [_size(panel["row_labels"], panel["column_labels"]) for panel in panels]
    widths, heights = zip(*sizes, strict=True)
    figure = Figure(figsize=(sum(widths), max(heights)), layout="constrained")
    for subfigure, panel in zip(
        figure.subfigures(1, len(panels), squeeze=False, width_ratios=widths)[0], panels, strict=True
    ):
        heatmap(**panel, part=subfigure)
    return figure


def _flags(name: str, flags: ArrayLike | None, matrix: NDArray[np.float64]) -> NDArray[np.bool_]:
    mask = np.zeros(matrix.shape, bool) if flags is None else np.asarray(flags, bool)
    if mask.shape != matrix.shape:
        raise ValueError(f"{name} must have the shape of the values, {matrix.shape}, got {mask.shape}")
    return mask


def _size(row_labels: Sequence[str], column_labels: Sequence[str]) -> tuple[float, float]:
    width = 0.85 * min(len(column_labels), MOST_COLUMNS) + 0.075 * max(map(len, row_labels)) + 1.2
    return max(width, 4.2), max(0.34 * len(row_labels) + 1.6, 2.8)


def _write_numbers(axes: Axes, matrix: NDArray[np.float64], image: ScalarMappable, starred: NDArray[np.bool_]) -> None:
    """Write the numbers into the cells of an image, black on bright colours and white on dark ones; a dash for NaN."""
    colours = image.to_rgba(np.ma.masked_invalid(matrix))
    for (row, column), value in np.ndenumerate(matrix):
        bright = np.dot(colours[row, column, :3], [0.299, 0.587, 0.114]) > 0.5
        text = "–" if np.isnan(value) else f"{value:.2f}" + ("*" if starred[row, column] else "")
        axes.text(column, row, text, ha="center", va="center", fontsize=9, color="black" if bright else "white")


def _frame(corner: tuple[float, float], width: float, height: float) -> Rectangle:
    """Return a black frame with white edges, visible on every colour and in black and white."""
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import Normal, Stroke

    edges = [Stroke(linewidth=4.0, foreground="white"), Normal()]
    return Rectangle(corner, width, height, fill=False, edgecolor="black", linewidth=2, path_effects=edges)


def _add_legend(figure: Figure | SubFigure, marks: str, stars: str) -> None:
    from matplotlib.lines import Line2D

    frame_entry = [(_frame((0, 0), 1, 1), marks)] if marks else []
    entries = [*frame_entry, *([(Line2D([], [], color="black", marker="*", linestyle="none"), stars)] if stars else [])]
    if entries:
        handles, texts = zip(*entries, strict=True)
        figure.legend(handles, texts, loc="outside lower left", frameon=False, fontsize="small")
