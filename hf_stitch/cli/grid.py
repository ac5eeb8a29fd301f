"""``hf-stitch grid``: stitch every layer of one network into every layer of another."""

from __future__ import annotations

from hf_stitch.cli.output import figure_name
from hf_stitch.cli.verbs import Job, command


@command("hf_stitch.workflows._grid:stitch_grid")
def grid(job: Job) -> None:
    """Stitch all layers of two networks."""
    found = job.run()
    figures = {
        figure_name(number, matcher, figure or ""): {"figure": figure, "matcher": matcher}
        for number, matcher in enumerate(found.matchers, 1)
        for figure in (*found.figures, *([None] if found.detections else []))  # None: AUROC beside accuracy
    }
    job.finish(found, "grid.json", figures)
