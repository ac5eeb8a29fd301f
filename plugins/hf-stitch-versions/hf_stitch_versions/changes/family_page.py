"""Report page for several versions of a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_stitch.reports.drawing import curves, heat_map, layout_of, numbers, texts
from hf_stitch.reports.section import Figure, Section, Table, View
from hf_stitch_versions.changes.family_result import CONFIDENCE, ROUNDED, Family, Pair


def section(result: Family) -> Section:
    """Describe the distances: the curves along the run, heat maps of all pairs, and the tree of the networks."""
    from scipy.cluster.hierarchy import dendrogram

    tree_lines = dendrogram(result.linkage, no_plot=True)
    names = [result.networks[leaf] for leaf in tree_lines["leaves"]]
    values: dict[str, Callable[[Pair], float]] = {"change of the weights": lambda pair: pair.weight_change}
    if result.n:  # with data, outputs come first
        values = {result.measure: lambda pair: pair.distance} | values
    views = []
    for label, value in values.items():
        matrix = result.matrix(value)[tree_lines["leaves"]][:, tree_lines["leaves"]]
        rows = [(name, *(f"{cell:.3g}" for cell in row)) for name, row in zip(names, matrix, strict=True)]
        caption = "Distances of all pairs, in the order of the tree. Output distances are means of both directions."
        views.append(View(label, caption, [heat_map(matrix, names, names, label=label)], Table(("", *names), rows)))
    lines: list[dict[str, Any]] = [
        {"type": "scatter", "mode": "lines", "x": numbers(x), "y": numbers(y), "hoverinfo": "skip", "showlegend": False,
         "line": {"color": "#8a8a8a"}}
        for x, y in zip(tree_lines["icoord"], tree_lines["dcoord"], strict=True)
    ]  # fmt: skip
    ticks = {"tickvals": [5 + 10 * leaf for leaf in range(len(names))], "ticktext": texts(names), "automargin": True}
    heights = {"automargin": True, "title": {"text": "change of the weights, mean over pairs"}}
    tree = View("", "Tree of the networks by average linkage.", lines, Table(("Newick",), [(result.tree,)]))
    figures = [
        _distances_along_path(result), Figure(views, layout_of(len(names), len(names), "", "")),
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


def _distances_along_path(result: Family) -> Figure:
    """Plot three curves: the distance from the first network, from the previous one, and of the rounded first one."""
    series: dict[str, dict[float, tuple[float, float, float]]] = {}
    labels = "from the first", "from the previous", f"the first in {ROUNDED}"
    for index, pairs in enumerate(result.curve.values()):
        for name, pair in zip(labels, (*pairs, result.rounding), strict=True):
            forth, change = pair.forth, pair.weight_change
            value_and_interval = (forth.value, forth.low, forth.high) if forth else (change, change, change)
            series.setdefault(name, {})[float(index)] = value_and_interval
    names = texts(result.curve)
    layout = {
        "height": 420, "xaxis": {"tickvals": list(range(len(names))), "ticktext": names, "automargin": True},
        "yaxis": {"automargin": True, "rangemode": "tozero",
                  "title": {"text": result.measure or "change of the weights"}},
    }  # fmt: skip
    caption = (
        "Distance from the first network and from the previous one, and the effect of rounding. Output distances are "
        "expectations over the earlier network."
    )
    return Figure([View("", caption, curves(series), Table(result.columns, result.rows))], layout)
