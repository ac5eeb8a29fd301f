"""``hf-stitch doctor``: where a network can be cut and how to fix it; without a network, whether hf-stitch works."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from hf_stitch.cli import functions
from hf_stitch.cli.options import NAMES, AsJson, Device, Dtype, Task, check_place
from hf_stitch.cli.output import Output
from hf_stitch.cli.versions import installed_versions


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            help=f"Network: {NAMES}. Without it, "
            "installed versions are compared with the tested ones, and a self-test runs."
        ),
    ] = None,
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

    Without a network, show installed versions beside tested ones, and test hf-stitch on tiny networks, without
    downloads. An issue report begins with this output.

    The exit code is 1 if the network has no cut, a part of the self-test fails or a requirement is not met.
    """
    output = Output(json)
    if model is None:
        if task or content or random or device or dtype:
            raise typer.BadParameter("--task, --content, --random, --device and --dtype need a network: name one")
        _examine_installation(output)
        return

    from hf_stitch.adapters.doctor import diagnose

    place, options = check_place(device, dtype)
    if random:
        options["pretrained"] = False
    network: Any = model
    if functions.is_function(model):
        network, options = functions.network_of(model, options)
    with _quiet():
        found = diagnose(network, task=task, content=content, device=place, **options)
    if network is not model:
        found = replace(found, model=functions.shown(model))
    output.show(found)
    output.record(found.to_dict())
    if not found.cuts:
        raise typer.Exit(1)


def _examine_installation(output: Output) -> None:
    """Show the versions before the libraries are imported, because that can fail or end the process."""
    rows, system = installed_versions(), f"Python {platform.python_version()} on {platform.platform()}"
    table = Table("", "installed", "tested", "status", caption=system, caption_justify="left")
    for row in rows:
        table.add_row(row.name, row.installed or "–", row.tested or "–", Text(row.status, "" if row.is_met else "red"))
    output.show(table)
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    left = Path(os.environ.get("HF_STITCH_CACHE") or f"{caches}/hf-stitch").expanduser()
    if any(left.glob("*.safetensors")):
        output.show(f"{left} contains activations that an earlier version kept and nothing reads now: delete it")

    def show(name: str, error: str) -> None:
        output.show(f"{name}: {f'failed, {error}' if error else 'passed'}")

    try:
        with _quiet():
            from hf_stitch.selftest import self_test

            parts = self_test(show)
    except Exception as error:  # a library that is missing or broken can raise anything
        parts = {"import the libraries": " ".join(f"{type(error).__name__}: {error}".split())}
        show(*next(iter(parts.items())))
    unmet = [shlex.quote(row.name + row.required) for row in rows if not row.is_met]
    differ = [f"{row.name}=={row.tested}" for row in rows if row.status.endswith("than tested")]
    failed, advice = any(parts.values()), "everything works"
    if unmet:
        advice = f"pip install {' '.join(unmet)}"
    elif failed:
        advice = f"pip install {' '.join(differ)}, or open" if differ else "open"
        advice += " an issue with this output"
    output.show(advice)
    output.record({
        "passed": not failed and not unmet, "advice": advice, "system": system,
        "versions": [{**asdict(row), "status": row.status} for row in rows], "parts": parts,
    })  # fmt: skip
    if failed or unmet:
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
