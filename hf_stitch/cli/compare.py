"""``hf-stitch compare``: the similarity of every layer of one network to every layer of another."""

from __future__ import annotations

import typer

from hf_stitch.cli.output import figure_name
from hf_stitch.cli.verbs import Job, command, usage

OF_DATA = ("data_dir", "split", "max_samples", "label", "text", "text_pair", "image")
"""Shared options that only tell how data are read."""


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
    """Check before any work what the metrics, and the rows that they get, have a use for."""
    from hf_stitch.analysis.comparison.asking import Asked
    from hf_stitch.running import Run

    idle = [f"--{name.replace('_', '-')}" for name in OF_DATA if getattr(job.shared, name) is not None]
    if job.shared.data is None and idle:
        raise typer.BadParameter(f"{', '.join(idle)} choose samples of a data set: name one", param_hint="--data")
    asks = {name: job.given[name] for name in ("rows", "align") if name in job.given}
    with usage(", ".join(f"--{name}" for name in ("metric", *asks))):
        asked = Asked.of(job.given.get("metrics", ("linear_cka",)), **asks)
        asked.check(Run(planning=job.shared.plan), job.shared.data, permutations=job.given.get("permutations", 0))
    if asked.activations and job.shared.data is None:
        label = next(iter(asked.activations))
        raise typer.BadParameter(f"{label} compares activations of samples: name a data set", param_hint="--data")
