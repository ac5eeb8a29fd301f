"""List and remove activations that are kept on the disk."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from hf_stitch.cli.options import AsJson
from hf_stitch.cli.output import Output
from hf_stitch.cli.verbs import usage
from hf_stitch.resources import sized
from hf_stitch.storage.cache import DEFAULT_LIMIT, FOLDER, LIMIT, Cache, Entry, bytes_of

SHOWN = 8
"""Digits of a key in the table, and of the fingerprint of the data."""

cache = typer.Typer(
    help="List and remove activations that are kept on the disk: extract_activations(…, cache=True).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Folder = Annotated[
    Path | None,
    typer.Option(help="Folder of the cache.", metavar="DIR", show_default=f"{FOLDER}, or hf-stitch in ~/.cache"),
]


@cache.command("ls")
def listed(folder: Folder = None, json: AsJson = False) -> None:
    """List the entries: one for each layer of a network on samples, the last used one first."""
    output, place = Output(json), Cache(folder)
    place.sweep()
    entries = place.entries()
    total = sum(entry.size for entry in entries)
    if not entries:
        output.show(f"{place.folder} is empty")
    else:
        output.show(_table(entries, f"{place.folder}: {sized(total)} of at most {sized(place.limit)}"))
    record = {"folder": str(place.folder), "size": total, "limit": place.limit}
    output.record({**record, "entries": [_record(entry) for entry in entries]})


@cache.command("rm")
def removed(
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY", help="Keys of entries, or their first digits.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all entries.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    folder: Folder = None,
    json: AsJson = False,
) -> None:
    """Remove entries. Activations that a running process has read stay valid there."""
    output, place = Output(json), Cache(folder)
    place.sweep()
    if bool(keys) == everything:
        raise typer.BadParameter("give keys (hf-stitch cache ls shows them) or --all, not both")
    entries = place.entries()
    chosen = entries if everything else list({_one(key, entries): None for key in keys or ()})
    total = sized(sum(entry.size for entry in chosen))
    if chosen and not yes:
        typer.confirm(f"Remove {_count(chosen)} ({total}) from {place.folder}?", abort=True, err=True)
    _tell(output, place.remove(chosen), place)


@cache.command("gc")
def collected(
    max_size: Annotated[
        str | None,
        typer.Option(help="Largest size that stays, for example 5GB.", show_default=f"{LIMIT}, or {DEFAULT_LIMIT}"),
    ] = None,
    folder: Folder = None,
    json: AsJson = False,
) -> None:
    """Remove the entries that have not been used for the longest time, until the cache is small enough.

    Every write does this with the default size. What processes that were killed have left is removed, too.
    """
    with usage("--max-size"):
        most = None if max_size is None else bytes_of(max_size)
    place = Cache(folder, most)
    _tell(Output(json), place.shrink(), place)


def _one(key: str, entries: list[Entry]) -> Entry:
    """Return the entry whose key begins with some digits."""
    found = [entry for entry in entries if entry.key.startswith(key.lower())]
    if len(found) != 1 or not key:
        several = f"{_count(found)}: give more digits" if found else "no entry: hf-stitch cache ls lists them"
        raise ValueError(f"the key {key!r} is that of {several}")
    return found[0]


def _tell(output: Output, gone: list[Entry], place: Cache) -> None:
    left = place.entries()
    size, remains = (sum(entry.size for entry in entries) for entries in (gone, left))
    output.show(f"removed {_count(gone)} ({sized(size)}); {_count(left)} ({sized(remains)}) left in {place.folder}")
    keys = [entry.key for entry in gone]
    output.record({"folder": str(place.folder), "removed": keys, "removed_size": size, "size": remains})


def _table(entries: list[Entry], title: str) -> Table:
    folded = (Column(name, overflow="fold") for name in ("network", "layer", "data"))
    sizes = Column("size", justify="right", no_wrap=True), Column("last used", no_wrap=True)
    table = Table(
        "key",
        *folded,
        Column("samples", justify="right"),
        "pooling",
        "dtype",
        *sizes,
        title=title,
        title_justify="left",
    )
    for entry in entries:
        about = entry.about
        layer = "(their names)" if "candidates" in about else about.get("layer", "–")
        data = about["data"].removeprefix("sha256:")[:SHOWN] if "data" in about else "–"
        samples = f"{about['samples']:,}" if "samples" in about else "–"
        used = datetime.fromtimestamp(entry.used).astimezone().strftime("%Y-%m-%d %H:%M")
        table.add_row(
            entry.key[:SHOWN], about.get("network", "(broken)"), layer, data, samples,
            about.get("pooling", "–"), about.get("dtype", "–"), sized(entry.size), used,
        )  # fmt: skip
    return table


def _record(entry: Entry) -> dict[str, Any]:
    used = datetime.fromtimestamp(entry.used, UTC).isoformat(timespec="seconds")
    return {"key": entry.key, "size": entry.size, "used": used, **entry.about}


def _count(entries: list[Entry]) -> str:
    return f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'}"
