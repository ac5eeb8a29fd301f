"""Plotly traces and images of samples, from arrays and untrusted names, which are escaped."""

from __future__ import annotations

import base64
import html
import io
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from hf_stitch.analysis.shown import Ends, ends_of
from hf_stitch.reports.section import Picture, Trace

DIGITS = 6
"""Significant digits of numbers on a page; the JSON contains all digits."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#bf8400", "#3f94c9", "#8a8a8a")
"""Colours that colour-blind readers can distinguish (Okabe and Ito 2008), with a contrast of 3 to white and dark."""

MARKS = {"square": ("#d55e00", "#ffffff"), "star": ("#ffffff", "#000000")}
"""Symbol of a mark -> its colour and the colour of its edge; one of them is visible on any colour of a heat map."""

SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star")
"""Symbols of curves, to distinguish them without colours."""

Array = NDArray[np.float64]

SIDE, LENGTH = 160, 600
"""Longest side of an image in pixels, and longest text in characters."""


def texts(names: Iterable[object]) -> list[str]:
    """Escape names, because Plotly interprets markup."""
    return [html.escape(str(name), quote=False) for name in names]


def numbers(values: ArrayLike) -> list[Any]:
    """Return an array as JSON values with few digits; non-finite values become ``None``."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim > 1:
        return [numbers(row) for row in array]
    return [float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None for value in array]


def heat_map(
    values: Array, rows: Sequence[str], columns: Sequence[str], *, label: str,
    whole: Ends | None = None, further: Mapping[str, Array] | None = None, axes: str = "",
) -> Trace:  # fmt: skip
    """Return a heat map with colours over the range of the values, or over the whole range on request.

    Undefined cells are empty.
    """
    extra = further or {}
    hover = "".join(f"<br>{texts([name])[0]} %{{customdata[{index}]:.4g}}" for index, name in enumerate(extra))
    trace: Trace = {
        "type": "heatmap", "x": texts(columns), "y": texts(rows), "z": numbers(values), "name": texts([label])[0],
        "colorscale": "Cividis", "hoverongaps": False,
        "hovertemplate": f"%{{y}}<br>%{{x}}<br>{texts([label])[0]} %{{z:.4f}}{hover}<extra></extra>",
        "colorbar": {"thickness": 12, "title": {"text": texts([label])[0], "side": "right"}},
    }  # fmt: skip
    if ends := ends_of(values, whole):
        trace |= {"zmin": ends[0], "zmax": ends[1]}
        if whole is not None and np.isfinite(whole).all():
            trace["meta"] = [min(whole[0], ends[0]), max(whole[1], ends[1])]
    if extra:
        trace["customdata"] = numbers(np.stack(list(extra.values()), -1))
    return trace | ({"xaxis": f"x{axes}", "yaxis": f"y{axes}"} if axes else {})


def layout_of(rows: int, columns: int, row_title: str, column_title: str) -> dict[str, Any]:
    """Return the layout of a heat map."""
    axis = {"automargin": True, "type": "category", "showgrid": False}
    titles = texts([row_title, column_title])
    return {
        "yaxis": {**axis, "range": [rows - 0.5, -0.5], "title": {"text": titles[0], "standoff": 8}},
        "xaxis": {**axis, "range": [-0.5, columns - 0.5], "title": {"text": titles[1], "standoff": 8}},
        "height": min(900, 320 + 14 * rows),
    }


def strips(rows: Sequence[float], columns: Sequence[float], hover: tuple[Sequence[str], Sequence[str]],
           names: tuple[Sequence[str], Sequence[str]]) -> tuple[list[Trace], dict[str, Any]]:  # fmt: skip
    """Return bars along the rows and the columns of a heat map, and their layout."""
    bar = {"type": "bar", "hoverinfo": "text", "showlegend": False, "marker": {"color": "#8a8a8a"}}
    traces = [
        {**bar, "x": numbers(rows), "y": texts(names[0]), "orientation": "h", "xaxis": "x9",
         "hovertext": texts(hover[0])},
        {**bar, "x": texts(names[1]), "y": numbers(columns), "yaxis": "y9", "hovertext": texts(hover[1])},
    ]  # fmt: skip
    hidden_axis = {"showticklabels": False, "showgrid": False, "zeroline": False, "fixedrange": True}
    layout = {
        "xaxis": {"domain": [0, 0.88]}, "yaxis": {"domain": [0, 0.88]},
        "xaxis9": {**hidden_axis, "domain": [0.89, 1]}, "yaxis9": {**hidden_axis, "domain": [0.89, 1]}, "bargap": 0.15,
        "annotations": [{"text": "share of<br>parameters", "x": 0.945, "y": 0.9, "xref": "paper", "yref": "paper",
                         "yanchor": "bottom", "showarrow": False, "font": {"size": 10}}],
    }  # fmt: skip
    return traces, layout


