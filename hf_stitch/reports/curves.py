"""Curves on pages: figures over training and other quantities."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hf_stitch.reports.drawing import curves, texts
from hf_stitch.reports.section import Figure, Section, Table, View
from hf_stitch.training.callback import History

Points = Mapping[float, tuple[float, float, float]]


def history(result: History) -> Section:
    """Describe the measurements of a callback."""
    series = {
        name.removeprefix(f"{result.name}/"): {x: (value, value, value) for x, value in points.items()}
        for name, points in result.curves.items()
    }
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
    """Return a sentence with the first and the last value of the curves that changed most."""
    found = {name: (min(points), max(points)) for name, points in series.items()}
    changes = {name: abs(series[name][last][0] - series[name][first][0]) for name, (first, last) in found.items()}
    most = sorted(changes, key=lambda name: -np.nan_to_num(changes[name]))
    parts = [
        ", ".join(f"{series[name][moment][0]:.3f} at {axis} {moment:g}" for moment in found[name]) for name in most[:3]
    ]
    if len(most) == 1:
        return f"{most[0]} {parts[0]}."
    then = "; ".join(f"{name} {part}" for name, part in zip(most[1:3], parts[1:], strict=True))
    rest = len(most) - 3
    more = f"; {rest} more curve{'s' * (rest > 1)} changed less" if rest > 0 else ""
    return f"{most[0]} changed most: {parts[0]}; then {then}{more}."
