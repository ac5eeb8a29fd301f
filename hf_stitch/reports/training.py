"""Pages of training: measurements of callbacks, and when layers reach their final state."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hf_stitch.reports.drawing import curves, heat_map, layout_of, texts
from hf_stitch.reports.section import Figure, Section, Table, View
from hf_stitch.training.dynamics import Dynamics
from hf_stitch.training.history import History

Points = Mapping[float, tuple[float, float, float]]  # x -> value, and both ends of its interval

SETTLED = 0.9
"""Smallest similarity of a settled layer to the end of training."""


def history_section(result: History) -> Section:
    """Describe the measurements of a callback."""
    series = {
        name.removeprefix(f"{result.name}/"): {x: (value, value, value) for x, value in points.items()}
        for name, points in result.curves.items()
    }
    verdict = ends(series, result.unit)
    question = f"What did {result.name} measure during training?"
    return Section(f"Training: {result.name}", question, verdict, [curves_of(series, result.unit, verdict)])


def curves_of(series: Mapping[str, Points], axis: str, caption: str) -> Figure:
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
    spans = {name: (min(points), max(points)) for name, points in series.items()}
    changes = {name: abs(series[name][last][0] - series[name][first][0]) for name, (first, last) in spans.items()}
    names = sorted(changes, key=lambda name: -np.nan_to_num(changes[name]))
    descriptions = [
        ", ".join(f"{series[name][moment][0]:.3f} at {axis} {moment:g}" for moment in spans[name]) for name in names[:3]
    ]
    if len(names) == 1:
        return f"{names[0]} {descriptions[0]}."
    others = "; ".join(f"{name} {description}" for name, description in zip(names[1:3], descriptions[1:], strict=True))
    rest = len(names) - 3
    more = f"; {rest} more curve{'s' * (rest > 1)} changed less" if rest > 0 else ""
    return f"{names[0]} changed most: {descriptions[0]}; then {others}{more}."


def dynamics_section(dynamics: Dynamics) -> Section:
    """Describe training dynamics."""
    settled = dynamics.settled(SETTLED)
    first, last = min(settled, key=lambda name: settled[name]), max(settled, key=lambda name: settled[name])
    unit = dynamics.unit
    verdict = (
        f"All layers settle at once: their {dynamics.metric} with the end of training stays at {SETTLED} or better"
    )
    verdict += f" from {unit} {settled[first]:g}."
    if settled[first] != settled[last]:
        verdict = (
            f"{first} settles first: its {dynamics.metric} with the end of training stays at {SETTLED} or better from "
            f"{unit} {settled[first]:g}; {last} settles last, from {unit} {settled[last]:g}."
        )
    moments = [f"{unit} {time:g}" for time in dynamics.times]
    views = [
        View(
            layer, f"{layer}: {values[0, -1]:.3f} between the first and the last moment.",
            [heat_map(values, moments, moments, label=dynamics.metric, whole=dynamics.range)],
            Table(("moment", "similarity to the last moment"), [(m, f"{v:.4f}") for m, v in zip(moments, values[:, -1],
                                                                                                strict=True)]),
        )
        for layer, values in dynamics.values.items()
    ]  # fmt: skip
    changed = [abs(values[0, 0] - values[0, -1]) for values in dynamics.values.values()]
    maps = Figure(
        views, layout_of(len(moments), len(moments), "moment", "moment"), slider="Layer",
        first=int(np.argmax(np.nan_to_num(changed))),
    )  # fmt: skip
    curves = {
        layer: {float(x): (float(v),) * 3 for x, v in zip(dynamics.times, values, strict=True)}
        for layer, values in dynamics.to_final().items()
    }
    basis = "from weights" if dynamics.n is None else f"{dynamics.n} samples, pooling: {dynamics.pooling}"
    question = f"When does each layer reach its state at the end of training, by {dynamics.metric} ({basis})?"
    return Section("Training dynamics", question, verdict, [curves_of(curves, unit, verdict), maps])
