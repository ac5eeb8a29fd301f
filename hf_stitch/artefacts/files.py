"""The files of an artefact: written, and read strictly.

What is read may come from anyone. No size that it names is believed before the headers of the weights agree, nothing is
unpickled, and names of files never come from a file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import Tensor, nn

from hf_stitch.artefacts.record import AGAIN

STITCHER, STITCH = "stitcher.json", "stitch.safetensors"
CONFIG = "config.json"
WEIGHTS, SHARDS, INDEX = "model.safetensors", "model*.safetensors", "model.safetensors.index.json"
ANCHORS = ("anchors.json", "anchors.safetensors")
"""Where anchors are, beside an artefact that has some."""

MODEL_FILES = [CONFIG, SHARDS, INDEX, *ANCHORS, "*.json", "*.txt", "*.model", "*.spm", "*.jinja"]
"""What a stitched model consists of on the Hub: the last few are of processors and of generation."""

STITCHER_FILES = [STITCHER, STITCH, CONFIG, *ANCHORS]
"""What a stitcher consists of on the Hub; a config tells that it is none."""


def save_weights(weights: Mapping[str, Tensor], folder: Path, max_shard_size: str | int) -> None:
    """Write weights as safetensors, in several files where they are large.

    Args:
        weights: By name; what shares memory is written twice.
        folder: Where to.
        max_shard_size: Size at which they are split.
    """
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


def save_beside(saves: Iterable[Any], folder: Path) -> None:
    """Save what lies beside the weights (processor, generation config): its files, and no subfolders.

    Args:
        saves: Each with ``save_pretrained``.
        folder: Where to.
    """
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        for each in saves:
            each.save_pretrained(fresh)
        for path in Path(fresh).iterdir():
            if path.is_file():
                path.rename(folder / path.name)


def load_strictly(model: nn.Module, files: list[Path]) -> None:
    """Load safetensors into a skeleton; names and shapes must agree exactly, dtypes are as saved.

    Headers are compared before a byte of a weight is read.

    Args:
        model: The skeleton.
        files: The files, which together hold each weight once.

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
