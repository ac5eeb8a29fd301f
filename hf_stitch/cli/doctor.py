"""``hf-stitch doctor``: where a network can be cut, where it cannot, and how to fix it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from hf_stitch.cli.options import AsJson, Device, Dtype, Task, check_place
from hf_stitch.cli.output import Output


def doctor(
    model: Annotated[
        str,
        typer.Argument(help="Network: a Hub id (org/name, org/name@revision, timm/…), timm:name, or a local folder."),
    ],
    task: Task = None,
    content: Annotated[
        str | None,
        typer.Option(
            help="The input that must pass through the cut, if there are several: decoder_input_ids for the decoder of "
            "an encoder-decoder."
        ),
    ] = None,
    random: Annotated[bool, typer.Option("--random", help="Use random weights, without a download.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    json: AsJson = False,
) -> None:
    """Report which layers of a network can be cut, which cannot and why, and how to make it work.

    The exit code is 1 if the network has no cut.
    """
    from hf_stitch.adapters.doctor import diagnose

    output = Output(json)
    place, options = check_place(device, dtype)
    if random:
        options["pretrained"] = False
    with _quiet():
        found = diagnose(model, task=task, content=content, device=place, **options)
    output.show(found)
    output.record(found.to_dict())
    if not found.cuts:
        raise typer.Exit(1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the log and the progress bars of transformers, which would bury the report."""
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
