"""Curves on pages: figures over training and other quantities."""

from __future__ import annotations

from collections.abc import Mapping

from hf_stitch.reports.drawing import curves, texts
from hf_stitch.reports.section import Figure, Section, Table, View
from hf_stitch.training.callback import History

Points = Mapping[float, tuple[float, float, float]]


def history(result: History) -> Section:
    """Describe the measurements of a callback."""
    series = {name: {x: (value, value, value) for x, value in points.items()} for name, points in result.curves.items()}
    verdict = ends(series, result.unit)
    asked = f"What did {result.name} measure during training?"
    return Section(f"Training: {result.name}", asked, verdict, [drawn(series, result.unit, verdict)])


def drawn(series: Mapping[str, Points], axis: str, caption: str) -> Figure:
    """Return a figure of curves."""
    rows = [
        (name, f"{x:g}", f"{value:.4f}" + (f" [{low:.4f}, {high:.4f}]" if low != high else ""))
        for name, points in series.items()
        for x, (value, low, high) in points.items()
    ]
    title = texts([axis])[0]
    layout = {"height": 420, "xaxis": {"title": {"text": title}}, "yaxis": {"automargin": True}}
    return Figure([View("", caption, curves(series), Table(("curve", axis, "value"), rows))], layout)


def ends(series: Mapping[str, Points], axis: str) -> str:
    """Return a sentence with the first and the last value of the first curves."""
    parts = []
    for name, points in list(series.items())[:3]:
        first, last = min(points), max(points)
        parts.append(f"{name} {points[first][0]:.3f} at {axis} {first:g}, {points[last][0]:.3f} at {axis} {last:g}")
    more = f"; {len(series) - 3} more curves" if len(series) > 3 else ""
    return f"{'; '.join(parts)}{more}."
