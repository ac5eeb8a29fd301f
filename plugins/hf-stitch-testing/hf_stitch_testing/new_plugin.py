"""``hf-stitch new-plugin``: create a distribution with one tested method, ready to install."""

from __future__ import annotations

import datetime
import keyword
import re
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from hf_stitch import __version__
from hf_stitch.cli.output import Output
from hf_stitch.plugins import CONTRACT
from hf_stitch.registry import registries
from hf_stitch.storage.files import KEPT, readable_errors, written_aside

TEMPLATES = files("hf_stitch_testing") / "plugin_templates"


class Kind(StrEnum):
    """Kinds of methods."""

    metric = "metric"
    matcher = "matcher"
    similarity = "similarity"
    anchors = "anchors"
    detector = "detector"
    adapter = "adapter"
    override = "override"
    data = "data"
    command = "command"


@dataclass(frozen=True)
class _About:
    """Template values for a kind of method."""

    registry: str  # registry of the entry
    words: str  # the kind, in words
    provides: str = "{class_name}"  # class or function of the entry
    name: str = "{entry}"  # name of the entry in the registry
    language: str = "python"  # language of the example in the README


ABOUT = {
    Kind.metric: _About("metrics", "A metric"),
    Kind.matcher: _About("matchers", "A matcher"),
    Kind.similarity: _About("similarities", "A similarity of relative representations"),
    Kind.anchors: _About("anchors", "A selection of anchors"),
    Kind.detector: _About("detectors", "A detector"),
    Kind.adapter: _About("adapters", "An adapter", provides="{class_name}Library"),
    Kind.override: _About("overrides", "An override", provides="For{class_name}", name="{class_name}"),
    Kind.data: _About("data", "A source of data"),
    Kind.command: _About("commands", "A command", provides="{entry}", name="{command}", language="bash"),
}


def new_plugin(
    name: Annotated[str, typer.Argument(help="Name of the method, e.g. sliced-distance.")],
    kind: Annotated[Kind, typer.Option(help="Kind of method.")],
    folder: Annotated[
        Path | None, typer.Option(help="Folder to write; it must be empty or new.", show_default="hf-stitch-NAME")
    ] = None,
) -> None:
    """Create a distribution with one example method and passing tests; replace the example with your method."""
    entry = _entry(name, kind)
    target = folder or Path(f"hf-stitch-{entry.replace('_', '-')}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise typer.BadParameter(f"{target} exists and is not an empty folder", param_hint="--folder")
    with readable_errors(f"{target} could not be written", KEPT), written_aside(target) as fresh:
        for path, text in files_of(entry, kind).items():
            (fresh / path).parent.mkdir(parents=True, exist_ok=True)
            (fresh / path).write_text(text, encoding="utf-8")
    output = Output(False)
    output.show(f"wrote {target}; now: pip install -e '{target}[test]' && pytest {target}")


def files_of(entry: str, kind: Kind) -> dict[str, str]:
    """Return the files of a new distribution."""
    about = ABOUT[kind]
    names = {
        "entry": entry,
        "class_name": "".join(part.capitalize() for part in entry.split("_")),
        "command": entry.replace("_", "-"),
    }
    template_values = names | {
        "distribution": f"hf-stitch-{names['command']}",
        "package": f"hf_stitch_{entry}",
        "name": about.name.format(**names),
        "provides": about.provides.format(**names),
        "registry": about.registry,
        "contract": CONTRACT,
        "about": about.words,
        "language": about.language,
        "version": __version__,
        "year": str(datetime.date.today().year),
    }

    def fill(template: str) -> str:
        return Template((TEMPLATES / template).read_text(encoding="utf-8")).substitute(template_values)

    template_values["usage"] = fill(f"{kind.value}/usage.py.tmpl").strip()
    return {
        "pyproject.toml": fill("pyproject.toml.tmpl"),
        "README.md": fill("README.md.tmpl"),
        "LICENSE": fill("LICENSE.tmpl"),
        f"{template_values['package']}/__init__.py": fill(f"{kind.value}/module.py.tmpl"),
        f"{template_values['package']}/py.typed": "",
        f"tests/test_{entry}.py": fill(f"{kind.value}/test.py.tmpl"),
    }


def _entry(name: str, kind: Kind) -> str:
    """Return the name as a Python identifier."""
    entry = name.removeprefix("hf-stitch-").replace("-", "_").lower()
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", entry) or keyword.iskeyword(entry):
        raise typer.BadParameter(
            f"name must be letters, digits and hyphens, starting with a letter, e.g. sliced-distance; got {name!r}",
            param_hint="NAME",
        )
    registry, key = registries[ABOUT[kind].registry], entry.replace("_", "-") if kind is Kind.command else entry
    if key in registry:
        raise typer.BadParameter(
            f"{key!r} already exists in {registry.kind} ({registry.entry(key).origin}); choose a different name",
            param_hint="NAME",
        )
    return entry
