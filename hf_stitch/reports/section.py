"""Parts of a report page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Trace = dict[str, Any]
"""A trace of Plotly as JSON values; texts are escaped."""


@dataclass(frozen=True)
class Table:
    """Numbers as accessible text."""

    columns: Sequence[str]  # titles of the columns
    rows: Sequence[Sequence[str]]  # cells


@dataclass(frozen=True)
class View:
    """One view of a figure."""

    label: str  # name in the list of views
    caption: str  # the finding, in one sentence
    traces: Sequence[Trace]  # traces of Plotly
    table: Table  # the numbers


@dataclass(frozen=True)
class Figure:
    """Figure that shows one of its views at a time."""

    views: Sequence[View]
    layout: Mapping[str, Any]  # layout of Plotly
    start: tuple[int, int] = (0, 0)  # row and column of the initially selected cell
    profiles: bool = False  # whether a click on a cell of a heat map shows its row and its column
    slider: str = ""  # label of a slider over the views; empty for a list
    first: int = 0  # index of the initial view


@dataclass(frozen=True)
class Picture:
    """Image or text with a caption."""

    caption: str  # caption
    source: str  # image as data: address; empty for a text
    text: str  # the text, or the text alternative of the image
    sample: bool = True  # whether it is a sample; all samples are shown in the same size


def key_of(source: str | None, target: str | None) -> str:
    """Return the key of a pair of networks."""
    return f"{source} {target}" if source and target else ""


@dataclass(frozen=True)
class Section:
    """Section of a page for one result."""

    title: str  # title
    asked: str  # the question, as a sentence
    verdict: str  # the answer, as a sentence
    figures: Sequence[Figure] = ()
    pictures: Sequence[Picture] = ()  # images and samples
    tables: Mapping[str, Table] = field(default_factory=dict)  # title -> further numbers
    text: str = ""  # the result as text, for results without figures
    notes: Sequence[str] = ()  # remarks about values that are left out, undefined or thinned
    recipe: Mapping[str, Any] = field(default_factory=dict)  # record for reproducing it
    networks: str = ""  # key of the pair of networks (key_of)
    data: str | None = None  # fingerprint of the samples; None without samples, or if unknown
