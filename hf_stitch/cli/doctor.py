"""``hf-stitch doctor``: why a network can be cut where it can, and what to do where it cannot."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import AsJson, Task
from .output import Output


def doctor(
    model: Annotated[
        str, typer.Argument(help="A Hub id (org/name, org/name@revision, timm/…), timm:name, or a local folder.")
    ],
    task: Task = None,
    random: Annotated[
        bool, typer.Option("--random", help="Random weights, which need no download (timm only).")
    ] = False,
    json: AsJson = False,
) -> None:
    """Tell what was found in a network, verified, or refused and why; and what to register to make it work.

    The exit code is 1 if it has no cut.
    """
    from ..adapters.diagnosis import diagnose

    output = Output(json)
    found = diagnose(model, task=task, **({"pretrained": False} if random else {}))
    output.say(found)
    output.record(found.to_dict())
    if not found.cuts:
        raise typer.Exit(1)
