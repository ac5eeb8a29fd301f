"""Reading the JSON record of an artefact: JSON objects, known keys, plausible numbers of layers and classes.

A record may be untrusted, so all records are read by these functions (configs by ``StitchConfig.from_dict``).
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
"""The record format that this version writes."""

AGAIN = "save or download it again"

LAYERS = re.compile(r"(layers?|depths?|blocks?|stages?|repeats?|levels?|groups?|group_num|n_points)$")
MOST, FEW = 1_000, 256
"""Keys of numbers of layers; the largest number; and the largest that needs no tensor in the files for each layer."""

LABELS, MOST_LABELS = re.compile("(num_labels|num_classes)$"), 2**17
"""Keys of numbers of classes, which determine the length of lists of names, and the largest number."""

FREE = ("id2label", "label2id", "recipe", "scores", "files", "manifest")
"""Keys whose values are not checked, because their own keys are arbitrary."""

HALF = frozenset(("blueprint", "why", "cut", "plan", "interface", "reference", "half_hash"))
"""Keys of ``source`` and ``target`` in a config."""


def read_record(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file.

    Args:
        path: The file.

    Returns:
        The object.

    Raises:
        ValueError: If the file is not valid JSON, or contains no object.
    """
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); the folder is damaged: {AGAIN}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must contain a JSON object, got {type(values).__name__}; {AGAIN}")
    return values


def check_counts(value: Any, where: str, key: str = "", layers: int = MOST) -> None:
    """Check that no number of layers or classes is larger than in any network.

    Other sizes need no bound: a network is built without memory, and within a limited time (``skeleton.py``).

    Args:
        value: JSON values.
        where: Name of the file or object, for messages.
        key: Key of the value in its parent.
        layers: The largest number of layers.

    Raises:
        ValueError: If a number at any depth is too large.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            if name not in FREE:
                check_counts(item, where, name, layers)
    elif isinstance(value, list):
        for item in value:
            check_counts(item, where, key, layers)
    elif isinstance(value, (int, float)):
        for names, most in ((LAYERS, layers), (LABELS, MOST_LABELS)):
            if value > most and names.search(key):
                raise ValueError(
                    f"{where} is damaged: {key} is {value}, and no network with such weights has more than {most}; "
                    f"{AGAIN}"
                )


def known(record: Mapping[str, Any], names: Iterable[str], where: str) -> dict[str, Any]:
    """Drop unknown keys of a record, with a warning that names them.

    Args:
        record: JSON values.
        names: The known keys.
        where: Name of the record, for messages.

    Returns:
        The items with known keys.
    """
    names = set(names)
    unknown = sorted(set(record) - names)
    if unknown:
        warnings.warn(
            f"{where} has {', '.join(unknown)}, which this version does not know and ignores; it was probably written "
            "by a newer version",
            stacklevel=4,
        )
    return {key: value for key, value in record.items() if key in names}


def known_stitch(stitch: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Drop unknown keys of the record of a stitching layer, except in its maps, which reject unknown options.

    Args:
        stitch: JSON values.
        where: Name of the record, for messages.

    Returns:
        The record with known keys.
    """
    values = known(stitch, ("source", "target", "pooling", "body", "prefix"), where)
    return values | {side: _fields_of(RepresentationSpec, values[side], where) for side in ("source", "target")}


def known_half(half: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Drop unknown keys of the record of one half.

    Args:
        half: JSON values.
        where: Name of the record, for messages.

    Returns:
        The record with known keys.
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
    """Create the error for a record from which no artefact could be built.

    Args:
        where: Name of the record.
        error: The original error.

    Returns:
        The error to raise.
    """
    return ValueError(
        f"{where} is damaged or was written by another version ({type(error).__name__}: {error}); {AGAIN}"
    )
