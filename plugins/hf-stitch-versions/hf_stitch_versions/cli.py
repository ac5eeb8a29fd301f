"""``hf-stitch same``: whether two networks are the same, for people and for continuous integration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_stitch.cli.functions import is_function
from hf_stitch.cli.verbs import Job, command

BatchSize = Annotated[int, typer.Option(min=1, help="Samples per forward; all modules' outputs are in memory.")]

FILES = (".onnx", ".npz", ".safetensors")
"""Files that can stand in the place of the second network."""


@command("hf_stitch_versions.workflow:same", without=["plan"])
def same(job: Job, batch_size: BatchSize = 8) -> None:
    """Compare, show, and end with 0 if the networks are the same and with 1 if they differ; errors end with 2."""
    name = job.given["b"]
    is_file = Path(name).suffix in FILES and not is_function(name) and not Path(name).is_dir()
    try:
        found = job.run(batch_size=batch_size, **({"b": Path(name)} if is_file else {}))
    except (ValueError, OSError, ImportError) as error:
        raise typer.BadParameter(str(error)) from error
    job.finish(found, "same.json", {"same.png": {}})
    if not found.is_same:
        raise typer.Exit(1)
