"""The parts of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Trace = dict[str, Any]
"""A trace of Plotly as JSON values; texts are escaped."""


@dataclass(frozen=True)
class Table:
    """Numbers as text, which everybody can read, copy and hear.

    Attributes:
        columns: Titles of the columns.
        rows: Cells.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """A figure with what it shows, in words and in numbers.

    Attributes:
        caption: The finding, in one sentence.
        views: Label -> traces; one view is shown at a time.
        layout: Layout of Plotly.
        table: The numbers.
        profiles: Whether a click on a cell shows its row and its column.
    """

    caption: str
    views: Mapping[str, Sequence[Trace]]
    layout: Mapping[str, Any]
    table: Table
    profiles: bool = False


@dataclass(frozen=True)
class Section:
    """A result on a page.

    Attributes:
        title: What it is.
        asked: What was asked, in a sentence.
        verdict: What came out, in a sentence.
        figures: The figures.
        notes: Further remarks: what is left out, undefined or thinned.
        recipe: Record for reproducing it.
    """

    title: str
    asked: str
    verdict: str
    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)
