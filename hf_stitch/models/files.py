"""What both artefacts are on disk: a record in JSON and weights in safetensors, written and read strictly.

What is read may come from anyone. No size that it names is believed before the headers of the weights agree, nothing is
unpickled, names of files never come from a file, and a record that was changed since it was saved is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import Tensor, nn

from ..adapters import Cut, Interface, Plan
from ..endpoint import weights_hash
from ..relative import AnchorSet
from ..representation import Form
from .configuration import StitchConfig

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
SHARDS = "model*.safetensors"
CHECKSUM, HASH = "checksum", "weights_hash"
COUNTS = ((re.compile(r"layers?$|depths?$|blocks?$|stages?$|repeats?$"), 10_000), (re.compile("num_labels$"), 10**6))
"""Numbers by which lists as long are made before any weight is looked at, and the most that any network has."""

ANCHORS = ("anchors.json", "anchors.safetensors")
"""Where anchors are, beside an artefact that has some."""

AGAIN = "save or download it again"

HALF = frozenset(("blueprint", "why", "cut", "plan", "interface", "endpoint", "half_hash"))
"""Keys of ``source`` and ``target`` in a config."""


# -- writing -----------------------------------------------------------------------------------------------------------
def save_weights(weights: Mapping[str, Tensor], folder: Path, max_shard_size: str | int) -> None:
    """Write weights as safetensors, in several files where they are large."""
    save_torch_state_dict(
        _untied({name: tensor.contiguous() for name, tensor in weights.items()}), folder, max_shard_size=max_shard_size
    )


def _untied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every weight with memory of its own: what the parents tied must not be dropped when saving."""
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in weights.items():
        key = (tensor.device, tensor.untyped_storage().data_ptr())
        if tensor.numel() and key in seen:
            weights[name] = tensor.clone()
        seen.add(key)
    return weights


def write_record(values: Mapping[str, Any], path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a record as JSON, with the hash of the weights that it belongs to and a checksum of itself."""
    record = {**values, HASH: weights_hash(weights)}
    record[CHECKSUM] = _checksum(record)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _checksum(record: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in record.items() if key != CHECKSUM}
    return f"sha256:{hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}"


def save_anchors(anchors: AnchorSet | None, folder: Path) -> str | None:
    """Write anchors, if there are any, beside an artefact; returns what its record says of them."""
    if anchors is None:
        for name in ANCHORS:  # of what was saved here before
            (folder / name).unlink(missing_ok=True)
        return None
    anchors.save_pretrained(folder)
    return _digest(folder)


def _digest(folder: Path) -> str:
    return f"sha256:{hashlib.sha256(b''.join((folder / name).read_bytes() for name in ANCHORS)).hexdigest()}"


# -- reading -----------------------------------------------------------------------------------------------------------
def read_record(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: If it is none, or asks for an absurdly deep network.
    """
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no valid JSON ({error}); the folder is damaged: {AGAIN}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}; {AGAIN}")
    _check_counts(values, path)
    return values


def _check_counts(value: Any, path: Path, key: str = "") -> None:
    """Refuse a number of layers or classes that no network has."""
    if isinstance(value, dict):
        for name, item in value.items():
            _check_counts(item, path, name)
    elif isinstance(value, list):
        for item in value:
            _check_counts(item, path, key)
    elif isinstance(value, (int, float)):
        for names, most in COUNTS:
            if value > most and names.search(key):
                raise ValueError(f"{path} is damaged: {key} is {value}, and no network has more than {most}; {AGAIN}")


def read_config(folder: Path) -> StitchConfig:
    """The config in a folder; a warning names keys of a newer version.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged, or of another kind of model.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG}: it is no saved stitched model")
    values = read_record(path)
    if values.get("model_type") != StitchConfig.model_type:
        raise ValueError(f"{path} is the config of a {values.get('model_type')!r} model, not of a stitched one")
    try:
        known(values, StitchConfig().to_dict() | dict.fromkeys((CHECKSUM, HASH, "num_labels", "use_cache")), str(path))
        for side in ("source", "target"):
            if values.get(side):
                values[side] = _known_half(values[side], f"{side} of {path}")
        if values.get("stitch"):
            values["stitch"] = known_forms(values["stitch"], f"stitch of {path}")
        return StitchConfig.from_dict(values)
    except ValueError:
        raise
    except Exception as error:
        raise damaged(path, error) from error


def known(record: Mapping[str, Any], names: Iterable[str], where: str) -> dict[str, Any]:
    """The keys of a record that this version knows; a warning names the others."""
    names = set(names)
    unknown = sorted(set(record) - names)
    if unknown:
        warnings.warn(
            f"{where} has {', '.join(unknown)}, which this version does not know and does not use; it was probably "
            "written by a newer version",
            stacklevel=4,
        )
    return {key: value for key, value in record.items() if key in names}


def known_forms(stitch: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The record of a stitching layer without unknown keys, but in its maps, which take none besides their own."""
    values = known(stitch, ("source", "target", "rows", "body", "prefix"), where)
    return values | {side: _fields_of(Form, values[side], where) for side in ("source", "target")}


