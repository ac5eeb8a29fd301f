"""What both artefacts are on disk: a record in JSON and weights in safetensors, written and read strictly.

What is read may come from anyone. No size that it names is believed before the headers of the weights agree, nothing is
unpickled, names of files never come from a file, and a record that was changed since it was saved is refused.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import Tensor, nn

from hf_stitch.artefacts.configuration import StitchConfig
from hf_stitch.artefacts.record import AGAIN, CHECKSUM, HASH, read_record
from hf_stitch.reference import weights_hash
from hf_stitch.relative import AnchorSet

STITCHER, STITCH = "stitcher.json", "stitch.safetensors"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
SHARDS = "model*.safetensors"
ANCHORS = ("anchors.json", "anchors.safetensors")
"""Where anchors are, beside an artefact that has some."""


INDEX = "model.safetensors.index.json"
FILES = [CONFIG, SHARDS, INDEX, *ANCHORS, "*.json", "*.txt", "*.model", "*.spm", "*.jinja"]
"""What a stitched model consists of on the Hub: the last few are of processors and of generation."""


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
    return _digest(folder, ANCHORS)


def save_beside(saves: Iterable[Any], folder: Path) -> dict[str, str]:
    """Save what lies beside the weights (processor, generation config).

    Returns:
        What the record says of each file that was written.
    """
    with tempfile.TemporaryDirectory() as fresh:  # in which nothing else is
        for each in saves:
            each.save_pretrained(fresh)
        written = sorted(path.name for path in Path(fresh).iterdir() if path.is_file())
        shutil.copytree(fresh, folder, dirs_exist_ok=True)
    return {name: _digest(folder, [name]) for name in written}


def _digest(folder: Path, names: Iterable[str]) -> str:
    return f"sha256:{hashlib.sha256(b''.join((folder / name).read_bytes() for name in names)).hexdigest()}"


# -- reading -----------------------------------------------------------------------------------------------------------
def read_config(folder: Path) -> StitchConfig:
    """The config in a folder; a warning names keys of a newer version.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged, or of another kind of model.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {CONFIG}: "
            + (
                "it holds a stitcher, which hf_stitch.Stitcher.from_pretrained loads"
                if (folder / STITCHER).is_file()
                else "it is no saved stitched model"
            )
        )
    values = read_record(path)
    if values.get("model_type") != StitchConfig.model_type:
        raise ValueError(f"{path} is the config of a {values.get('model_type')!r} model, not of a stitched one")
    config: StitchConfig = StitchConfig.from_dict(values, name_or_path=str(folder))
    return config


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
    if _digest(folder, ANCHORS) != record:
        raise ValueError(f"the anchors in {folder} are not those that it was saved with, or are damaged; {AGAIN}")
    return anchors


def check_beside(record: Mapping[str, str] | None, folder: Path) -> None:
    """Make sure that the files of the processor and of generation are those that were saved; old records name none.

    Raises:
        FileNotFoundError: If one is missing.
        ValueError: If one is another.
    """
    there = {path.name for path in folder.iterdir()}  # no name of a record is opened that is not one of these
    for name, digest in (record or {}).items():
        if name not in there:
            raise FileNotFoundError(f"{folder} has no {name}, which was saved with it; {AGAIN}")
        if _digest(folder, [name]) != digest:
            raise ValueError(
                f"{folder / name} was changed since it was saved, or is damaged; {AGAIN}, or, if you changed it and "
                f"mean it, remove it from the 'files' in {CONFIG}, and the {CHECKSUM!r} there"
            )


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
