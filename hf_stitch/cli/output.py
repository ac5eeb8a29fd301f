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
    """Printer of tables and text on stdout, or on stderr with ``--json``, which reserves stdout for the record.

    With several processes, only the first process prints.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(stderr=as_json, highlight=False, emoji=False)
        if not self.console.is_terminal:
            self.console.width = WIDE

    def show(self, content: Any) -> None:
        """Print a table or a text, without interpreting markup or terminal control sequences."""
        if Processes.of(None).rank:
            return
        self.console.print(Visible(content), markup=False, soft_wrap=isinstance(content, str))

    def record(self, record: Any) -> None:
        """Print the record as JSON if ``--json`` was passed."""
        if self.as_json and not Processes.of(None).rank:
            typer.echo(json_of(record))

    def report(self, results: Result | Iterable[Result], path: Path | None) -> None:
        """Write the page of results to a path, if any, with the command that reproduces it."""
        if path is not None:
            from hf_stitch.reports import report

            report(results, path, command=shlex.join(["hf-stitch", *_shareable(sys.argv[1:])]))
            self.show(f"report {path}")


def _shareable(arguments: list[str]) -> list[str]:
    """Return the arguments of a command with shortened absolute paths, which could identify the user."""
    paths = {arg: match[2] for arg in arguments if (match := re.fullmatch(r"([^/]*[=:])?(/[^/].*)", arg))}
    names = short_names(paths.values())
    return [arg.replace(paths[arg], names[paths[arg]]) if arg in paths else arg for arg in arguments]


@contextmanager
def output_folder(folder: Path) -> Iterator[None]:
    """Create a folder before any work, so that an invalid path raises an error immediately.

    If the work fails, the created folders are removed, except folders with content.
    """
    new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # a folder is not empty
            for path in new_folders:
                path.rmdir()
        raise


def save(result: Any, folder: Path, name: str, figures: Mapping[str, Mapping[str, Any]]) -> dict[str, Path]:
    """Save a result under a name, and its figures (file -> arguments of ``plot``)."""
    with replacing(folder) as fresh:
        result.save(fresh / name)
        for file, options in figures.items():
            result.plot(**options).savefig(fresh / file, dpi=150)
    return {file: folder / file for file in (name, *figures)}


def figure_name(number: int, label: str, figure: str = "") -> str:
    """Return the file name of a figure of a method."""
    method = label.partition("(")[0].replace("/", "-")
    return "-".join(filter(None, (str(number), method, figure))) + ".png"


def json_of(record: Any) -> str:
    """Serialise a record as standard JSON, with ``null`` for NaN and infinite numbers."""
    return visible(json.dumps(_standard(record), indent=2, ensure_ascii=False, allow_nan=False))


def _standard(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _standard(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_standard(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
