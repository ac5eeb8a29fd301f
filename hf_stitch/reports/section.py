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

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class View:
    """One of the things that a figure can show."""

    label: str
    caption: str
    traces: Sequence[Trace]
    table: Table


@dataclass(frozen=True)
class Figure:
    """A figure that shows one of its views at a time."""

    views: Sequence[View]
    layout: Mapping[str, Any]
    start: tuple[int, int] = (0, 0)
    profiles: bool = False
    slider: str = ""


@dataclass(frozen=True)
class Picture:
    """A picture or a text with what it shows."""

    caption: str
    source: str
    text: str
    sample: bool = True


def key_of(source: str | None, target: str | None) -> str:
    """Return the key of a pair of networks."""
    return f"{source} {target}" if source and target else ""


@dataclass(frozen=True)
class Section:
    """A result on a page."""

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
