"""Where a command's words go: to people, or with ``--json`` to programs."""

from __future__ import annotations

import json
import math
from typing import Any

import typer
from rich.console import Console

WIDE = 120
"""Columns of what is no terminal: a pipe or a file."""


class Output:
    """Shows tables and sentences on stdout; with ``--json`` on stderr, so that stdout holds the record alone.

    Attributes:
        console: Where tables and sentences go.

    Args:
        as_json: Whether ``--json`` was given.

    Example:
        >>> Output(as_json=True).record({"accuracy": float("nan")})
        {
          "accuracy": null
        }
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(stderr=as_json, highlight=False)
        if not self.console.is_terminal:
            self.console.width = WIDE

    def show(self, shown: Any) -> None:
        """Show a table, or a sentence as it is, brackets and all."""
        self.console.print(shown, markup=False, soft_wrap=isinstance(shown, str))

    def record(self, record: Any) -> None:
        """Print the record, if programs are to read it."""
        if self.as_json:
            typer.echo(as_json(record))


def as_json(record: Any) -> str:
    """JSON as its standard has it: a figure that is undefined (NaN) or infinite becomes ``null``."""
    return json.dumps(_standard(record), indent=2, ensure_ascii=False, allow_nan=False)


def _standard(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _standard(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_standard(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
