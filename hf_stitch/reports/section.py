"""The parts of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Trace = dict[str, Any]
"""A trace of Plotly as JSON values; texts are escaped."""


@dataclass(frozen=True)
class Table:
    """Numbers as text, which everybody can read, copy and hear."""

    columns: Sequence[str]  # titles of the columns
    rows: Sequence[Sequence[str]]  # cells


@dataclass(frozen=True)
class View:
    """One of the things that a figure can show."""

    label: str  # its name in the list of views
    caption: str  # the finding, in one sentence
    traces: Sequence[Trace]  # traces of Plotly
    table: Table  # the numbers


@dataclass(frozen=True)
class Figure:
    """A figure that shows one of its views at a time."""

    views: Sequence[View]
    layout: Mapping[str, Any]  # layout of Plotly
    start: tuple[int, int] = (0, 0)  # row and column of the cell that is chosen at first
    profiles: bool = False  # whether a click on a cell of a heat map shows its row and its column
    slider: str = ""  # what a slider over the views stands for; empty for a list
    first: int = 0  # place of the view that is shown first


@dataclass(frozen=True)
class Picture:
    """A picture or a text with what it shows."""

    caption: str  # what it shows
    source: str  # a picture as data: address; empty for a text
    text: str  # the text, or the text alternative of the picture
    sample: bool = True  # whether it is a sample, all of which are shown in the same size


def key_of(source: str | None, target: str | None) -> str:
    """Return the key of a pair of networks."""
    return f"{source} {target}" if source and target else ""


@dataclass(frozen=True)
class Section:
    """A result on a page."""

    title: str  # what it is
    asked: str  # what was asked, in a sentence
    verdict: str  # what came out, in a sentence
    figures: Sequence[Figure] = ()
    pictures: Sequence[Picture] = ()  # pictures and samples
    tables: Mapping[str, Table] = field(default_factory=dict)  # title -> further numbers
    text: str = ""  # the result as text, for results without figures
    notes: Sequence[str] = ()  # further remarks: what is left out, undefined or thinned
    recipe: Mapping[str, Any] = field(default_factory=dict)  # record for reproducing it
    networks: str = ""  # key of the pair of networks (key_of)
    data: str | None = None  # fingerprint of the samples; None if there are none, or they are unknown
