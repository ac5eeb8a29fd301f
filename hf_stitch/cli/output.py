"""Output of commands: tables and text, or JSON with ``--json``."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from hf_stitch.printing import Visible, visible
from hf_stitch.reference import short_names
from hf_stitch.running import Processes
from hf_stitch.storage.files import replacing

if TYPE_CHECKING:
    from hf_stitch.results import Result

WIDE = 120
"""Width in columns if the output is a pipe or a file."""


class Output:
    """Print tables and text on stdout, or on stderr with ``--json``, which reserves stdout for the record.

    Of several processes, the first one prints.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(stderr=as_json, highlight=False, emoji=False)
        if not self.console.is_terminal:
            self.console.width = WIDE

    def show(self, shown: Any) -> None:
        """Print a table or a text. Nothing in it is markup or commands the terminal."""
        if Processes.of(None).rank:
            return
        self.console.print(Visible(shown), markup=False, soft_wrap=isinstance(shown, str))

    def record(self, record: Any) -> None:
        """Print the record as JSON if ``--json`` was given."""
        if self.as_json and not Processes.of(None).rank:
            typer.echo(as_json(record))

    def report(self, results: Result | Iterable[Result], path: Path | None) -> None:
        """Write the page of results, if one was asked for, with the command that makes it again."""
        if path is not None:
            from hf_stitch.reports import report

            report(results, path, command=shlex.join(["hf-stitch", *_shareable(sys.argv[1:])]))
            self.show(f"report {path}")


def _shareable(given: list[str]) -> list[str]:
    """Return the arguments of a command with short names of absolute paths, which tell who ran it."""
    paths = {each: found[2] for each in given if (found := re.fullmatch(r"([^/]*[=:])?(/[^/].*)", each))}
    names = short_names(paths.values())
    return [each.replace(paths[each], names[paths[each]]) if each in paths else each for each in given]


@contextmanager
def output_folder(folder: Path) -> Iterator[None]:
    """Create a folder before any work, so that a place where this is impossible is an error at once.

    If the work fails, folders that were created here are removed again, unless they contain something.
    """
    created = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # one is not empty
            for place in created:
                place.rmdir()
        raise


def save(result: Any, folder: Path, name: str, figures: Mapping[str, Mapping[str, Any]]) -> dict[str, Path]:
    """Save a result under a name, and its figures: file -> arguments of its ``plot``."""
    with replacing(folder) as fresh:
        result.save(fresh / name)
        for file, options in figures.items():
            result.plot(**options).savefig(fresh / file, dpi=150)
    return {file: folder / file for file in (name, *figures)}


def figure_name(number: int, label: str, figure: str = "") -> str:
    """Return the file name of a figure of a method."""
    method = label.partition("(")[0].replace("/", "-")
    return "-".join(filter(None, (str(number), method, figure))) + ".png"


def as_json(record: Any) -> str:
    """Serialise a record as standard JSON, with ``null`` for NaN and infinite numbers."""
    return visible(json.dumps(_standard(record), indent=2, ensure_ascii=False, allow_nan=False))


def _standard(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _standard(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_standard(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
