"""Report page for several versions of a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_stitch.reports.drawing import curves, heat_map, layout_of, numbers, texts
from hf_stitch.reports.section import Figure, Section, Table, View
from hf_stitch_versions.changes.family_result import CONFIDENCE, ROUNDED, Family, Pair


def section(result: Family) -> Section:
    """Describe the distances: the path from the first network, heat maps of all pairs, and the tree of the networks."""
    from scipy.cluster.hierarchy import dendrogram

    drawn = dendrogram(result.linkage, no_plot=True)
    names = [result.networks[leaf] for leaf in drawn["leaves"]]
    values: dict[str, Callable[[Pair], float]] = {"change of the weights": lambda pair: pair.weight_change}
    if result.n:
        values = {result.measure: lambda pair: pair.distance} | values
    views = []
    for label, value in values.items():
        matrix = result.matrix(value)[drawn["leaves"]][:, drawn["leaves"]]
        rows = [(name, *(f"{cell:.3g}" for cell in row)) for name, row in zip(names, matrix, strict=True)]
        caption = "Distances of all pairs, in the order of the tree. Output distances are means of both directions."
        views.append(View(label, caption, [heat_map(matrix, names, names, label=label)], Table(("", *names), rows)))
    lines: list[dict[str, Any]] = [
        {"type": "scatter", "mode": "lines", "x": numbers(x), "y": numbers(y), "hoverinfo": "skip", "showlegend": False,
         "line": {"color": "#8a8a8a"}}
        for x, y in zip(drawn["icoord"], drawn["dcoord"], strict=True)
    ]  # fmt: skip
    ticks = {"tickvals": [5 + 10 * place for place in range(len(names))], "ticktext": texts(names), "automargin": True}
    heights = {"automargin": True, "title": {"text": "change of the weights, mean over pairs"}}
    tree = View("", "Tree of the networks by average linkage.", lines, Table(("Newick",), [(result.tree,)]))
    figures = [
        _way(result), Figure(views, layout_of(len(names), len(names), "", "")),
        Figure([tree], {"height": 360, "xaxis": ticks, "yaxis": heights}),
    ]  # fmt: skip
    frame = result.to_pandas()
    cells = [[cell if isinstance(cell, str) else f"{cell:.4g}" for cell in row] for row in frame.to_numpy().tolist()]
    notes = list(result.notes)
    if result.n:
        notes.append(f"Output distance: {result.what}; {CONFIDENCE:.0%} intervals over samples.")
    question = f"How far apart are {len(result.networks)} versions of a network?"
    tables = {"All pairs": Table(tuple(frame.columns), cells)}
    return Section("Versions", question, result.verdict, figures, tables=tables, notes=notes, data=result.data)


def _way(result: Family) -> Figure:
    """Plot the distance of each network from the first and from the previous one."""
    series: dict[str, dict[float, tuple[float, float, float]]] = {}
    labels = "from the first", "from the previous", f"the first in {ROUNDED}"
    for place, pairs in enumerate(result.curve.values()):
        for name, pair in zip(labels, (*pairs, result.rounding), strict=True):
            ends = (pair.forth.value, pair.forth.low, pair.forth.high) if pair.forth else (pair.weight_change,) * 3
            series.setdefault(name, {})[float(place)] = ends
    names = texts(result.curve)
    layout = {
        "height": 420, "xaxis": {"tickvals": list(range(len(names))), "ticktext": names, "automargin": True},
        "yaxis": {"automargin": True, "rangemode": "tozero",
                  "title": {"text": result.measure or "change of the weights"}},
    }  # fmt: skip
    caption = "Distance from the first network and from the previous one, and the effect of rounding."
    return Figure([View("", caption, curves(series), Table(result.columns, result.rows))], layout)
