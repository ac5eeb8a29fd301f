"""Page of a grid: every layer of one network stitched into every layer of another."""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_stitch.analysis.detection.noise import MAX_DOSE
from hf_stitch.analysis.grid import ACCURATE, StitchGrid
from hf_stitch.reports.drawing import Array, heat_map, layout_of, marks, thinned
from hf_stitch.reports.section import Figure, Section, Table, Trace, View, key_of

MOST, SHOWN = 200, 2000
"""Largest number of layers per side in a figure, and of rows in a table."""


def section(grid: StitchGrid) -> Section:
    """Describe a grid."""
    names = ", ".join(grid.matchers)
    question = (
        f"Which of {len(grid.layers_a)} layers of the source can {names} stitch into which of {len(grid.layers_b)} "
        f"layers of the target (pooling {grid.pooling}, {grid.n} samples)?"
    )
    figures = [figure for matcher in grid.matchers for figure in _figures(grid, matcher)]
    notes = [f"Undefined: {stitch}: {reason}." for stitch, reason in list(grid.undefined.items())[:5]]
    if len(grid.undefined) > len(notes):
        notes.append(f"{len(grid.undefined) - len(notes)} more stitches are undefined; the data lists them.")
    notes += [f"{detection.caution}." for detection in grid.detections.values() if detection.caution]
    if grid.detections:
        notes.append(
            "Stitches that a detector distinguishes by smaller scores than the target's own do not count as out of "
            "distribution: such activations are closer to the usual ones."
        )
    if max(len(grid.layers_a), len(grid.layers_b)) > MOST:
        notes.append(f"Figures show at most {MOST} evenly spaced layers per side; all values are in the data.")
    if (count := len(grid.layers_a) * len(grid.layers_b)) > SHOWN:
        notes.append(f"Tables show the first {SHOWN} of {count} stitches; all are in the data.")
    verdict = _finding(grid, grid.matchers[0], grid.figures[0]) + _strange(grid, grid.matchers[0])
    hashes = [(grid.recipe.get(side) or {}).get("weights_hash") for side in "ab"]
    return Section(
        "Grid of stitches", question, verdict, figures, notes=notes, recipe=grid.recipe,
        networks=key_of(*hashes), data=grid.recipe.get("test_data"),
    )  # fmt: skip


def _strange(grid: StitchGrid, matcher: str) -> str:
    if not grid.detections:
        return ""
    count = int(grid.is_strange(matcher).sum())
    subject = f"{count} accurate stitches are" if count > 1 else f"{count or 'No'} accurate stitch is"
    return f" {subject} out of distribution (stranger than noise of dose {MAX_DOSE:g})."


def _finding(grid: StitchGrid, matcher: str, figure: str) -> str:
    values = grid.values(matcher, figure)
    if np.isnan(values).all():
        return f"{figure} of {matcher} is undefined for all stitches."
    best = np.nanargmax(values) if grid.direction(figure) == "higher" else np.nanargmin(values)
    i, j = np.unravel_index(best, values.shape)
    sentence = f"{figure.replace('_', ' ')} of {matcher} is best from {grid.layers_a[i]} to {grid.layers_b[j]}"
    sentence = f"{sentence[0].upper()}{sentence[1:]} ({values[i, j]:.3f})"
    if grid.direction(figure) == "higher" and figure in (grid.figures[0], "agreement"):
        count = int((values >= ACCURATE).sum())
        sentence += f"; {count} of {values.size} stitches reach {ACCURATE:g}"
    return f"{sentence}."


def _figures(grid: StitchGrid, matcher: str) -> list[Figure]:
    """Return a figure with accuracy and detectors side by side, and a figure with the remaining maps."""
    first = (grid.figures[0], *(f"auroc({label})" for label in grid.detections))
    rest = [figure for figure in grid.figures if figure not in first]
    rows, columns = len(_plotted_layers(grid)[0]), len(_plotted_layers(grid)[1])
    layout = layout_of(rows, columns, *grid._titles)
    first_view = View(
        matcher, _finding(grid, matcher, first[0]) + _strange(grid, matcher), _traces(grid, matcher, first),
        _table(grid, matcher, first),
    )  # fmt: skip
    start = _start(grid, matcher)
    figures = [Figure([first_view], layout if len(first) == 1 else _in_row(layout, len(first)), start, profiles=True)]
    if rest:
        views = [
            View(figure, _finding(grid, matcher, figure), _traces(grid, matcher, [figure]),
                 _table(grid, matcher, [figure]))
            for figure in rest
        ]  # fmt: skip
        figures.append(Figure(views, layout, start, profiles=True))
    return figures