def _known_half(half: Mapping[str, Any], where: str) -> dict[str, Any]:
    values = known(half, HALF, where)
    cut = _fields_of(Cut, values["cut"], where)
    return values | {
        "cut": cut | {"form": _fields_of(Form, cut["form"], where)},
        "plan": _fields_of(Plan, values["plan"], where),
        "interface": _fields_of(Interface, values["interface"], where),
    }


def _fields_of(kind: Any, record: Mapping[str, Any], where: str) -> dict[str, Any]:
    return known(record, (field.name for field in fields(kind)), f"{kind.__name__.lower()} in the {where}")


def load_strictly(model: nn.Module, files: list[Path]) -> None:
    """Load safetensors into a skeleton; names and shapes must agree exactly, dtypes are as saved.

    Headers are compared before a byte of a weight is read.

    Raises:
        ValueError: If the skeleton and the files disagree, or a file is damaged.
    """
    expected = model.state_dict()
    state: dict[str, Tensor] = {}
    place: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 - not a mapping
                    if name in place:
                        raise ValueError(f"{file} and {place[name].name} both hold {name!r}; {AGAIN}")
                    place[name] = file
                    _check_header(file, name, expected.get(name), weights.get_slice(name))
        except ValueError:
            raise
        except Exception as error:
            raise _unreadable(file, error) from error
    missing = sorted(expected.keys() - place.keys())
    if missing:
        raise ValueError(
            f"{files[0].parent} lacks {len(missing)} weights that its config asks for: {', '.join(missing[:5])}"
        )
    for file in files:
        try:
            with safe_open(file, framework="pt") as weights:
                # A copy: in place in the file, memory is aligned by chance, and convolutions round by alignment.
                state |= {name: weights.get_tensor(name).clone() for name in weights.keys()}  # noqa: SIM118
        except Exception as error:
            raise _unreadable(file, error) from error
    model.load_state_dict(state, strict=True, assign=True)


def load_anchors(record: str | None, folder: Path) -> AnchorSet | None:
    """The anchors beside an artefact whose record tells of some.

    Raises:
        FileNotFoundError: If they are missing.
        ValueError: If they are damaged, or not those of the record.
    """
    if record is None:
        return None
    anchors = AnchorSet.from_pretrained(folder)
    if _digest(folder) != record:
        raise ValueError(f"the anchors in {folder} are not those that it was saved with, or are damaged; {AGAIN}")
    return anchors


def _check_header(file: Path, name: str, expected: Tensor | None, header: Any) -> None:
    shape, dtype = tuple(header.get_shape()), header.get_dtype()
    if expected is None or tuple(expected.shape) != shape:
        want = "no such weight" if expected is None else f"shape {tuple(expected.shape)}"
        raise ValueError(f"{file} and its config disagree about {name!r}: expected {want}, found shape {shape}")
    if expected.is_floating_point() != dtype.startswith(("F", "BF")):
        raise ValueError(
            f"{file} and its config disagree about {name!r}: expected {expected.dtype}, found {dtype}; {AGAIN}"
        )


def _unreadable(file: Path, error: Exception) -> ValueError:
    return ValueError(f"{file} cannot be read ({error}); the file is damaged or incomplete: {AGAIN}")


def check_unchanged(path: Path, model: nn.Module) -> None:
    """Make sure that a record and the weights that were loaded by it are those that were saved.

    Raises:
        ValueError: If either has changed since.
    """
    record = read_record(path)
    if HASH in record and (found := weights_hash(model)) != record[HASH]:
        raise ValueError(
            f"the weights beside {path} are not those that it was saved with (hash {found}, expected {record[HASH]}): "
            f"they are damaged or of another model; {AGAIN}"
        )
    if CHECKSUM in record and _checksum(record) != record[CHECKSUM]:
        raise ValueError(
            f"{path} was changed since it was saved, or is damaged; {AGAIN}, or, if you changed it and mean it, remove "
            f"its {CHECKSUM!r}"
        )


def damaged(path: Path, error: BaseException) -> ValueError:
    """The error for a record from which nothing could be built."""
    return ValueError(f"{path} is damaged or was written by another version ({type(error).__name__}: {error}); {AGAIN}")
