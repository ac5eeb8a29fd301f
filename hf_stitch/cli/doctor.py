"""``hf-stitch doctor``: where a network can be cut and how to fix it; without a network, whether hf-stitch works."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.console import Console

from hf_stitch.cli import functions
from hf_stitch.cli.options import NAMES, AsJson, Device, Dtype, Task, check_place
from hf_stitch.cli.output import Output


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
    from hf_stitch.cli import versions

    tested, unknown = None, ""
    try:
        tested = versions.read_tested()
    except (OSError, ValueError) as error:
        unknown = str(error)
        output.show(f"The tested versions are unknown: {unknown}")
    rows = versions.installed_versions(tested)
    output.show(versions.table(rows))
    shown, parts = _self_test()
    output.show(shown)
    failed = [part["name"] for part in parts if part["error"]]
    passed, advice = not failed and all(row.is_met for row in rows), versions.advise(rows, failed)
    output.show(advice)
    output.record({
        "passed": passed, "advice": advice, "system": versions.SYSTEM, "versions": list(map(asdict, rows)),
        "problem": unknown, "parts": parts,
    })  # fmt: skip
    if not passed:
        raise typer.Exit(1)


def _self_test() -> tuple[object, list[dict[str, Any]]]:
    """Run the self-test, and return what to show and the record of its parts."""
    start = time.perf_counter()
    with Console(stderr=True).status("importing libraries") as status:
        try:
            with _quiet():
                from hf_stitch.selftest import self_test

                found = self_test(lambda part: status.update(f"self-test: {part}"))
        except Exception as error:  # a library that is missing or broken can raise anything
            line = " ".join(f"{type(error).__name__}: {error}".split())
            return f"The import failed: {line}", [
                {"name": "importing the libraries", "seconds": time.perf_counter() - start, "error": line}
            ]
    return found, found.to_dict()["parts"]


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
