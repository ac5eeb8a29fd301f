"""The page of training dynamics: each layer compared with itself between all moments of training."""

from __future__ import annotations

import numpy as np

from hf_stitch.reports.curves import drawn
from hf_stitch.reports.drawing import heat_map, layout_of
from hf_stitch.reports.section import Figure, Section, Table, View
from hf_stitch.training.dynamics import Dynamics

SETTLED = 0.9
"""A layer has settled when its similarity to the end of training stays at this or better."""


def section(dynamics: Dynamics) -> Section:
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
    count = "from weights" if dynamics.n is None else f"{dynamics.n} samples, pooling: {dynamics.pooling}"
    asked = f"When does each layer become what it is at the end of training, by {dynamics.metric} ({count})?"
    return Section("Training dynamics", asked, verdict, [drawn(curves, unit, verdict), maps])
