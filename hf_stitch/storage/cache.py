"""A store of tensors by key on disk, which several processes share and which stays below a size."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from hf_stitch.printing import warn
from hf_stitch.storage.files import UNFINISHED, is_abandoned, reading, remove
from hf_stitch.storage.tensors import read_tensors, write_tensors

if TYPE_CHECKING:
    from torch import Tensor

FOLDER, LIMIT = "HF_STITCH_CACHE", "HF_STITCH_CACHE_SIZE"
"""Environment variables: the folder of the cache, and its largest size."""

DEFAULT_LIMIT = "20GB"

ABANDONED = 3600.0
"""Seconds after which an unfinished file that nobody writes to is that of a process that was killed."""

KEY = re.compile(r"[0-9a-f]{64}")
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
SUFFIX = ".safetensors"


def default_folder() -> Path:
    """Return the folder of the cache: ``HF_STITCH_CACHE``, or ``hf-stitch`` in the cache folder of the user."""
    if chosen := os.environ.get(FOLDER):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hf-stitch"


def default_limit() -> int:
    """Return the largest size of the cache in bytes: ``HF_STITCH_CACHE_SIZE``, or 20 GB."""
    text = os.environ.get(LIMIT) or DEFAULT_LIMIT
    try:
        return bytes_of(text)
    except ValueError as error:
        raise ValueError(f"the environment variable {LIMIT}: {error}") from None


def bytes_of(size: str) -> int:
    """Read a size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", size.strip())
    unit = None if found is None else UNITS.get(found[2].upper())
    if found is None or unit is None:
        raise ValueError(f"a size must be a number with a unit, for example 5GB or 500MB, got {size!r}")
    return int(float(found[1]) * unit)


@dataclass(frozen=True)
class Entry:
    """An entry of a cache."""

    key: str
    size: int  # size of its file in bytes
    used: float  # when it was last read or written, in seconds since 1970
    path: Path  # its file

    @cached_property
    def about(self) -> dict[str, Any]:
        """What was written about it; empty if the file is gone or broken. Tensors are not read."""
        try:
            with reading([self.path]), safe_open(self.path, framework="np") as file:
                return dict(json.loads(file.metadata()["about"]))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):
            return {}


class Cache:
    """Tensors by key in the files of a folder.

    Threads and processes may read, write and remove entries at the same time. An entry is one safetensors file, which
    is written whole or not at all and verified when it is read: one that is broken is removed, with a warning. When
    the cache grows beyond its limit, the entries that have not been used for the longest time are removed. Tensors that
    were read stay valid, because they are mapped from a file that exists until they are gone.
    """

    def __init__(self, folder: Path | None = None, limit: int | None = None) -> None:
        self.folder = default_folder() if folder is None else folder.expanduser()
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"the cache must be a folder, got the file {self.folder}")
        self.limit = default_limit() if limit is None else limit

    def read(self, key: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Read an entry, and note that it was used.

        ``None`` if there is none, or, with a warning, if it cannot be read.
        """
        path = self._path(key)
        try:
            with contextlib.suppress(PermissionError):  # a folder that is shared, and may only be read
                os.utime(path)
            return read_tensors(path, key)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            warn(f"{path} could not be read ({error.strerror or error}); it is not used")
        except ValueError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            warn(f"{path} was broken ({error}) and has been removed from the cache")
        return None

    def write(self, key: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Write an entry, and remove those that have not been used for the longest time, down to the limit.

        An entry that is larger than the limit is not written, with a warning.
        """
        size = sum(tensor.nbytes for tensor in tensors.values())
        if size > self.limit:
            warn(
                f"an entry of {size:,} bytes was not cached, because the cache holds at most {self.limit:,} bytes: "
                f"set {LIMIT} to a larger size"
            )
            return
        write_tensors(self._path(key), key, tensors, about)
        self.shrink()

    def entries(self) -> list[Entry]:
        """List the entries, the last used one first."""
        found = []
        for path in self._files(SUFFIX):
            with contextlib.suppress(FileNotFoundError):  # removed by another process
                stat = path.stat()
                if not (path.is_file() or path.is_dir()):  # a pipe: reading it might never end
                    continue
                found.append(Entry(path.name.removesuffix(SUFFIX), stat.st_size, stat.st_mtime_ns / 1e9, path))
        return sorted(found, key=lambda entry: (-entry.used, entry.key))

    def remove(self, entries: Iterable[Entry]) -> list[Entry]:
        """Remove entries. Tensors that were read from them stay valid."""
        removed = []
        for entry in entries:
            with contextlib.suppress(OSError):  # gone before, or, on Windows, mapped
                entry.path.unlink()
                removed.append(entry)
        return removed

    def shrink(self, limit: int | None = None) -> list[Entry]:
        """Remove the entries that have not been used for the longest time, and what killed processes have left."""
        self.sweep()
        most, total, surplus = self.limit if limit is None else limit, 0, []
        for entry in self.entries():
            total += entry.size
            if total > most:
                surplus.append(entry)
        return self.remove(reversed(surplus))

    def sweep(self) -> None:
        """Remove what processes that were killed have left; of other machines, what nobody has written for an hour."""
        for path in self._files(UNFINISHED):
            with contextlib.suppress(OSError):
                written = max(each.stat().st_mtime for each in (path, *path.glob("*")))
                if is_abandoned(path) or time.time() - written > ABANDONED:
                    remove(path)

    def _path(self, key: str) -> Path:
        if not KEY.fullmatch(key):
            raise ValueError(f"a key must be 64 hexadecimal digits, got {key!r}")
        return self.folder / f"{key}{SUFFIX}"

    def _files(self, suffix: str) -> list[Path]:
        """List the files of this cache: those whose names begin with a key."""
        try:
            names = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        length = 64 + len(SUFFIX)
        ours = [name for name in names if KEY.fullmatch(name[:64]) and name[64:length] == SUFFIX]
        return [self.folder / name for name in ours if name.endswith(suffix)]
