"""``hf-stitch doctor``: why a network can be cut where it can, and what to do where it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from hf_stitch.cli.options import AsJson, Task
from hf_stitch.cli.output import Output


def doctor(
    model: Annotated[
        str, typer.Argument(help="A Hub id (org/name, org/name@revision, timm/…), timm:name, or a local folder.")
    ],
    task: Task = None,
    content: Annotated[
        str | None,
        typer.Option(
            help="Which argument is cut away from the output, where there are several: decoder_input_ids for the "
            "decoder of an encoder-decoder."
        ),
    ] = None,
    random: Annotated[bool, typer.Option("--random", help="Random weights, which need no download.")] = False,
    json: AsJson = False,
) -> None:
    """Tell what was found in a network, verified, or refused and why; and what to do to make it work.

    The exit code is 1 if it has no cut.
    """
    from hf_stitch.adapters.doctor import diagnose

    output = Output(json)
    with _quiet():
        found = diagnose(model, task=task, content=content, **({"pretrained": False} if random else {}))
    output.show(found)
    output.record(found.to_dict())
    if not found.cuts:
        raise typer.Exit(1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the remarks and progress bars of transformers, among which a report is not found."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