def _start(grid: StitchGrid, matcher: str) -> tuple[int, int]:
    """Return the row and column of the best stitch among the plotted ones."""
    values = grid.values(matcher)[np.ix_(*_plotted_layers(grid))]
    if np.isnan(values).all():
        return 0, 0
    best = np.nanargmax(values) if grid.direction(grid.figures[0]) == "higher" else np.nanargmin(values)
    return int(best) // values.shape[1], int(best) % values.shape[1]


def _in_row(layout: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the layout of several heat maps side by side with shared rows; each has a colour bar above."""
    combined = {key: value for key, value in layout.items() if key not in ("xaxis", "yaxis")}
    for index in range(count):
        number = "" if index == 0 else str(index + 1)
        domain = _domain(index, count)
        title = {"text": layout["xaxis"]["title"]["text"]}
        combined[f"xaxis{number}"] = {**layout["xaxis"], "domain": domain, "anchor": f"y{number}", "title": title}
        axis_options = {"anchor": f"x{number}"} if index == 0 else {
            "anchor": f"x{number}", "matches": "y", "showticklabels": False, "title": {"text": ""}
        }  # fmt: skip
        combined[f"yaxis{number}"] = {**layout["yaxis"], **axis_options}
    legend = {"orientation": "h", "y": 1, "yref": "container", "yanchor": "top", "x": 0}
    return {**combined, "height": layout["height"] + 60, "margin": {"t": 90, "r": 10}, "legend": legend}


def _domain(index: int, count: int) -> list[float]:
    return [index / count, (index + 0.92) / count]


def _plotted_layers(grid: StitchGrid) -> tuple[list[int], list[int]]:
    return thinned(len(grid.layers_a), MOST), thinned(len(grid.layers_b), MOST)


def _traces(grid: StitchGrid, matcher: str, figures: tuple[str, ...] | list[str]) -> list[Trace]:
    plotted = _plotted_layers(grid)
    names = [grid.layers_a[i] for i in plotted[0]], [grid.layers_b[j] for j in plotted[1]]
    strange = [(grid.layers_a[i], grid.layers_b[j]) for i, j in np.argwhere(grid.is_strange(matcher))]
    strange = [(a, b) for a, b in strange if a in names[0] and b in names[1]]
    traces: list[Trace] = []
    for index, figure in enumerate(figures):
        cells: Array = grid.cells(matcher, figure)[np.ix_(*plotted)]
        axes = "" if index == 0 else str(index + 1)
        name_matcher = len(grid.matchers) > 1
        label = f"{figure.replace('_', ' ')} of {matcher}" if name_matcher else figure.replace("_", " ")
        cells, limit = grid._capped(figure, cells)
        label += f" (up to {limit})" if limit else ""
        interval_ends = {"from": cells[..., 1], "to": cells[..., 2]}
        heat = heat_map(
            cells[..., 0], *names, label=label, whole=grid._usual_range(figure), further=interval_ends, axes=axes
        )
        if len(figures) > 1:
            start, end = _domain(index, len(figures))
            heat["colorbar"] |= {"orientation": "h", "x": (start + end) / 2, "len": end - start, "y": 1}
            heat["colorbar"] |= {"yanchor": "bottom", "title": {**heat["colorbar"]["title"], "side": "top"}}
        traces.append(heat)
        if strange:
            strange_marks = marks(strange, name="accurate, but out of distribution", symbol="square", axes=axes)
            traces.append({**strange_marks, "showlegend": index == 0})
    return traces


def _table(grid: StitchGrid, matcher: str, figures: tuple[str, ...] | list[str]) -> Table:
    cells = [grid.cells(matcher, figure) for figure in figures]
    rows = [
        (a, b, *(f"{values[i, j, 0]:.4f} [{values[i, j, 1]:.4f}, {values[i, j, 2]:.4f}]" for values in cells))
        for i, a in enumerate(grid.layers_a)
        for j, b in enumerate(grid.layers_b)
    ]
    columns = ("layer of the source", "layer of the target", *(f"{figure}, 95% interval" for figure in figures))
    return Table(columns, rows[:SHOWN])
