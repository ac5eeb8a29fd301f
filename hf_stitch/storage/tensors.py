"""Tensors in files: with a digest that is checked on reading, or as memory-mapped rows."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_stitch.storage.files import reading, write_whole


def write_tensors(path: Path, key: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a safetensors file with a digest, atomically."""
    cpu_tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(about)
    metadata = {"about": text, "digest": _digest(key, text, cpu_tensors)}
    write_whole(path, lambda temporary: save_file(cpu_tensors, temporary, metadata=metadata))


def read_tensors(path: Path, key: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file of :func:`write_tensors`; its tensors may be changed and outlive the file."""
    try:
        with reading([path]):
            return _read(path, key)
    except OSError:
        raise
    except Exception as error:  # the libraries raise many types of errors for damaged files
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _read(path: Path, key: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if metadata["digest"] != _digest(key, metadata["about"], tensors):
        raise ValueError("its contents do not match its digest")
    return tensors, json.loads(metadata["about"])


def _digest(key: str, about: str, tensors: Mapping[str, Tensor]) -> str:
    sha256 = hashlib.sha256(f"{key}{about}".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha256.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        sha256.update(tensor.flatten().view(torch.uint8).numpy().data)
    return sha256.hexdigest()


class RowStore:
    """Append-only file with one tensor per sample, memory-mapped for reading.

    Samples of equal shape are stored as one row each. Samples of different lengths, for example texts, are stored
    without padding, one row per unmasked position; :meth:`read` pads them on the right.
    """

    def __init__(self, path: Path, *, resume: int = 0, like: Tensor | None = None) -> None:
        self.path = path
        self._lengths: list[Tensor] = []
        self._ragged = False
        self._like = torch.empty(0) if like is None else like[:0].cpu()
        self._mapped: Tensor | None = None
        self._hash: Any = None  # created on demand: stores are sent to other processes, and hashes cannot be pickled
        self._hashed = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        size = resume * self._like[:0].new_empty(1, *self._like.shape[1:]).nbytes
        if path.stat().st_size < size:
            raise ValueError(f"{path} has fewer rows than the {resume} of the saved state")
        os.truncate(path, size)
        if resume:
            self._lengths.append(torch.ones(resume, dtype=torch.long))

    def __len__(self) -> int:
        """Return the number of rows in the file."""
        return int(sum(lengths.sum() for lengths in self._lengths))

    def digest(self) -> Tensor:
        """Compute the SHA-256 of the rows in the file; only rows added since the last call are read."""
        self._hash = self._hash or hashlib.sha256()
        with self.path.open("rb") as file:
            file.seek(self._hashed)
            while block := file.read(2**20):
                self._hash.update(block)
            self._hashed = file.tell()
        return torch.tensor(list(self._hash.digest()), dtype=torch.uint8)

    def append(self, values: Tensor, mask: Tensor | None = None) -> None:
        """Append a batch of samples."""
        if mask is None:
            rows, lengths = values, torch.ones(len(values), dtype=torch.long)
        else:
            self._ragged = True
            rows, lengths = values[mask], mask.sum(1).cpu()
        self._lengths.append(lengths)
        self._like = rows[:0].cpu()
        self._mapped = None
        with self.path.open("ab") as file:
            file.write(rows.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)

    def rows(self) -> Tensor:
        """Return all rows, memory-mapped."""
        if self._mapped is None:
            shape = torch.Size((len(self), *self._like.shape[1:]))
            flat = torch.from_file(str(self.path), False, shape.numel(), dtype=self._like.dtype)
            self._mapped = flat.view(shape)
        return self._mapped

    def read(self, indexes: Tensor) -> tuple[Tensor, Tensor | None]:
        """Read samples by index.

        Samples of different lengths are padded with zeros on the right and returned with the mask ``(n, tokens)``.
        """
        rows = self.rows()
        if not self._ragged:
            return rows[indexes], None
        lengths = torch.cat(self._lengths)
        starts = lengths.cumsum(0) - lengths
        samples = [rows[start : start + n] for start, n in zip(starts[indexes], lengths[indexes], strict=True)]
        mask = torch.arange(int(lengths[indexes].max())) < lengths[indexes][:, None]
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True), mask
