"""The page of any result: its text and its data frame."""

from __future__ import annotations

from hf_stitch.reports.section import Figure, Section, Table
from hf_stitch.results import Result

MOST = 1000
"""Rows of a data frame on a page."""


def section(result: Result) -> Section:
    """Describe a result by its text and its data frame.

    Args:
        result: The result.
    """
    frame = result.to_pandas()
    rows = [tuple(map(str, row)) for row in frame.head(MOST).itertuples(index=False)]
    notes = [f"The table shows {MOST} of {len(frame)} rows; all are in the data."] if len(frame) > MOST else []
    table = Table([str(column) for column in frame.columns], rows)
    caption = getattr(result, "verdict", None)
    text = str(result)
    verdict = f"{caption}." if isinstance(caption, str) else text.split("\n")[0].strip()
    figure = Figure(text, {}, {}, table)
    return Section(type(result).__name__, "", verdict, [figure], notes, getattr(result, "recipe", {}))
