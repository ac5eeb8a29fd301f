"""``hf-stitch list``: the built-in entries and plugins of a registry."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from json import loads
from typing import Annotated, Any

import typer
from rich.table import Table

from hf_stitch.cli.options import AsJson
from hf_stitch.cli.output import Output
from hf_stitch.metrics._catalogue import CATALOGUE, Described
from hf_stitch.registry import Registry, UnknownNameError, registries

BROKEN, BUILT_IN = "broken", "built-in"
SECONDS = 60
"""Time limit for the import of a plugin."""

PROGRAM = """
import json, sys
from hf_stitch.cli.listing import imported
print(json.dumps(imported(*sys.argv[1:])))
"""
"""Program that imports an entry and describes it."""


def _checked_kind(kind: str) -> str:
    try:
        registries[kind]
    except UnknownNameError as error:
        raise typer.BadParameter(str(error)) from error
    return kind


def listing(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", callback=_checked_kind, help=f"Registry: one of {', '.join(registries)}.")
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Import each plugin in a separate process, and show which are broken.")
    ] = False,
    json: AsJson = False,
) -> None:
    """List the entries of a registry; metrics with direction, range, invariances and use.

    Plugins are not imported: the list shows the information in their distributions, and plugins for another contract as
    broken. With --check, each plugin is imported, and listed as broken if it raises an error or takes too long.
    """
    output = Output(json)
    registry = registries[kind]
    entries = [_entry(registry, name) for name in registry]
    if check:
        distributed = [entry for entry in entries if registry.entry(entry["name"]).distribution]
        plugin_entries = [entry for entry in distributed if entry["source"] != BROKEN]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each thread waits for a process
            descriptions = pool.map(lambda entry: _in_a_process(kind, entry["name"]), plugin_entries)
        for entry, description in zip(plugin_entries, descriptions, strict=True):
            entry |= description
    table = _metrics(entries) if kind == "metrics" else _plain(kind, entries)
    output.show(table if entries else f"registry {kind} is empty")
    output.record(entries)


def _plain(kind: str, entries: list[dict[str, Any]]) -> Table:
    table = Table("name", "origin", "source", "summary", title=kind.capitalize(), title_justify="left")
    for entry in entries:
        table.add_row(*entry.values(), style="red" if entry["source"] == BROKEN else "")
    return table


def _metrics(entries: list[dict[str, Any]]) -> Table:
    table = Table("metric", "more alike", "range", "unchanged by", "use", title="Metrics", title_justify="left")
    table.caption = "with default options; set options with name:key=value, for example linear_cka:debiased=True"
    if any(not entry["direction"] for entry in entries):
        table.caption += "; --check shows the properties of metrics of plugins"
    for entry in entries:
        if entry["source"] == BROKEN:
            table.add_row(entry["name"], *[""] * 3, f"{entry['origin']}: {entry['summary']}", style="red")
            continue
        limits = [f"{end:.3g}".replace("inf", "∞") for end in entry["range"]]
        use = entry["summary"] if entry["origin"] == BUILT_IN else f"{entry['summary']} ({entry['origin']})"
        invariances = ", ".join(entry["invariances"]) or "–"
        table.add_row(entry["name"], entry["direction"] or "–", " to ".join(limits) or "–", invariances, use)
    return table


def _entry(registry: Registry[Any], name: str) -> dict[str, Any]:
    info = registry.entry(name)
    entry: dict[str, Any] = {"name": name, "origin": info.origin, "source": info.source, "summary": info.summary}
    if registry.kind == "metrics":
        if info.distribution is not None:
            entry |= {"title": name, "direction": "", "range": [], "invariances": []}
        else:
            entry |= _metric_record(CATALOGUE[name]) if info.origin == BUILT_IN else imported(registry.kind, name)
    return entry | {"source": BROKEN, "summary": info.problem} if info.problem else entry


def imported(kind: str, name: str) -> dict[str, Any]:
    """Import a method, and return the description that its class contains."""
    method: Any = registries[kind].get(name)
    registries[kind].check_kind(name, method)
    summary = (inspect.getdoc(method) or "").partition("\n")[0]
    if kind != "metrics":
        return {"summary": summary}
    invariances = getattr(method, "invariances", ())  # metrics of weights do not declare them
    return _metric_record(Described(method.title, method.higher_is_better, method.range, invariances, summary))


def _metric_record(metric: Described) -> dict[str, Any]:
    return {
        "summary": metric.use, "title": metric.title, "direction": metric.direction, "range": list(metric.range),
        "invariances": list(metric.invariances),
    }  # fmt: skip


def _in_a_process(kind: str, name: str) -> dict[str, Any]:
    """Call :func:`imported` in a child process, and return the description of the method, or the error."""
    arguments = [sys.executable, "-c", PROGRAM, kind, name]
    try:
        process = subprocess.run(arguments, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"source": BROKEN, "summary": f"import takes more than {SECONDS} seconds"}
    if process.returncode:
        lines = process.stderr.strip().splitlines() or [f"the process ended with code {process.returncode}"]
        return {"source": BROKEN, "summary": lines[-1].partition(": ")[2] or lines[-1]}
    description: dict[str, Any] = loads(process.stdout.splitlines()[-1])
    return description
