"""Conversion of records in earlier formats, one step per format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_stitch.artefacts.record import FORMAT, NEWEST
from hf_stitch.registry import registries
from hf_stitch.representation import pooling_from_1
from hf_stitch.tasks.classification import MULTI_LABEL, REGRESSION
from hf_stitch.tasks.kinds import task_named

TASKS = {
    "StitchedModel": None,
    "StitchedModelForImageClassification": "image-classification",
    "StitchedModelForSequenceClassification": "text-classification",
    "StitchedModelForCausalLM": "text-generation",
}
"""Class -> task; records of stitched models in format 1 contain the class only."""


def migrated(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert a record of any earlier format to the current one."""
    found = record.get("format_version", record.get("format", 1))
    if found == 1:
        return _with_task_of_head(_from_1(record))
    if found not in (FORMAT, NEWEST):
        raise ValueError(
            f"{where} has format {found!r}, and this version reads 1 to {NEWEST}; update hf-stitch to read it"
        )
    return _with_task_of_head(dict(record))


def _with_task_of_head(values: dict[str, Any]) -> dict[str, Any]:
    """Name the task of a head for numbers or several classes, which versions up to 0.2 recorded as classification.

    Their scores are dropped: they are accuracies of a head that has none.
    """
    task = task_named(values["task"]) if values.get("task") in registries.tasks else None
    if task is None or not task.classifies:
        return values
    outputs = len(values.get("id2label") or ()) or values.get("num_labels")
    if values.get("problem_type") == MULTI_LABEL:
        found = "multi-label-classification"
    elif values.get("problem_type") == REGRESSION or outputs == 1:
        found = "regression"
    else:
        return values
    recipe = values.get("recipe")
    if isinstance(recipe, Mapping):
        recipe = {key: value for key, value in recipe.items() if key != "audit"}
    return {**values, "task": found, "scores": None, "recipe": recipe}


def _from_1(record: Mapping[str, Any]) -> dict[str, Any]:
    """Convert from format 1, written by version 0.1.0."""
    values = {key: value for key, value in record.items() if key not in ("format", "weights_hash", "anchors", "files")}
    values["format_version"] = FORMAT
    if "task" not in values:
        named = record.get("architectures") or ["StitchedModel"]
        values["task"] = TASKS.get(str(named[0] if isinstance(named, list) else named))
    steps = {"source": _half_from_1, "target": _half_from_1, "stitch": _stitch_from_1, "recipe": _recipe_from_1}
    for key, step in steps.items():
        if isinstance(values.get(key), Mapping):
            values[key] = step(values[key])
    if isinstance(values.get("scores"), Mapping):
        values["scores"] = _scores_from_1(values["scores"])
    return values


def _half_from_1(half: Mapping[str, Any]) -> dict[str, Any]:
    values = _renamed(half, {"endpoint": "reference"})
    if isinstance(values.get("cut"), Mapping):
        values["cut"] = _renamed(values["cut"], {"form": "spec"})
    return values


def _stitch_from_1(stitch: Mapping[str, Any]) -> dict[str, Any]:
    maps = {part: _renamed(stitch[part], {"type": "name"}) for part in ("body", "prefix") if stitch.get(part)}
    return {**pooling_from_1(stitch), **maps}


def _recipe_from_1(recipe: Mapping[str, Any]) -> dict[str, Any]:
    values = _renamed(pooling_from_1(recipe), {"target_data": "paired_data", "parallel": "paired_anchors"})
    if isinstance(values.get("matcher"), Mapping) and values["matcher"].get("name") == "task_loss":
        values["matcher"] = _renamed(values["matcher"], {"clip": "max_grad_norm", "steps": "max_steps"})
    if isinstance(values.get("space"), Mapping):
        values["space"] = _renamed(pooling_from_1(values["space"]), {"endpoint": "reference"})
    return values


def _scores_from_1(scores: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(scores)
    if isinstance(values.get("scores"), Mapping):
        values["scores"] = _renamed(values["scores"], {"mean only": "mean_only"})
    return values


def _renamed(record: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Rename keys of a record; the order is kept."""
    return {names.get(key, key): value for key, value in record.items()}
