"""Comparisons of each moment of a training with each other, and with the last one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from hf_stitch.plots.curves import MARKERS
from hf_stitch.plots.heatmap import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ACROSS = 5
"""Largest number of heat maps side by side."""


def evolution(
    matrices: Mapping[str, ArrayLike],
    times: Sequence[float],
    *,
    unit: str,
    label: str,
    note: str = "",
    low: float | None = None,
    high: float | None = None,
    title: str = "",
    marked: Mapping[str, Sequence[float]] | None = None,
) -> Figure:
    """Draw a heat map of moments by moments for each name, and below one line per name with its last column.

    All heat maps share one colour scale. Lines differ in lightness and in markers.

    Args:
        matrices: Name -> (moments, moments) finite numbers.
        times: The moments in ascending order.
        unit: Unit of the moments, for example ``"epoch"``.
        label: Label of the colour bar; also part of the label of the lines.
        note: Second line of the label of the colour bar, for example which values are better (default: none).
        low: Value of the darkest colour; ``None`` (default) for the smallest of the values.
        high: Value of the brightest colour; ``None`` (default) for the largest of the values.
        title: Title of the figure (default: none).
        marked: Name -> moments that white lines mark (default: none).

    Returns:
        The figure, with one axes per name, then that of the lines, then that of the colour bar.

    Raises:
        ValueError: If there are no matrices or moments, if shapes do not match the moments, or if numbers are not
            finite.

    Example:
        >>> figure = evolution({"conv": [[1, 0.5], [0.5, 1]]}, [0, 1], unit="epoch", label="CKA")
        >>> [axes.get_title() for axes in figure.axes][:1], figure.axes[1].get_ylabel()
        (['conv'], 'CKA with the last epoch')
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    values = {name: np.asarray(matrix, np.float64) for name, matrix in matrices.items()}
    if not values or not len(times):
        raise ValueError(
            f"there is nothing to draw: expected at least one matrix and moment, got {len(values)} and {len(times)}"
        )
    for name, matrix in values.items():
        if matrix.shape != (len(times), len(times)) or not np.isfinite(matrix).all():
            raise ValueError(
                f"{name!r} must contain finite numbers, with a row and a column for each of {len(times)} moments, got "
                f"the shape {matrix.shape}{'' if np.isfinite(matrix).all() else ' with NaN or infinity'}"
            )
    ends = (min(m.min() for m in values.values()), max(m.max() for m in values.values()))
    low, high = (end if given is None else given for given, end in zip((low, high), ends, strict=True))
    down = math.ceil(len(values) / MOST_ACROSS)
    across = math.ceil(len(values) / down)
    figure = Figure(figsize=(max(2.2 * across + 0.8, 5.5), 2.3 * down + 3.2), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=(2.3 * down, 3.0))
    above, below = halves
    grid = above.subplots(down, across, squeeze=False).ravel()
    shown = range(0, len(times), max(1, math.ceil(len(times) / 6)))
    for place, (axes, (name, matrix)) in enumerate(zip(grid, values.items(), strict=False)):
        image = axes.imshow(matrix, cmap=COLOURS, vmin=low, vmax=high)
        axes.set_title(name, fontsize="medium")
        for moment in (marked or {}).get(name, ()):
            at = float(np.interp(moment, times, range(len(times))))
            axes.axvline(at, color="white", linewidth=1)
            axes.axhline(at, color="white", linewidth=1)
        axes.set_xticks(shown, [f"{times[i]:g}" for i in shown])
        axes.set_yticks(shown, [f"{times[i]:g}" for i in shown] if place % across == 0 else [])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        if place % across == 0:
            axes.set_ylabel(unit)
    for axes in grid[len(values) :]:
        axes.remove()
    lines = below.subplots()
    for place, (name, matrix) in enumerate(values.items()):
        colour = colormaps[COLOURS](0.9 * place / max(1, len(values) - 1))
        marker = MARKERS[place % len(MARKERS)]
        lines.plot(times, matrix[:, -1], color=colour, marker=marker, markersize=4, label=name)
    lines.set_xlabel(unit)
    lines.set_ylabel(f"{label} with the last {unit}")
    lines.grid(alpha=0.25)
    lines.spines[["top", "right"]].set_visible(False)
    lines.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize="small")
    above.colorbar(
        image, ax=list(grid[: len(values)]), label="\n".join(filter(None, (label, note)))
    ).outline.set_visible(False)
    figure.suptitle(title, fontsize="large")
    return figure
