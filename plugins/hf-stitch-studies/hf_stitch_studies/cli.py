"""``hf-stitch bench``: score metrics by how well they predict functional differences."""

from __future__ import annotations

import typer

from hf_stitch.cli.functions import shown
from hf_stitch.cli.verbs import Job, command


@command("hf_stitch_studies.benching.workflow:bench", without=["plan"])
def bench(job: Job) -> None:
    names = job.given["networks"]
    if len(set(names)) < max(len(names), 3):
        raise typer.BadParameter(
            f"pass at least three different networks, each once, got {', '.join(names)}", param_hint="NETWORKS"
        )
    networks = {shown(name): job.shared.load(name) for name in names}
    job.finish(job.run(networks=networks), "bench.json", {"bench.png": {}})
