"""Commands ``hf-stitch same``, ``diff`` and ``diff-all``, for people and for continuous integration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_stitch.cli.functions import is_function
from hf_stitch.cli.options import NAMES
from hf_stitch.cli.verbs import Job, command

BatchSize = Annotated[
    int, typer.Option(min=1, help="Samples per forward pass; outputs of all modules are held in memory.")
]

FILES = (".onnx", ".npz", ".safetensors")
"""Suffixes of files that are accepted as the second network."""


Second = Annotated[
    str,
    typer.Argument(
        help=f"The second network: {NAMES}; a file .onnx, .npz or .gguf; or mlx:FOLDER, openvino:FILE.xml, "
        "keras:FOLDER or ctranslate2:FOLDER."
    ),
]
Python = Annotated[
    list[str] | None,
    typer.Option(help="Interpreter of the environment of a runtime, such as keras=envs/keras/bin/python. Repeatable."),
]
Trust = Annotated[bool, typer.Option("--trust", help="Run code inside the file of another runtime.")]


@command("hf_stitch_versions.sameness.workflow:same", without=["plan"])
def same(job: Job, b: Second, batch_size: BatchSize = 8, python: Python = None, trust: Trust = False) -> None:
    """Compare two networks; the exit status is 0 if they are the same, 1 if they differ, and 2 after an error."""
    from hf_stitch_versions.ports.prefixes import SUFFIXES, prefixed

    is_file = Path(b).suffix in {*FILES, *SUFFIXES} and not is_function(b) and not Path(b).is_dir()
    pythons = dict(map(_interpreter, python or []))
    try:
        second = b if prefixed(b) else Path(b) if is_file else job.shared.load(b)
        sameness = job.run(b=second, batch_size=batch_size, python=pythons, trust=trust)
    except Exception as error:  # of any kind: 1 is an answer
        raise typer.BadParameter(str(error) or type(error).__name__) from error
    job.finish(sameness, "same.json", {"same.png": {}})
    if not sameness.is_same:
        raise typer.Exit(1)


def _interpreter(text: str) -> tuple[str, str]:
    """Parse the interpreter of a runtime."""
    runtime, _, path = text.partition("=")
    if not path:
        raise typer.BadParameter(f"expected RUNTIME=INTERPRETER, such as keras=envs/keras/bin/python, got {text!r}",
                                 param_hint="--python")  # fmt: skip
    return runtime, path


Bound = Annotated[
    list[str] | None, typer.Option(help="Upper bound, such as KL=.01; above it the exit status is 1. Repeatable.")
]


@command("hf_stitch_versions.changes.workflow:diff", without=["plan"])
def diff(job: Job, fail_above: Bound = None) -> None:
    """Compare two versions; the exit status is 0, 1 if a bound is exceeded, and 2 after an error."""
    bounds = dict(map(_bound, fail_above or []))
    try:
        difference = job.run(fail_above=bounds)
    except Exception as error:  # of any kind: 1 is an answer
        raise typer.BadParameter(str(error) or type(error).__name__) from error
    job.finish(difference, "diff.json", {"diff.png": {}} if difference.curves else {})
    if difference.failed:
        raise typer.Exit(1)


def _bound(text: str) -> tuple[str, float]:
    """Parse a bound."""
    name, _, most = text.partition("=")
    try:
        return name, float(most)
    except ValueError:
        raise typer.BadParameter(
            f"expected NAME=NUMBER, such as KL=.01, got {text!r}", param_hint="--fail-above"
        ) from None


Versions = Annotated[list[str], typer.Argument(help="Versions as NAME=NETWORK, in order; at least two.")]


@command("hf_stitch_versions.changes.family:diff_all", without=["plan"])
def diff_all(job: Job, networks: Versions) -> None:
    """Compare all versions, and print the distances."""
    if unnamed := [version for version in networks if not version.partition("=")[0] or not version.partition("=")[2]]:
        raise typer.BadParameter(f"expected NAME=NETWORK, such as step100=runs/checkpoint-100, got {unnamed[0]!r}")
    places = dict(version.split("=", 1) for version in networks)
    try:
        family = job.run(networks={name: job.shared.load(place) for name, place in places.items()})
    except Exception as error:  # of any kind: 1 is an answer
        raise typer.BadParameter(str(error) or type(error).__name__) from error
    job.finish(family, "diff_all.json", {"diff_all.png": {}})
