"""Installed versions of the libraries that hf-stitch uses, beside the versions with which it was tested."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from rich.table import Table
from rich.text import Text

from hf_stitch import __version__
from hf_stitch.plugins import installed as of_plugins, normalized
from hf_stitch.registry import registries
from hf_stitch.storage.files import decoding

NAME = "hf-stitch"
SYSTEM = platform.platform()
"""Operating system and processor."""
OPTIONAL = ("sentence-transformers", "peft", "torchvision", "evaluate", "matplotlib")
"""Distributions that are listed if they are installed."""
NETWORKS = ("transformers", "tokenizers", "torch", "timm")
"""Distributions that are named first if a part of the self-test fails."""
TESTED, NEWER, OLDER = "tested", "newer than tested", "older than tested"
UNTESTED, UNKNOWN = "not tested", "unknown"
MISSING, OUTSIDE = "missing", "outside of its bounds"


@dataclass(frozen=True)
class Installed:
    """A distribution and its version."""

    name: str  # name of the distribution, or python
    installed: str  # installed version; empty if it is missing
    tested: str  # version with which hf-stitch was tested; empty if there is none
    required: str  # bounds that hf-stitch sets, for example >=5.10; empty if it sets none
    status: str

    @property
    def is_met(self) -> bool:
        """Whether it is installed, in a version that hf-stitch accepts."""
        return self.status not in (MISSING, OUTSIDE)


def read_tested(package: Path = Path(__file__).parents[1]) -> dict[str, str]:
    """Read the versions with which hf-stitch was tested."""
    places = (package / "tested.txt", package.parent / "requirements" / "tested.txt")
    place = next(filter(Path.is_file, places), None)
    if place is None:
        raise FileNotFoundError(f"the list of tested versions is neither {places[0]} nor {places[1]}: reinstall {NAME}")
    with decoding(place):
        lines = (line.partition("#")[0].strip() for line in place.read_text(encoding="utf-8").splitlines())
        pins = [each for each in map(Requirement, filter(None, lines)) if each.marker is None or each.marker.evaluate()]
        return {normalized(each.name): version.version for each in pins for (version,) in [tuple(each.specifier)]}


def installed_versions(tested: Mapping[str, str] | None) -> tuple[Installed, ...]:
    """List Python, hf-stitch, its requirements, and optional libraries and plugins that are installed."""
    required = {
        normalized(each.name): str(each.specifier)
        for each in map(Requirement, _declared("Requires-Dist"))
        if each.marker is None or each.marker.evaluate({"extra": ""})
    }
    of_kinds = (entry.distribution for kind in registries for entry in of_plugins(kind))
    ours = (normalized(each.name) for each in metadata.distributions())
    plugins = sorted(
        {normalized(distribution[0]) for distribution in of_kinds if distribution}
        | {name for name in ours if name.startswith(f"{NAME}-")}
    )
    pythons = tested_pythons()
    series = ".".join(platform.python_version_tuple()[:2])
    of_python = _status(series, series if series in pythons else "".join(pythons[-1:]), "", UNKNOWN)
    rows = [
        Installed("python", platform.python_version(), ", ".join(pythons), "", of_python),
        Installed(NAME, __version__, "", "", ""),
    ]
    without = UNTESTED if tested is not None else UNKNOWN
    for name in dict.fromkeys([*required, "tokenizers", *OPTIONAL, *plugins]):
        try:
            present = metadata.version(name)
        except metadata.PackageNotFoundError:
            present = ""
        if present or name not in OPTIONAL:
            bounds, known = required.get(name, ""), (tested or {}).get(name, "")
            other = "" if name in plugins else without  # plugins have tests of their own
            rows.append(Installed(name, present, known, bounds, _status(present, known, bounds, other)))
    return tuple(rows)


def tested_pythons() -> list[str]:
    """Return the versions of Python in which the tests run, such as 3.11, in ascending order."""
    names = (each.partition("Programming Language :: Python :: 3.")[2] for each in _declared("Classifier"))
    return [f"3.{minor}" for minor in sorted(map(int, filter(None, names)))]


def table(rows: Sequence[Installed]) -> Table:
    """Return the table that ``rich`` prints."""
    shown = Table("", "installed", "tested", "status", caption=SYSTEM, caption_justify="left")
    for row in rows:
        status = f"{row.status}, {row.required}" if row.status == OUTSIDE else row.status
        style = "" if row.status in ("", TESTED) else "yellow" if row.is_met else "red"
        shown.add_row(row.name, Text(row.installed or "–"), Text(row.tested or "–"), Text(status or "–", style))
    return shown


def advise(rows: Sequence[Installed], failed: Sequence[str]) -> str:
    """Return one sentence: what to do."""
    fails = _and(failed) + (" fails" if len(failed) == 1 else " fail") if failed else ""
    if unmet := [row for row in rows if not row.is_met]:
        given = [
            f"{row.name} {row.installed} does not satisfy {row.required}" if row.installed else f"{row.name} is missing"
            for row in unmet
        ]
        install = " ".join(shlex.quote(row.name + row.required) for row in unmet)
        return f"{_and([*given, *filter(None, [fails])])}: pip install {install}"
    differ = [row for row in rows if row.status in (NEWER, OLDER) and row.name != "python"]
    differ = [row for row in differ if row.name in NETWORKS] or differ
    given = [f"{row.name} {row.installed} is {row.status.replace('than', 'than the')} {row.tested}" for row in differ]
    if not failed:
        but = f": {_and(given)}, but all parts of the self-test pass" if given else ""
        return f"Everything works, and there is nothing to do{but}."
    if not differ:
        return f"{fails[0].upper()}{fails[1:]}: open an issue with this output."
    install = " ".join(f"{row.name}=={row.tested}" for row in differ)
    return f"{_and([*given, fails])}: install {install}, or open an issue with this output."


def _declared(field: str) -> list[str]:
    """Return a field of the metadata of hf-stitch, which is empty if it is on the path, but not installed."""
    try:
        return metadata.metadata(NAME).get_all(field) or []
    except metadata.PackageNotFoundError:
        return []


def _status(installed: str, tested: str, bounds: str, without: str) -> str:
    """Compare versions without their local parts: ``2.15.0+cu132`` is 2.15.0. ``without`` stands for no tested one."""
    if not installed:
        return MISSING
    try:
        present = Version(Version(installed).public)
    except InvalidVersion:
        return without
    if not SpecifierSet(bounds).contains(present, prereleases=True):
        return OUTSIDE
    if not tested:
        return without
    known = Version(Version(tested).public)
    return TESTED if present == known else NEWER if present > known else OLDER


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
