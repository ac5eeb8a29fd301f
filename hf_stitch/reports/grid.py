"""The page of a grid: every layer of one network stitched into every layer of another."""

from __future__ import annotations

import numpy as np

from hf_stitch.analysis.grid.result import ACCURATE, StitchGrid, direction
from hf_stitch.reports.drawing import heat_map, layout_of, marks
from hf_stitch.reports.section import Figure, Section, Table

STRANGE = "auroc"
"""Figures of detectors begin with this."""


def section(grid: StitchGrid) -> Section:
    """Describe a grid.

    Args:
        grid: The grid.
    """
    names = ", ".join(grid.matchers)
    asked = (
        f"Which of {len(grid.layers_a)} layers of a can be stitched into which of {len(grid.layers_b)} layers of b by "
        f"{names} (pooling {grid.pooling}), scored on {grid.n} samples?"
    )
    figures = [_figure(grid, matcher, figure) for matcher in grid.matchers for figure in grid.scores[matcher]]
    first = next(iter(grid.scores[grid.matchers[0]]))
    notes = [f"Undefined: {stitch}: {why}." for stitch, why in list(grid.undefined.items())[:5]]
    if len(grid.undefined) > len(notes):
        notes.append(f"{len(grid.undefined) - len(notes)} more stitches are undefined; the data name them.")
    return Section("Grid of stitches", asked, _finding(grid, grid.matchers[0], first), figures, notes, grid.recipe)


def _finding(grid: StitchGrid, matcher: str, figure: str) -> str:
    values = grid.scores[matcher][figure][..., 0]
    if np.isnan(values).all():
        return f"{figure} of {matcher} is undefined for all stitches."
    best = np.nanargmax(values) if direction(figure) == "higher" else np.nanargmin(values)
    i, j = np.unravel_index(best, values.shape)
    sentence = f"{figure.replace('_', ' ')} of {matcher} is best from {grid.layers_a[i]} to {grid.layers_b[j]}"
    sentence = f"{sentence[0].upper()}{sentence[1:]} ({values[i, j]:.3f})"
    if figure in ("relative_accuracy", "agreement"):
        count = int((values >= ACCURATE).sum())
        sentence += f"; {count} of {values.size} stitches reach {ACCURATE:g}"
    return f"{sentence}."


def _figure(grid: StitchGrid, matcher: str, figure: str) -> Figure:
    cells = grid.scores[matcher][figure]
    values = cells[..., 0]
    ends = (0.0, 1.0) if figure in ("relative_accuracy", "accuracy", "agreement") or STRANGE in figure else (None, None)
    traces = [heat_map(values, grid.layers_a, grid.layers_b, label=figure, low=ends[0], high=ends[1])]
    strange = _strange(grid, matcher) if figure == next(iter(grid.scores[matcher])) else []
    caption = _finding(grid, matcher, figure)
    if strange:
        traces.append(marks(strange, name="accurate, but out of distribution", symbol="square-open"))
        caption += f" {len(strange)} accurate stitches are strange to a detector (AUROC above .9)."
    layout = layout_of(len(grid.layers_a), len(grid.layers_b), "layers of a", "layers of b")
    rows = [
        (a, b, f"{cells[i, j, 0]:.4f} [{cells[i, j, 1]:.4f}, {cells[i, j, 2]:.4f}]")
        for i, a in enumerate(grid.layers_a)
        for j, b in enumerate(grid.layers_b)
    ]
    table = Table(("layer of a", "layer of b", f"{figure}, 95% interval"), rows)
    return Figure(caption, {"": traces}, layout, table, profiles=True)


def _strange(grid: StitchGrid, matcher: str) -> list[tuple[str, str]]:
    """Return the stitches that are accurate, and that a detector tells from the target's own activations."""
    scores = grid.scores[matcher]
    accurate = next((scores[name][..., 0] for name in ("relative_accuracy", "agreement") if name in scores), None)
    detectors = [cells[..., 0] for name, cells in scores.items() if name.startswith(STRANGE)]
    if accurate is None or not detectors:
        return []
    found = (accurate >= ACCURATE) & (np.max(detectors, axis=0) > 0.9)
    return [(grid.layers_a[i], grid.layers_b[j]) for i, j in np.argwhere(found)]
