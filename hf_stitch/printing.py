"""Output for people: untrusted text on terminals, warnings, progress, numbers, and links to pages about errors."""

from __future__ import annotations

import io
import math
import os
import re
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

PACKAGE = f"{Path(__file__).parent}{os.sep}"
COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and line feed, characters that change the text direction, and lone surrogates."""

Page = Literal[
    "damaged-file",
    "heads",
    "missing-weights",
    "no-example",
    "no-name",
    "not-a-cut",
    "not-saved",
    "other-labels",
    "other-order",
    "other-tokens",
    "other-weights",
    "too-few-samples",
    "too-large",
]
"""Pages about errors, as names of files in ``docs/errors``."""

SILENT = 60
"""Seconds between lines of progress if output goes to a file."""

ADDRESS = "https://github.com/hf-stitch/hf-stitch/blob/main/docs/errors/{}.md"


def visible(text: str) -> str:
    r"""Replace terminal control characters, and characters that change the text direction, by JSON escapes."""
    return COMMANDS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, with :func:`visible` text, at the line that called this package."""
    frame, level, caller_level = sys._getframe(1), 2, 2
    while frame is not None:
        level += 1
        if frame.f_code.co_filename.startswith(PACKAGE):
            caller_level = level
        frame = frame.f_back  # type: ignore[assignment]
    warnings.warn(visible(message), category, stacklevel=caller_level)


def progress_bar(label: str | None, total: int, unit: str, done: int = 0, *, leave: bool = True) -> Any:
    """Return a tqdm bar: after three seconds on terminals and in notebooks, otherwise one line per minute.

    Without a label, nothing is shown. ``done`` steps of the total are already done. With ``leave``, the bar stays on
    the terminal.
    """
    from tqdm.auto import tqdm

    options: dict[str, Any] = {"total": total, "initial": done, "desc": label, "unit": unit}
    bar = tqdm(**options, delay=3, leave=leave, disable=True if label is None else None)  # None: only on terminals
    if label is None or not bar.disable:
        return bar
    interval: dict[str, Any] = {"delay": SILENT, "mininterval": SILENT, "miniters": 1}
    line_format = "{desc}: {n_fmt} of {total_fmt} {unit}s, about {remaining} left{postfix}"
    return tqdm(**options, **interval, bar_format=line_format, file=_Lines(), disable=False)


class _Lines(io.TextIOBase):
    """File that writes each state of a bar as a line to stderr."""

    def write(self, text: str) -> int:
        if line := text.strip():
            print(visible(line), file=sys.stderr, flush=True)
        return len(text)


def see(page: Page) -> str:
    """Return the last line of an error message: the URL of the page about the error."""
    return f"\nSee {ADDRESS.format(page)}"


def rounded(value: float) -> str:
    """Format a number with three decimals, or more if it is near 0 or 1 by more than float32 rounding error."""
    if 1e-7 < abs(value) < 5e-4:
        return f"{value:.1e}"
    distance = abs(1 - value)
    return f"{value:z.{1 - math.floor(math.log10(distance)) if 1e-7 < distance < 5e-4 else 3}f}"


def make_visible(error: BaseException | None) -> None:
    """Escape control characters in the messages of an error and of its causes."""
    while error is not None:
        error.args = tuple(visible(part) if isinstance(part, str) else part for part in error.args)
        if isinstance(error, SyntaxError) and error.text:  # a line of the file; a traceback shows a copy
            error.text = visible(error.text)
        error = error.__cause__ or error.__context__


class Visible:
    """Renderable for rich with :func:`visible` text and unchanged styles."""

    def __init__(self, renderable: RenderableType) -> None:
        self.renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.console import Console
        from rich.segment import Segment

        literal = Console(file=io.StringIO(), width=options.max_width, markup=False, emoji=False, highlight=False)
        for text, style, control in literal.render(self.renderable, options.update(markup=False)):
            yield Segment(text if control else visible(text), style, control)
