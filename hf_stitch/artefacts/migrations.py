"""Records of earlier formats in the words of this one: one step for each format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_stitch.artefacts.record import FORMAT

TASKS = {
    "StitchedModel": None,
    "StitchedModelForImageClassification": "image-classification",
    "StitchedModelForSequenceClassification": "text-classification",
    "StitchedModelForCausalLM": "text-generation",
}
"""In format 1 the class of a stitched model told its task."""


def migrated(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A record of any format as the one that this version writes.

    Args:
        record: Of a stitcher or of a stitched model, as it was read.
        where: What it is, for messages.

    Raises:
        ValueError: If its format is newer than this version, or none.
    """
    found = record.get("format_version", record.get("format", 1))
    if found == 1:
        return _from_1(record)
    if found != FORMAT:
        raise ValueError(
            f"{where} has format {found!r}, and this version reads 1 to {FORMAT}; a newer version may read it"
        )
    return dict(record)


def _from_1(record: Mapping[str, Any]) -> dict[str, Any]:
    """Format 1, of version 0.1.0."""
    values = {key: value for key, value in record.items() if key not in ("format", "weights_hash", "anchors", "files")}
    values["format_version"] = FORMAT
    if "task" not in values:
        named = record.get("architectures") or ["StitchedModel"]
        values["task"] = TASKS.get(str(named[0] if isinstance(named, list) else named))
    if isinstance(stitch := values.get("stitch"), Mapping):
        maps = {part: _map_from_1(stitch[part]) for part in ("body", "prefix") if isinstance(stitch.get(part), Mapping)}
        values["stitch"] = {**stitch, **maps}
    return values


def _map_from_1(stitch: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a map, whose name was its type."""
    return {"name" if key == "type" else key: value for key, value in stitch.items()}
