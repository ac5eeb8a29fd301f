"""What people read: text of others on terminals, warnings, progress, numbers, and the pages that errors name."""

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
"""Control characters except tab and line feed, characters that reverse text, and halves of characters."""

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
"""All pages, each the name of a file in ``docs/errors``."""

SILENT = 60
"""Seconds after which a job tells of its progress where output goes to a file, and again after as many."""

ADDRESS = "https://github.com/hf-stitch/hf-stitch/blob/main/docs/errors/{}.md"


def visible(text: str) -> str:
    r"""Write characters that command a terminal, or change the order of text, as escapes of JSON."""
    return COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, with :func:`visible` text, at the line that called this package, whatever calls lie between."""
    frame, level, outside = sys._getframe(1), 2, 2
    while frame is not None:
        level += 1
        if frame.f_code.co_filename.startswith(PACKAGE):
            outside = level
        frame = frame.f_back  # type: ignore[assignment]
    warnings.warn(visible(message), category, stacklevel=outside)


def progress_bar(label: str | None, total: int, unit: str, done: int = 0, *, leave: bool = True) -> Any:
    """Return a bar of tqdm, on terminals and in notebooks after three seconds; elsewhere, as in a log, a line a minute.

    Without a label, nothing is shown; ``done`` steps of the total were done before; a terminal can ``leave`` the bar.
    """
    from tqdm.auto import tqdm

    given: dict[str, Any] = {"total": total, "initial": done, "desc": label, "unit": unit}
    bar = tqdm(**given, delay=3, leave=leave, disable=True if label is None else None)  # None: where nobody looks
    if label is None or not bar.disable:
        return bar
    often: dict[str, Any] = {"delay": SILENT, "mininterval": SILENT, "miniters": 1}
    form = "{desc}: {n_fmt} of {total_fmt} {unit}s, about {remaining} left{postfix}"
    return tqdm(**given, **often, bar_format=form, file=_Lines(), disable=False)


class _Lines(io.TextIOBase):
    """The file of errors, to which each state of a bar is written as a line."""

    def write(self, text: str) -> int:
        if line := text.strip():
            print(visible(line), file=sys.stderr, flush=True)
        return len(text)


def see(page: Page) -> str:
    """Return the last line of a message: the address of the page about the error."""
    return f"\nSee {ADDRESS.format(page)}"


def rounded(value: float) -> str:
    """Write a number with three decimals; with more where these would make it 0 or 1, but for rounding in float32."""
    if 1e-7 < abs(value) < 5e-4:
        return f"{value:.1e}"
    off = abs(1 - value)
    return f"{value:z.{1 - math.floor(math.log10(off)) if 1e-7 < off < 5e-4 else 3}f}"


def make_visible(error: BaseException | None) -> None:
    """Write control characters in the messages of an error and of its causes as escapes."""
    while error is not None:
        error.args = tuple(visible(each) if isinstance(each, str) else each for each in error.args)
        if isinstance(error, SyntaxError) and error.text:  # a line of the file, of which a traceback shows a copy
            error.text = visible(error.text)
        error = error.__cause__ or error.__context__


class Visible:
    """What rich shows, with :func:`visible` text in its own styles."""

    def __init__(self, shown: RenderableType) -> None:
        self.shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.console import Console
        from rich.segment import Segment

        literal = Console(file=io.StringIO(), width=options.max_width, markup=False, emoji=False, highlight=False)
        for text, style, control in literal.render(self.shown, options.update(markup=False)):
            yield Segment(text if control else visible(text), style, control)
