"""The page of any result: its text, its plot and its data frame."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from hf_stitch.reports.samples import png
from hf_stitch.reports.section import Picture, Section, Table
from hf_stitch.results import Result

MOST = 1000
"""Rows of a data frame on a page."""


def section(result: Result) -> Section:
    """Describe a result by its text, its plot and its data frame."""
    frame = result.to_pandas()
    rows = [tuple(map(str, row)) for row in frame.head(MOST).itertuples(index=False)]
    notes = [f"The table shows {MOST} of {len(frame)} rows; all are in the data."] if len(frame) > MOST else []
    own, text = getattr(result, "verdict", None), str(result)
    shown: Any = result.__rich__()
    first = getattr(shown.shown, "title", None)  # which a narrow table breaks into lines
    verdict = f"{own.rstrip('.')}." if isinstance(own, str) else str(first or text.split("\n")[0].strip())
    numbers = {"Numbers": Table([str(column) for column in frame.columns], rows)}
    drawn, why = _plot(result) if hasattr(result, "plot") else ("", "")
    pictures = [Picture(verdict, drawn, f"Plot of {type(result).__name__}", sample=False)] if drawn else []
    notes += [f"There is no picture: {why}."] if why else []
    recipe = getattr(result, "recipe", {})
    return Section(
        type(result).__name__, "", verdict, pictures=pictures, tables=numbers, text=text, notes=notes, recipe=recipe,
        data=getattr(result, "data", None) if isinstance(getattr(result, "data", None), str) else None,
    )  # fmt: skip


def _plot(result: Any) -> tuple[str, str]:
    """Return the figure of a result as a ``data:`` address, or why there is none."""
    if find_spec("matplotlib") is None:
        return "", "matplotlib is not installed (pip install 'hf-stitch[plots]')"
    try:
        return png(result.plot().savefig), ""
    except (
        TypeError,
        ValueError,
    ) as error:  # plots that need arguments, of undefined values, or of names that no font has
        return "", str(error)
