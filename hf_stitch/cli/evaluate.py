"""``hf-stitch evaluate`` and ``hf-stitch audit``: score a saved stitched model."""

from __future__ import annotations

from typing import Any

import typer

from hf_stitch.cli.artefacts import attach
from hf_stitch.cli.verbs import Job, command


@command("hf_stitch.workflows._evaluate:evaluate", without=["task"])
def evaluate(job: Job) -> None:
    """Score a stitched model."""
    if job.given.get("examples") and job.shared.report is None:
        raise typer.BadParameter("requires --report", param_hint="--examples")
    job.finish(job.run(**_whole(job)), "evaluation.json", {"evaluation.png": {}})


@command("hf_stitch.workflows._audit:audit", without=["task"])
def audit(job: Job) -> None:
    """Audit a stitched model."""
    job.finish(job.run(**_whole(job)), "audit.json", {"audit.png": {}})


def _whole(job: Job) -> dict[str, Any]:
    """Return the stitched model, and the whole networks that the command line names for it."""
    parents = {side: job.shared.given(job.given.get(side)) for side in ("source", "target")}
    stitched = attach(job.given["stitched"], job.shared, "STITCHED", parents)
    return {"stitched": stitched, **(dict.fromkeys(parents) if stitched.parents else parents)}
