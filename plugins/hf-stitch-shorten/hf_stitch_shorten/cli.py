"""Commands ``hf-stitch shorten`` and ``best-depth``: remove blocks of a network, and save an ordinary checkpoint."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from hf_stitch.cli.verbs import Job, command

Remove = Annotated[
    str, typer.Option(help="Number of blocks, their share of all blocks (0.25), or auto: as many as --max-loss allows.")
]


@command("hf_stitch_shorten.workflow:shorten", without=["plan"])
def shorten(job: Job, remove: Remove = "2") -> None:
    """Shorten a network and save it; the exit status is 1 if it misses --max-loss."""
    shortened = job.run(remove=_count(remove))
    saved = {} if job.shared.out is None else {"model": str(job.shared.out / "model")}
    if job.shared.out is not None:
        shortened.save_pretrained(job.shared.out / "model")
    job.finish(shortened, "shortened.json", {"shortened.png": {}}, **saved)
    if shortened.accepted is False:
        raise typer.Exit(1)


@command("hf_stitch_shorten.depth:best_depth", without=["plan"])
def best_depth(job: Job) -> None:
    """Find the best depth of a network, and save the network up to it."""
    depth = job.run()
    saved = {} if job.shared.out is None else {"model": str(job.shared.out / "model")}
    if job.shared.out is not None:
        depth.save_pretrained(job.shared.out / "model")
    job.finish(depth, "depth.json", {"depth.png": {}}, **saved)


def _count(text: str) -> int | float | Literal["auto"]:
    """Parse a number of blocks."""
    if text == "auto":
        return "auto"
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise typer.BadParameter(
            f"expected a number of blocks, a share below 1, or auto, got {text!r}", param_hint="--remove"
        ) from None
