"""Installed versions of the libraries that hf-stitch uses, beside the versions with which it was tested."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hf_stitch import __version__
from hf_stitch.plugins import installed as of_plugins, normalized
from hf_stitch.registry import registries

OPTIONAL = ("sentence-transformers", "peft", "torchvision", "evaluate", "matplotlib")
"""Distributions that are listed if they are installed."""


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
    """Return whether a requirement is one of this system, without extras."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})