def curves(series: Mapping[str, Mapping[float, tuple[float, float, float]]]) -> list[Trace]:
    """Return curves with confidence intervals."""
    traces = []
    for index, (name, points) in enumerate(series.items()):
        values = np.array(list(points.values()), dtype=np.float64).reshape(-1, 3)
        trace: Trace = {
            "type": "scatter", "mode": "lines+markers", "name": texts([name])[0], "x": numbers(list(points)),
            "y": numbers(values[:, 0]), "hovertemplate": "%{x}: %{y:.4f}", "showlegend": True,
            "line": {"color": COLOURS[index % len(COLOURS)]}, "marker": {"symbol": SYMBOLS[index % len(SYMBOLS)]},
        }  # fmt: skip
        if (values[:, 1:] != values[:, :1]).any():
            trace["error_y"] = {
                "type": "data", "symmetric": False, "array": numbers(values[:, 2] - values[:, 0]),
                "arrayminus": numbers(values[:, 0] - values[:, 1]), "thickness": 1,
            }  # fmt: skip
        traces.append(trace)
    return traces


def bars(scores: Mapping[str, tuple[float, float, float]], highlighted: str) -> Trace:
    """Return rows of values with confidence intervals."""
    values = np.array(list(scores.values()), dtype=np.float64).reshape(-1, 3)
    return {
        "type": "scatter", "mode": "markers", "x": numbers(values[:, 0]), "y": texts(scores), "showlegend": False,
        "error_x": {"type": "data", "symmetric": False, "array": numbers(values[:, 2] - values[:, 0]),
                    "arrayminus": numbers(values[:, 0] - values[:, 1]), "color": "#8a8a8a"},
        "marker": {"color": [COLOURS[0] if name == highlighted else "#8a8a8a" for name in scores], "size": 10},
        "hovertemplate": "%{y}: %{x:.4f}<extra></extra>",
    }  # fmt: skip


def rows_layout(count: int, title: str) -> dict[str, Any]:
    """Return the layout of :func:`bars`."""
    return {
        "xaxis": {"title": {"text": texts([title])[0]}}, "height": 160 + 34 * count,
        "yaxis": {"autorange": "reversed", "automargin": True, "type": "category"},
    }  # fmt: skip


def marks(cells: Sequence[tuple[str, str]], *, name: str, symbol: str, axes: str = "") -> Trace:
    """Return marks on cells of a heat map."""
    colour, edge = MARKS[symbol]
    return {
        "type": "scatter", "mode": "markers", "name": texts([name])[0], "hoverinfo": "skip", "showlegend": True,
        "x": texts(column for _, column in cells), "y": texts(row for row, _ in cells),
        "marker": {"symbol": symbol, "size": 11, "color": colour, "line": {"width": 1.5, "color": edge}},
    } | ({"xaxis": f"x{axes}", "yaxis": f"y{axes}"} if axes else {})  # fmt: skip


def thinned(count: int, most: int) -> list[int]:
    """Return at most ``most`` evenly spaced indices of ``count``, with the first and the last."""
    return list(range(count)) if count <= most else [round(i * (count - 1) / (most - 1)) for i in range(most)]


def picture(caption: str, sample: Any) -> Picture:
    """Return an image or a text for a sample."""
    if sample is None:
        return Picture(caption, "", "(not stored)")
    if isinstance(sample, str):
        return Picture(caption, "", sample if len(sample) <= LENGTH else f"{sample[:LENGTH]} …")
    if isinstance(sample, (torch.Tensor, np.ndarray)):
        values = torch.as_tensor(sample).detach().float().cpu()
        if values.ndim == 3 and values.shape[0] in (1, 3) and values.min() >= 0 and values.max() <= 1:
            from PIL import Image

            pixels = (values.expand(3, -1, -1).permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
            return Picture(caption, address(Image.fromarray(pixels)), caption)
        return Picture(caption, "", f"{type(sample).__name__} of shape {tuple(values.shape)}")
    if hasattr(sample, "thumbnail"):  # a PIL image
        return Picture(caption, address(sample), caption)
    return Picture(caption, "", type(sample).__name__)


def address(image: Any) -> str:
    """Return a PIL image as a PNG in a ``data:`` address."""
    small = image.convert("RGB")
    small.thumbnail((SIDE, SIDE))
    return png(small.save)


def png(save: Any) -> str:
    """Return the PNG file that ``save`` writes as a ``data:`` address."""
    file = io.BytesIO()
    with warnings.catch_warnings():  # fonts lack control characters, and the warning contains them
        warnings.filterwarnings("ignore", r"Glyph (\d|[12]\d|3[01]|12[7-9]|1[34]\d|15\d) ")
        save(file, format="png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
