"""``hf-stitch list``: the built-in entries of a registry and those of plugins."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer
from rich.table import Table

from hf_stitch.cli.options import AsJson
from hf_stitch.cli.output import Output
from hf_stitch.registry import Registry, UnknownNameError, registries


def _known(kind: str) -> str:
    try:
        registries[kind]
    except UnknownNameError as error:
        raise typer.BadParameter(str(error)) from error
    return kind


def listing(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", callback=_known, help=f"Registry: one of {', '.join(registries)}.")
    ],
    json: AsJson = False,
) -> None:
    """List the entries of a registry. A plugin that cannot be imported is listed as broken."""
    output = Output(json)
    entries = [_entry(registries[kind], name) for name in registries[kind]]
    table = Table("name", "origin", "source", "summary", title=kind.capitalize(), title_justify="left")
    for entry in entries:
        table.add_row(*entry.values(), style="red" if entry["source"] == "broken" else "")
    output.show(table if entries else f"no {kind} are registered")
    output.record(entries)


def _entry(registry: Registry[Any], name: str) -> dict[str, str]:
    entry = {"name": name, "origin": registry.origin(name)}
    try:
        factory = registry.get(name)
    except (ImportError, AttributeError) as error:
        return {**entry, "source": "broken", "summary": str(error)}
    summary = (inspect.getdoc(factory) or "").partition("\n")[0]
    return {**entry, "source": f"{factory.__module__}:{factory.__qualname__}", "summary": summary}
