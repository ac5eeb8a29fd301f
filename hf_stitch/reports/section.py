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
class View:
    """One of the things that a figure can show.

    Attributes:
        label: Its name in the list of views.
        caption: The finding, in one sentence.
        traces: Traces of Plotly.
        table: The numbers.
    """

    label: str
    caption: str
    traces: Sequence[Trace]
    table: Table


@dataclass(frozen=True)
class Figure:
    """A figure that shows one of its views at a time.

    Attributes:
        views: The views, the first of which is shown first.
        layout: Layout of Plotly.
        start: Row and column of the cell that is chosen at first.
        profiles: Whether a click on a cell of a heat map shows its row and its column.
        slider: What a slider over the views stands for; empty for a list.
    """

    views: Sequence[View]
    layout: Mapping[str, Any]
    start: tuple[int, int] = (0, 0)
    profiles: bool = False
    slider: str = ""


@dataclass(frozen=True)
class Picture:
    """A picture or a text with what it shows.

    Attributes:
        caption: What it shows.
        source: A picture as ``data:`` address; empty for a text.
        text: The text, or the text alternative of the picture.
        sample: Whether it is a sample, all of which are shown in the same size.
    """

    caption: str
    source: str
    text: str
    sample: bool = True


def key_of(source: str | None, target: str | None) -> str:
    """Return the key of a pair of networks.

    Args:
        source: Hash of the weights of the first; ``None`` if it is unknown.
        target: The same of the second.

    Returns:
        The key; empty if one is unknown.
    """
    return f"{source} {target}" if source and target else ""


@dataclass(frozen=True)
class Section:
    """A result on a page.

    Attributes:
        title: What it is.
        asked: What was asked, in a sentence.
        verdict: What came out, in a sentence.
        figures: The figures.
        pictures: Pictures and samples.
        tables: Title -> further numbers.
        text: The result as text, for results without figures.
        notes: Further remarks: what is left out, undefined or thinned.
        recipe: Record for reproducing it.
        networks: Key of the pair of networks (:func:`key_of`): what sections with the same key know of a pair of
            layers is shown together.
        data: Fingerprint of the samples; ``None`` if there are none, or they are unknown.
    """

    title: str
    asked: str
    verdict: str
    figures: Sequence[Figure] = ()
    pictures: Sequence[Picture] = ()
    tables: Mapping[str, Table] = field(default_factory=dict)
    text: str = ""
    notes: Sequence[str] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)
    networks: str = ""
    data: str | None = None
