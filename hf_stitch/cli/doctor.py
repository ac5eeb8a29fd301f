"""``hf-stitch doctor``: where a network can be cut and how to fix it; without a network, whether hf-stitch works."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from rich.table import Table
from rich.text import Text

from hf_stitch import __version__
from hf_stitch.cli import functions
from hf_stitch.cli.options import NAMES, AsJson, Device, Dtype, Task, check_place
from hf_stitch.cli.output import Output
from hf_stitch.plugins import installed as of_plugins, normalized
from hf_stitch.registry import registries

OPTIONAL = ("sentence-transformers", "peft", "torchvision", "evaluate", "matplotlib")
"""Distributions that are listed if they are installed."""


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


@dataclass(frozen=True)
class Installed:
    """A distribution and its version."""

    name: str
    installed: str  # installed version; empty if it is missing
    tested: str = ""  # version with which hf-stitch was tested; empty if there is none
    required: str = ""  # bounds that hf-stitch sets, for example >=5.10; empty if it sets none

    @property
    def is_met(self) -> bool:
        """Whether it is installed, in a version that hf-stitch accepts."""
        return bool(self.installed) and SpecifierSet(self.required).contains(self.installed, prereleases=True)

    @property
    def status(self) -> str:
        """What the versions tell; local parts do not count: ``2.15.0+cu132`` is 2.15.0."""
        if not self.is_met:
            return f"outside of {self.required}" if self.installed else "missing"
        if not self.tested:
            return ""
        present, tested = Version(Version(self.installed).public), Version(self.tested)
        return "tested" if present == tested else "newer than tested" if present > tested else "older than tested"


def read_tested(package: Path = Path(__file__).parents[1]) -> dict[str, str]:
    """Read the versions with which hf-stitch was tested, from its distribution or its checkout."""
    for place in (package / "tested.txt", package.parent / "requirements" / "tested.txt"):
        if place.is_file():
            lines = (line.partition("#")[0].strip() for line in place.read_text(encoding="utf-8").splitlines())
            pins = [each for each in map(Requirement, filter(None, lines)) if _applies(each)]
            return {normalized(each.name): next(iter(each.specifier)).version for each in pins}
    return {}


def installed_versions() -> list[Installed]:
    """List hf-stitch, its requirements, and optional libraries and plugins that are installed."""
    tested, present = read_tested(), {normalized(each.name): each.version for each in metadata.distributions()}
    declared = map(Requirement, metadata.requires("hf-stitch") or () if "hf-stitch" in present else ())
    required = {normalized(each.name): str(each.specifier) for each in declared if _applies(each)}
    of_kinds = {
        normalized(entry.distribution[0]) for kind in registries for entry in of_plugins(kind) if entry.distribution
    }
    plugins = sorted(of_kinds | {name for name in present if name.startswith("hf-stitch-")})
    names = dict.fromkeys([*required, *(name for name in (*OPTIONAL, *plugins) if name in present)])
    rows = (Installed(name, present.get(name, ""), tested.get(name, ""), required.get(name, "")) for name in names)
    return [Installed("hf-stitch", __version__), *rows]


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})
