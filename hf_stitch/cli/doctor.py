"""``hf-stitch doctor``: diagnosis of the cuts of a network, or of the installation."""

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
from hf_stitch.plugins import installed as entries_of, normalized
from hf_stitch.registry import registries

OPTIONAL = ("sentence-transformers", "peft", "torchvision", "evaluate", "matplotlib")
"""Optional distributions, listed if installed."""


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            help=f"Network: {NAMES}. Without a network, compare installed with tested versions, and run a self-test."
        ),
    ] = None,
    task: Task = None,
    content: Annotated[
        str | None,
        typer.Option(
            help="Input that must pass through the cut, for networks with several inputs: decoder_input_ids for the "
            "decoder of an encoder-decoder."
        ),
    ] = None,
    random: Annotated[bool, typer.Option("--random", help="Use random weights instead of a download.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    json: AsJson = False,
) -> None:
    """Report which layers of a network can be cut, which cannot and why, and how to fix this.

    Without a network, compare installed with tested versions, and test hf-stitch on tiny networks, without downloads.
    Include this output in issue reports.

    The exit code is 1 if the network cannot be cut, a part of the self-test fails or a requirement is not met.
    """
    output = Output(json)
    if model is None:
        if task or content or random or device or dtype:
            raise typer.BadParameter("--task, --content, --random, --device and --dtype require a network")
        _examine_installation(output)
        return

    from hf_stitch.adapters.doctor import diagnose

    torch_device, options = check_place(device, dtype)
    if random:
        options["pretrained"] = False
    network: Any = model
    if functions.is_function(model):
        network, options = functions.network_of(model, options)
    with _quiet():
        report = diagnose(network, task=task, content=content, device=torch_device, **options)
    if network is not model:
        report = replace(report, model=functions.shown(model))
    output.show(report)
    output.record(report.to_dict())
    if not report.cuts:
        raise typer.Exit(1)


def _examine_installation(output: Output) -> None:
    """Show versions and a self-test. Versions come first, because imports of libraries can fail or end the process."""
    rows, system = installed_versions(), f"Python {platform.python_version()} on {platform.platform()}"
    table = Table("", "installed", "tested", "status", caption=system, caption_justify="left")
    for row in rows:
        table.add_row(row.name, row.installed or "–", row.tested or "–", Text(row.status, "" if row.is_met else "red"))
    output.show(table)
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = Path(os.environ.get("HF_STITCH_CACHE") or f"{caches}/hf-stitch").expanduser()
    if any(cache.glob("*.safetensors")):
        output.show(f"{cache} contains unused activations of an earlier version: delete it")

    def show(name: str, error: str) -> None:
        output.show(f"{name}: {f'failed, {error}' if error else 'passed'}")

    try:
        with _quiet():
            from hf_stitch.selftest import self_test

            errors = self_test(show)
    except Exception as error:  # a missing or broken library can raise any error
        errors = {"import the libraries": " ".join(f"{type(error).__name__}: {error}".split())}
        show(*next(iter(errors.items())))
    unmet = [shlex.quote(row.name + row.required) for row in rows if not row.is_met]
    tested_versions = [f"{row.name}=={row.tested}" for row in rows if row.status.endswith("than tested")]
    failed, advice = any(errors.values()), "everything works"
    if unmet:
        advice = f"pip install {' '.join(unmet)}"
    elif failed:
        advice = f"pip install {' '.join(tested_versions)}, or open" if tested_versions else "open"
        advice += " an issue with this output"
    output.show(advice)
    output.record({
        "passed": not failed and not unmet, "advice": advice, "system": system,
        "versions": [{**asdict(row), "status": row.status} for row in rows], "parts": errors,
    })  # fmt: skip
    if failed or unmet:
        raise typer.Exit(1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the log and the progress bars of transformers."""
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
    """Distribution with its versions."""

    name: str
    installed: str  # installed version; empty if missing
    tested: str = ""  # version tested with hf-stitch; empty without one
    required: str = ""  # bounds set by hf-stitch, for example >=5.10; empty without bounds

    @property
    def is_met(self) -> bool:
        """Whether a version that hf-stitch accepts is installed."""
        return bool(self.installed) and SpecifierSet(self.required).contains(self.installed, prereleases=True)

    @property
    def status(self) -> str:
        """Comparison of the versions, ignoring local parts: ``2.15.0+cu132`` is 2.15.0."""
        if not self.is_met:
            return f"outside of {self.required}" if self.installed else "missing"
        if not self.tested:
            return ""
        present, tested = Version(Version(self.installed).public), Version(self.tested)
        return "tested" if present == tested else "newer than tested" if present > tested else "older than tested"


def read_tested(package: Path = Path(__file__).parents[1]) -> dict[str, str]:
    """Read the tested versions from the distribution or checkout of hf-stitch."""
    for path in (package / "tested.txt", package.parent / "requirements" / "tested.txt"):
        if path.is_file():
            lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
            requirements = [r for r in map(Requirement, filter(None, lines)) if _applies(r)]
            return {normalized(r.name): next(iter(r.specifier)).version for r in requirements}
    return {}


def installed_versions() -> list[Installed]:
    """List hf-stitch, its requirements, and installed optional libraries and plugins."""
    tested, present = read_tested(), {normalized(d.name): d.version for d in metadata.distributions()}
    declared = map(Requirement, metadata.requires("hf-stitch") or () if "hf-stitch" in present else ())
    required = {normalized(r.name): str(r.specifier) for r in declared if _applies(r)}
    names_of_plugins = {
        normalized(entry.distribution[0]) for kind in registries for entry in entries_of(kind) if entry.distribution
    }
    plugins = sorted(names_of_plugins | {name for name in present if name.startswith("hf-stitch-")})
    names = dict.fromkeys([*required, *(name for name in (*OPTIONAL, *plugins) if name in present)])
    rows = (Installed(name, present.get(name, ""), tested.get(name, ""), required.get(name, "")) for name in names)
    return [Installed("hf-stitch", __version__), *rows]


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})
