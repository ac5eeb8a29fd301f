"""``hf-stitch compare``, ``grid``, ``evaluate`` and ``audit``: commands that return a result with figures."""

from __future__ import annotations

from typing import Any

import typer

from hf_stitch.cli.artefacts import attach
from hf_stitch.cli.output import figure_name
from hf_stitch.cli.verbs import Job, command, usage

OF_DATA = ("data_dir", "split", "max_samples", "label", "text", "text_pair", "image")
"""Shared options that only affect how data are read."""


@command("hf_stitch.workflows._compare:compare")
def compare(job: Job) -> None:
    """Compare networks, and record the best matches."""
    _check(job)
    atlas = job.run()
    best = {
        "headlines": {metric: atlas.headline(metric) for metric in atlas.metrics},
        "best_matches": {metric: atlas.best_matches(metric) for metric in atlas.metrics},
        "match_p_values": {metric: atlas.match_p_values(metric) for metric in atlas.tests},
    }
    figures = {figure_name(number, metric): {"metric": metric} for number, metric in enumerate(atlas.metrics, 1)}
    job.finish(atlas, "atlas.json", figures, **best)


def _check(job: Job) -> None:
    """Raise a usage error for options that do not fit the metrics or the data, before any work."""
    from hf_stitch.analysis.comparison.asking import Asked
    from hf_stitch.running import Run

    unused = [f"--{name.replace('_', '-')}" for name in OF_DATA if getattr(job.shared, name) is not None]
    if job.shared.data is None and unused:
        raise typer.BadParameter(f"{', '.join(unused)} require a dataset", param_hint="--data")
    row_options = {name: job.given[name] for name in ("rows", "align") if name in job.given}
    with usage(", ".join(f"--{name}" for name in ("metric", *row_options))):
        asked = Asked.of(job.given.get("metrics", ("linear_cka",)), **row_options)
        asked.check(Run(planning=job.shared.plan), job.shared.data, permutations=job.given.get("permutations", 0))
    if asked.activations and job.shared.data is None:
        label = next(iter(asked.activations))
        raise typer.BadParameter(f"{label} compares activations and requires a dataset", param_hint="--data")


@command("hf_stitch.workflows._grid:stitch_grid")
def grid(job: Job) -> None:
    """Stitch all layers of two networks."""
    result = job.run()
    figures = {
        figure_name(number, matcher, figure or ""): {"figure": figure, "matcher": matcher}
        for number, matcher in enumerate(result.matchers, 1)
        for figure in (*result.figures, *([None] if result.detections else []))  # None: AUROC next to accuracy
    }
    job.finish(result, "grid.json", figures)


@command("hf_stitch.workflows._evaluate:evaluate", without=["task"])
def evaluate(job: Job) -> None:
    """Score a stitched model."""
    if job.given.get("examples") and job.shared.report is None:
        raise typer.BadParameter("requires --report", param_hint="--examples")
    job.finish(job.run(**_attached(job)), "evaluation.json", {"evaluation.png": {}})


@command("hf_stitch.workflows._audit:audit", without=["task"])
def audit(job: Job) -> None:
    """Audit a stitched model."""
    job.finish(job.run(**_attached(job)), "audit.json", {"audit.png": {}})


def _attached(job: Job) -> dict[str, Any]:
    """Return arguments of the verb: the stitched model, and the networks of ``--source`` and ``--target``."""
    parents = {side: job.shared.given(job.given.get(side)) for side in ("source", "target")}
    stitched = attach(job.given["stitched"], job.shared, "STITCHED", parents)
    return {"stitched": stitched, **(dict.fromkeys(parents) if stitched.parents else parents)}
