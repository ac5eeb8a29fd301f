"""Messages of the library in the words of the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

GIVEN: ContextVar[Sequence[str]] = ContextVar("given", default=())
"""The arguments of the command that runs."""

CALL = re.compile(r"([\w.]+\([^()]*\))")
"""Calls of Python, which keep their arguments."""

COLUMN = "text_pair"
"""An option that is also the name of a column, which stays as it is."""


def in_options(message: str, command: Any) -> str:
    """Replace arguments of Python by the options of a command: ``task='image'`` by ``--task image``."""
    options = {str(each.name): each.opts[0] for each in command.params if each.opts[0].startswith("--")}
    for side, layer in (("a", "source_layer"), ("b", "target_layer")):  # of a comparison inside of the verb
        if layer in options:
            options[f"layers_{side}"] = options[layer]
    if not options:
        return message
    long = sorted((name for name in options if "_" in name and name != COLUMN), reverse=True)
    given = rf"(?<![\w/.'\"-])({'|'.join(sorted(options, reverse=True))})=('[^']*'|[^\s,;)]*)"
    bare = rf"(?<![\w/.'\"-])({'|'.join(long)})(?![\w/.'\"=-])" if long else r"(?!)"

    def option_of(found: re.Match[str]) -> str:
        value = (found[2] or "").strip("'") if found.re.groups > 1 else ""
        return options[found[1]] + (f" {value}" if value else "")

    parts = CALL.split(message)
    parts[::2] = [re.sub(bare, option_of, re.sub(given, option_of, part)) for part in parts[::2]]
    return "".join(parts)
