"""``hf-stitch list``: the built-in entries of a registry and those of plugins."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer
from rich.table import Table

from hf_stitch.built_ins import BUILT_INS
from hf_stitch.cli.options import AsJson
from hf_stitch.cli.output import Output
from hf_stitch.metrics._catalogue import CATALOGUE, Described
from hf_stitch.registry import Registry, UnknownNameError, registries

BROKEN, BUILT_IN = "broken", "built-in"


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
    """List the entries of a registry; metrics with direction, range, invariances and use.

    A plugin that cannot be imported is listed as broken. Built-in metrics are listed without an import.
    """
    output = Output(json)
    registry = registries[kind]
    entries = [(_metric if kind == "metrics" else _entry)(registry, name) for name in registry]
    table = _metrics(entries) if kind == "metrics" else _plain(kind, entries)
    output.show(table if entries else f"no {kind} are registered")
    output.record(entries)


def _plain(kind: str, entries: list[dict[str, Any]]) -> Table:
    table = Table("name", "origin", "source", "summary", title=kind.capitalize(), title_justify="left")
    for entry in entries:
        table.add_row(*entry.values(), style="red" if entry["source"] == BROKEN else "")
    return table


def _metrics(entries: list[dict[str, Any]]) -> Table:
    table = Table("metric", "more alike", "range", "unchanged by", "use", title="Metrics", title_justify="left")
    table.caption = "with default options; name:key=value sets others, for example linear_cka:debiased=True"
    for entry in entries:
        if entry["source"] == BROKEN:
            table.add_row(entry["name"], *[""] * 3, f"{entry['origin']}: {entry['summary']}", style="red")
            continue
        low, high = (f"{end:.3g}".replace("inf", "∞") for end in entry["range"])
        use = entry["summary"] if entry["origin"] == BUILT_IN else f"{entry['summary']} ({entry['origin']})"
        unchanged = ", ".join(entry["invariances"]) or "–"
        table.add_row(entry["name"], entry["direction"], f"{low} to {high}", unchanged, use, end_section=False)
    return table


def _entry(registry: Registry[Any], name: str) -> dict[str, Any]:
    entry = {"name": name, "origin": registry.origin(name)}
    try:
        factory = registry.get(name)
    except (ImportError, AttributeError) as error:
        return {**entry, "source": BROKEN, "summary": str(error)}
    summary = (inspect.getdoc(factory) or "").partition("\n")[0]
    return {**entry, "source": f"{factory.__module__}:{factory.__qualname__}", "summary": summary}


def _metric(registry: Registry[Any], name: str) -> dict[str, Any]:
    if registry.origin(name) == BUILT_IN:
        entry = {"name": name, "origin": BUILT_IN, "source": BUILT_INS["metrics"][name]}
        about = CATALOGUE[name]
    else:
        entry = _entry(registry, name)
        if entry["source"] == BROKEN:
            return entry
        kind = registry.get(name)
        invariances = getattr(kind, "invariances", ())  # metrics of weights declare none
        about = Described(kind.title, kind.higher_is_better, kind.range, invariances, entry["summary"])
    return {
        **entry, "summary": about.use, "title": about.title, "direction": about.direction, "range": list(about.range),
        "invariances": list(about.invariances),
    }  # fmt: skip
