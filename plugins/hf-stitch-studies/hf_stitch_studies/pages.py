"""Report sections for the results :class:`Curves` and :class:`Trajectory`."""

from __future__ import annotations

from hf_stitch.reports.section import Section
from hf_stitch.reports.training import curves_of, ends
from hf_stitch_studies.curves import Curves
from hf_stitch_studies.trajectory import Trajectory


def of_curves(result: Curves) -> Section:
    """Return the report section of curves."""
    series = {
        name: {x: (score.value, score.low, score.high) for x, score in curve.items()}
        for name, curve in result.scores.items()
    }
    question = f"How does relative accuracy depend on {result.axis}, on {result.n} held-out samples?"
    verdict = ends(series, result.axis)
    figure = curves_of(series, result.axis, verdict)
    return Section(f"Relative accuracy by {result.axis}", question, verdict, [figure], data=result.data)


def of_trajectory(result: Trajectory) -> Section:
    """Return the report section of a trajectory."""
    series = {
        name: {float(step): (value, value, value) for step, value in zip(result.steps, values, strict=True)}
        for name, values in result.figures.items()
    }
    verdict = ends(series, "step")
    figure = curves_of(series, "step", verdict)
    return Section("A stitch during training", f"What changes during training ({result.n} samples)?", verdict, [figure])
