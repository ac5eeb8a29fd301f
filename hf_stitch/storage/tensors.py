"""Tensors in a file with a digest, which is checked when they are read."""

from __future__ import annotations

import hashlib
import json
import mmap
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
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in stored.items()}
    metadata = {"about": text, "dtypes": json.dumps(dtypes), "digest": _digest(key, text, stored)}
    write_whole(path, lambda place: save_file(stored, place, metadata=metadata))


def read_tensors(path: Path, key: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Map a file of :func:`write_tensors` into memory; it is opened once, because it may be replaced meanwhile."""
    try:
        with reading([path]):
            return _read(path, key)
    except OSError:
        raise
    except Exception as error:  # whatever the libraries raise for bytes that are no such file
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _read(path: Path, key: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    import torch

    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    start = 8 + int.from_bytes(mapped[:8], "little")
    header = json.loads(mapped[8:start])
    metadata = header.pop("__metadata__")
    dtypes = json.loads(metadata["dtypes"])
    tensors = {}
    for name, form in header.items():
        first, last = form["data_offsets"]
        dtype = getattr(torch, dtypes[name])
        if first == last:
            tensors[name] = torch.empty(form["shape"], dtype=dtype)
        else:
            values = torch.frombuffer(mapped, dtype=torch.uint8, offset=start + first, count=last - first)
            tensors[name] = values.view(dtype).view(form["shape"])
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
