"""Tensors in a file with a digest, which is checked when they are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_stitch.storage.files import reading, write_whole

if TYPE_CHECKING:
    from torch import Tensor


def write_tensors(path: Path, key: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a safetensors file, atomically."""
    from safetensors.torch import save_file

    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(about)
    metadata = {"about": text, "digest": _digest(key, text, stored)}
    write_whole(path, lambda place: save_file(stored, place, metadata=metadata))


def read_tensors(path: Path, key: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Map a file of :func:`write_tensors` into memory; the tensors may be changed, and outlive it."""
    try:
        with reading([path]):
            return _read(path, key)
    except OSError:
        raise
    except Exception as error:  # whatever the libraries raise for bytes that are no such file
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _read(path: Path, key: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if metadata["digest"] != _digest(key, metadata["about"], tensors):
        raise ValueError("its contents do not have the digest that was written with them")
    return tensors, json.loads(metadata["about"])


def _digest(key: str, about: str, tensors: Mapping[str, Tensor]) -> str:
    import torch

    found = hashlib.sha256(f"{key}{about}".encode())
    for name in sorted(tensors):
        value = tensors[name]
        found.update(repr((name, str(value.dtype), tuple(value.shape))).encode())
        found.update(value.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
