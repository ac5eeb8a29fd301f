"""Traces of Plotly from arrays and names, which are data of others and stay text."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hf_stitch.reports.section import Trace

DIGITS = 6
"""Significant digits of numbers on a page; the JSON of the results has all."""

Array = NDArray[np.float64]


def texts(names: Iterable[object]) -> list[str]:
    """Escape names, because Plotly interprets some markup.

    Args:
        names: The names.

    Example:
        >>> texts(["<b>layer</b>", 1])
        ['&lt;b&gt;layer&lt;/b&gt;', '1']
    """
    return [html.escape(str(name), quote=False) for name in names]


def numbers(values: ArrayLike) -> list[Any]:
    """Return an array as JSON values with few digits; what is not finite becomes ``None``.

    Args:
        values: Numbers of any shape.

    Example:
        >>> numbers([0.123456789, float("nan")])
        [0.123457, None]
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim > 1:
        return [numbers(row) for row in array]
    return [float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None for value in array]


def heat_map(
    values: Array, rows: Sequence[str], columns: Sequence[str], *, label: str, low: float | None, high: float | None,
    p_values: Array | None = None,
) -> Trace:  # fmt: skip
    """Return a heat map; cells without a value are empty.

    Args:
        values: ``(rows, columns)``.
        rows: Names of the rows, the first one at the top.
        columns: Names of the columns.
        label: What the values are.
        low: Smallest value of the colours; ``None`` takes that of the values.
        high: Largest value of the colours.
        p_values: ``(rows, columns)``, shown beside the values.
    """
    bar = {"thickness": 12, "title": {"text": texts([label])[0], "side": "right"}}
    hover = f"%{{y}}<br>%{{x}}<br>{texts([label])[0]} %{{z:.4f}}"
    trace: Trace = {
        "type": "heatmap", "x": texts(columns), "y": texts(rows), "z": numbers(values), "colorscale": "Cividis",
        "hovertemplate": f"{hover}<extra></extra>", "hoverongaps": False, "colorbar": bar,
    }  # fmt: skip
    if low is not None and high is not None:
        trace |= {"zmin": low, "zmax": high}
    if p_values is not None:
        trace["customdata"] = numbers(p_values)
        trace["hovertemplate"] = f"{hover}<br>p %{{customdata:.3f}}<extra></extra>"
    return trace


def layout_of(rows: int, columns: int, row_title: str, column_title: str) -> dict[str, Any]:
    """Return the layout of a heat map.

    Args:
        rows: Number of rows.
        columns: Number of columns.
        row_title: Title of the rows.
        column_title: Title of the columns.
    """
    axis = {"automargin": True, "type": "category", "showgrid": False}
    titles = texts([row_title, column_title])
    return {
        "yaxis": {**axis, "range": [rows - 0.5, -0.5], "title": {"text": titles[0]}},
        "xaxis": {**axis, "range": [-0.5, columns - 0.5], "title": {"text": titles[1]}},
        "height": min(900, 320 + 14 * rows),
    }


def marks(places: Sequence[tuple[str, str]], *, name: str, symbol: str) -> Trace:
    """Return marks on cells of a heat map.

    Args:
        places: Row and column of each.
        name: What they mean.
        symbol: Symbol of Plotly.
    """
    return {
        "type": "scatter", "mode": "markers", "name": name, "hoverinfo": "skip", "showlegend": True,
        "x": texts(column for _, column in places), "y": texts(row for row, _ in places),
        "marker": {"symbol": symbol, "size": 9, "color": "#d55e00", "line": {"width": 2, "color": "#d55e00"}},
    }  # fmt: skip


def thinned(count: int, most: int) -> list[int]:
    """Return evenly spaced places, at most ``most`` of ``count``, with the first and the last.

    Args:
        count: Number of places.
        most: Largest number that is returned.

    Example:
        >>> thinned(5, 3), thinned(2, 3)
        ([0, 2, 4], [0, 1])
    """
    return list(range(count)) if count <= most else [round(i * (count - 1) / (most - 1)) for i in range(most)]
