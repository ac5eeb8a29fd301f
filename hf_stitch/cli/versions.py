"""Installed versions of the libraries that hf-stitch uses, beside the versions with which it was tested."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from rich.table import Table
from rich.text import Text

from hf_stitch import __version__
from hf_stitch.plugins import installed as of_plugins
from hf_stitch.plugins import normalized
from hf_stitch.registry import registries

NAME = "hf-stitch"
SYSTEM = platform.platform()
"""Operating system and processor."""
OPTIONAL = ("sentence-transformers", "peft", "torchvision", "evaluate", "matplotlib")
"""Distributions that are listed if they are installed."""
NETWORKS = ("transformers", "tokenizers", "torch", "timm")
"""Distributions that are named first if a part of the self-test fails."""
TESTED, NEWER, OLDER, UNTESTED = "tested", "newer than tested", "older than tested", "not tested"
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
    r"""Read the versions with which hf-stitch was tested."""
    places = (package / "tested.txt", package.parent / "requirements" / "tested.txt")
    place = next(filter(Path.is_file, places), None)
    if place is None:
        raise FileNotFoundError(f"the list of tested versions is neither {places[0]} nor {places[1]}: reinstall {NAME}")
    found = {}
    for line in place.read_text(encoding="utf-8").splitlines():
        if text := line.partition("#")[0].strip():
            try:
                requirement = Requirement(text)
                (pin,) = requirement.specifier
            except (InvalidRequirement, ValueError) as error:
                raise ValueError(f"{place} must contain lines 'name==version ; marker', got {text!r}") from error
            if requirement.marker is None or requirement.marker.evaluate():
                found[normalized(requirement.name)] = pin.version
    return found


def installed_versions(tested: Mapping[str, str] | None) -> tuple[Installed, ...]:
    """List Python, hf-stitch, its requirements, and optional libraries and plugins that are installed."""
    required = {normalized(each.name): str(each.specifier) for each in _requirements()}
    of_kinds = (entry.distribution for kind in registries for entry in of_plugins(kind))
    plugins = sorted({normalized(distribution[0]) for distribution in of_kinds if distribution})
    pythons = _tested_pythons()
    series = ".".join(platform.python_version_tuple()[:2])
    of_python = TESTED if series in pythons else _compare(series, pythons[-1] if pythons else "", "unknown")
    rows = [
        Installed("python", platform.python_version(), ", ".join(pythons), "", of_python),
        Installed(NAME, __version__, "", "", ""),
    ]
    without = UNTESTED if tested is not None else "unknown"
    for name in dict.fromkeys([*required, "tokenizers", *OPTIONAL, *plugins]):
        present = _version(name)
        if present or name not in OPTIONAL:
            bounds, known = required.get(name, ""), (tested or {}).get(name, "")
            rows.append(Installed(name, present, known, bounds, _status(present, known, bounds, without)))
    return tuple(rows)


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


def _requirements() -> list[Requirement]:
    try:
        lines = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:  # on the path, but not installed
        return []
    found = map(Requirement, lines)
    return [each for each in found if each.marker is None or each.marker.evaluate({"extra": ""})]


def _tested_pythons() -> list[str]:
    """Versions of Python in which the tests run, such as 3.11, in ascending order, from the metadata of hf-stitch."""
    try:
        classifiers = metadata.metadata(NAME).get_all("Classifier") or []
    except metadata.PackageNotFoundError:
        return []
    named = (each.rpartition(" ")[2] for each in classifiers if each.startswith("Programming Language :: Python :: 3."))
    return sorted(named, key=Version)


def _version(name: str) -> str:
    try:
        return metadata.version(name) or ""
    except metadata.PackageNotFoundError:
        return ""


def _status(installed: str, tested: str, bounds: str, without: str) -> str:
    if not installed:
        return MISSING
    try:
        present = Version(installed).public
    except InvalidVersion:
        return without
    if not SpecifierSet(bounds).contains(present, prereleases=True):
        return OUTSIDE
    return _compare(present, tested, without)


def _compare(installed: str, tested: str, without: str) -> str:
    """Compare two versions without their local parts: ``2.15.0+cu132`` is 2.15.0. ``without`` stands for no version."""
    if not tested:
        return without
    present, known = (Version(Version(each).public) for each in (installed, tested))
    return TESTED if present == known else NEWER if present > known else OLDER


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
