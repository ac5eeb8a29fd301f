"""Damaged folders of models and of stitchers are refused, and the error names what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_stitch
from hf_stitch import StitchedModel, Stitcher

from records import reweigh, rewrite, truncate  # isort: skip

RECORD = {"model": "config.json", "stitcher": "stitcher.json"}
WEIGHTS = {"model": "model.safetensors", "stitcher": "stitch.safetensors"}
LOAD: dict[str, Callable[..., Any]] = {"model": StitchedModel.from_pretrained, "stitcher": Stitcher.from_pretrained}


def record(change: Callable[[dict[str, Any]], object]) -> tuple[dict[str, str], Callable[[Path], object]]:
    return RECORD, partial(rewrite, change=change)


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> tuple[dict[str, str], Callable[[Path], object]]:
    return WEIGHTS, partial(reweigh, change=change)


def bias(found: dict[str, torch.Tensor]) -> str:
    return next(name for name in found if name.endswith("body.bias"))


Damage = tuple[dict[str, str], Callable[[Path], object], str]
ALL: dict[str, Damage] = {
    "no record": (RECORD, Path.unlink, "contains neither stitcher.json nor config.json: it is not a stitcher or st"),
    "no weights": (WEIGHTS, Path.unlink, r"does not contain \w+\.safetensors: "),
    "no JSON": (RECORD, partial(truncate, size=80), r"\.json is not valid JSON"),
    "no object": (RECORD, lambda path: path.write_text("[]"), "must contain a JSON object, got list"),
    "newer format": (*record(lambda c: c.update(format_version=4)), "has format 4, but this version reads 2 to 3"),
    "unknown map": (
        *record(lambda c: c["stitch"]["body"].update(name="liner")),
        "requires a method that is not installed: no 'liner' among stitches; did you mean 'linear'",
    ),
    "other width": (*record(lambda c: c["stitch"]["body"].update(in_features=7)), "must map 24 -> 32, got 7 -> 32"),
    "truncated": (WEIGHTS, partial(truncate, size=500), "cannot be read .* damaged or incomplete"),
    "empty": (WEIGHTS, partial(truncate, size=0), "cannot be read .* damaged or incomplete"),
    "no safetensors": (WEIGHTS, lambda path: path.write_bytes(b"x" * 100), r"\.safetensors cannot be read"),
    "a huge header": (WEIGHTS, lambda path: path.write_bytes((2**60).to_bytes(8, "little")), "cannot be read"),
    "no weight at all": (*weights(lambda w: w.clear()), r"lacks \d+ weights"),
    "a weight missing": (*weights(lambda w: w.pop(bias(w))), r"lacks 1 weights .*body\.bias"),
    "a weight too many": (
        *weights(lambda w: w.update(more=torch.zeros(1))),
        "disagree about 'more': expected no such weight",
    ),
    "another shape": (
        *weights(lambda w: w.update({bias(w): torch.zeros(3)})),
        r"body\.bias': expected shape \(32,\), got shape \(3,\)",
    ),
}
OF_MODELS: dict[str, Damage] = {
    "another model": (*record(lambda c: c.update(model_type="bert")), "config of a 'bert' model, not of a stitched"),
    "unknown task": (*record(lambda c: c.update(task="tts")), "no 'tts' among tasks"),
    "no half": (*record(lambda c: c.update(source=None)), "does not describe a stitched model"),
    "no cut": (
        *record(lambda c: c["source"].pop("cut")),
        "config.json of .* is damaged: source must be an object with cut",
    ),
    "unknown layer": (
        *record(lambda c: c["source"]["cut"].update(layer="layer9")),
        "config.json is damaged .*layer9",
    ),
}
OF_STITCHERS: dict[str, Damage] = {
    "no layer": (
        *record(lambda c: c["source"].pop("layer")),
        "stitcher.json is damaged: source must be an object with layer",
    ),
}
CASES = [("model", each) for each in ALL | OF_MODELS] + [("stitcher", each) for each in ALL | OF_STITCHERS]


@pytest.mark.parametrize(("kind", "damage"), CASES)
def test_a_damaged_folder_is_refused(kind: str, damage: str, saved: Path, saved_stitcher: Path) -> None:
    folder = saved if kind == "model" else saved_stitcher
    files, harm, message = (ALL | OF_MODELS | OF_STITCHERS)[damage]
    harm(folder / files[kind])
    with pytest.raises((ValueError, FileNotFoundError), match=f"(?s){message}"):
        LOAD[kind](folder)


def test_a_missing_shard_is_refused(cnn_vit: StitchedModel, tmp_path: Path) -> None:
    cnn_vit.save_pretrained(tmp_path, max_shard_size="100KB")
    sorted(tmp_path.glob("model-*.safetensors"))[1].unlink()
    with pytest.raises(ValueError, match=r"lacks \d+ weights"):
        StitchedModel.from_pretrained(tmp_path)


def test_an_empty_config_is_refused() -> None:
    with pytest.raises(ValueError, match="this config does not describe a stitched model"):
        StitchedModel(hf_stitch.StitchConfig())
