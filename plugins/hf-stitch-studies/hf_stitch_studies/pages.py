"""The pages of curves and trajectories."""

from __future__ import annotations

from hf_stitch.reports.section import Section
from hf_stitch.reports.training import curves_of, ends
from hf_stitch_studies.curves import Curves
from hf_stitch_studies.trajectory import Trajectory


def of_curves(result: Curves) -> Section:
    """Describe curves over a quantity."""
    series = {
        name: {x: (score.value, score.low, score.high) for x, score in curve.items()}
        for name, curve in result.scores.items()
    }
    asked = f"How does relative accuracy depend on {result.axis}, on {result.n} held-out samples?"
    verdict = ends(series, result.axis)
    return Section(
        f"Relative accuracy by {result.axis}", asked, verdict, [curves_of(series, result.axis, verdict)],
        data=result.data,
    )  # fmt: skip


def of_trajectory(result: Trajectory) -> Section:
    """Describe a stitching layer during its training."""
    series = {
        name: {float(step): (value, value, value) for step, value in zip(result.steps, values, strict=True)}
        for name, values in result.figures.items()
    }
    verdict = ends(series, "step")
    figure = curves_of(series, "step", verdict)
    return Section("A stitch during training", f"What changes during training ({result.n} samples)?", verdict, [figure])
