"""The JSON record of an artefact: read as a plain object, with known keys, and with no count that no network has.

A record may come from anyone, and every way to one leads through here (of configs, by ``StitchConfig.from_dict``).
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from hf_stitch.adapters import Cut, CutPlan, Interface
from hf_stitch.representation import RepresentationSpec

FORMAT = 2
"""The format that is written."""

AGAIN = "save or download it again"

COUNTS = ((re.compile(r"layers?$|depths?$|blocks?$|stages?$|repeats?$"), 10_000), (re.compile("num_labels$"), 10**6))
"""Numbers by which lists as long are made before any weight is looked at, and the most that any network has."""

FREE = ("id2label", "label2id", "recipe", "scores", "files", "manifest")
"""Keys under which anything may be called anything."""

HALF = frozenset(("blueprint", "why", "cut", "plan", "interface", "reference", "half_hash"))
"""Keys of ``source`` and ``target`` in a config."""


def read_record(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        path: The file.

    Raises:
        ValueError: If it is none.
    """
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no valid JSON ({error}); the folder is damaged: {AGAIN}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}; {AGAIN}")
    return values


def check_counts(value: Any, where: str, key: str = "") -> None:
    """Refuse a number of layers or classes that no network has.

    Args:
        value: JSON values.
        where: What holds them, for messages.
        key: Of the value in what holds it.

    Raises:
        ValueError: If there is one, at any depth.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            if name not in FREE:
                check_counts(item, where, name)
    elif isinstance(value, list):
        for item in value:
            check_counts(item, where, key)
    elif isinstance(value, (int, float)):
        for names, most in COUNTS:
            if value > most and names.search(key):
                raise ValueError(f"{where} is damaged: {key} is {value}, and no network has more than {most}; {AGAIN}")


def known(record: Mapping[str, Any], names: Iterable[str], where: str) -> dict[str, Any]:
    """The keys of a record that this version knows; a warning names the others.

    Args:
        record: JSON values.
        names: The keys that this version knows.
        where: What the record is, for messages.
    """
    names = set(names)
    unknown = sorted(set(record) - names)
    if unknown:
        warnings.warn(
            f"{where} has {', '.join(unknown)}, which this version does not know and does not use; it was probably "
            "written by a newer version",
            stacklevel=4,
        )
    return {key: value for key, value in record.items() if key in names}


def known_stitch(stitch: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The record of a stitching layer without unknown keys, but in its maps, which take none besides their own.

    Args:
        stitch: JSON values.
        where: What holds them, for messages.
    """
    values = known(stitch, ("source", "target", "pooling", "body", "prefix"), where)
    return values | {side: _fields_of(RepresentationSpec, values[side], where) for side in ("source", "target")}


def known_half(half: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The record of one half without unknown keys.

    Args:
        half: JSON values.
        where: What holds them, for messages.
    """
    values = known(half, HALF, where)
    cut = _fields_of(Cut, values["cut"], where)
    return values | {
        "cut": cut | {"spec": _fields_of(RepresentationSpec, cut["spec"], where)},
        "plan": _fields_of(CutPlan, values["plan"], where),
        "interface": _fields_of(Interface, values["interface"], where),
    }


def _fields_of(kind: Any, record: Mapping[str, Any], where: str) -> dict[str, Any]:
    return known(record, (field.name for field in fields(kind)), f"{kind.__name__.lower()} in the {where}")


def damaged(where: str | Path, error: BaseException) -> ValueError:
    """The error for a record from which nothing could be built.

    Args:
        where: What it is.
        error: What went wrong.
    """
    return ValueError(
        f"{where} is damaged or was written by another version ({type(error).__name__}: {error}); {AGAIN}"
    )
