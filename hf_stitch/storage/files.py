"""Atomic writing of files, and their digests."""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import re
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from hf_stitch.printing import make_visible


def write_whole(path: Path, write: Callable[[Path], object], *, sync: bool = False) -> None:
    """Write a file atomically.

    A process that is killed and a full disk leave the old file. Of several processes or threads that write at the same
    time, the last one wins.

    ``write`` gets a path of the same name in a temporary folder. ``sync`` waits for the disk, so that the file also
    survives a power failure.
    """
    with readable_errors(f"{path} could not be written", KEPT):
        with written_aside(path) as fresh:
            write(fresh)
            if sync:
                flush(fresh)
        if sync:
            flush(path.parent)


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Write a file or a folder of files beside its place, which it takes at the end, with modes after the umask.

    What processes of this machine that were killed have left of it is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent, glob.escape(path.name))
    aside = path.with_name(f"{path.name}.{_MACHINE}.{os.getpid()}.{threading.get_ident()}{UNFINISHED}")
    remove(aside)  # of an earlier process with this number
    try:
        aside.mkdir()
        fresh = aside / path.name
        yield fresh
        follow_umask(aside)
        if fresh.is_dir() and path.is_dir():
            path.rmdir()
        fresh.replace(path)
    finally:
        remove(aside)


KEPT = "what was there before is unchanged"
UNFINISHED = ".unfinished"
"""End of the names of temporary folders: of ``<name>.<machine>.<process>.<thread>.unfinished``."""
_MACHINE = re.sub(r"\W", "", socket.gethostname())


def is_abandoned(path: Path) -> bool:
    """Whether a temporary file or folder is that of a process of this machine that was killed."""
    machine, process, _ = ["", "", "", *path.name.removesuffix(UNFINISHED).split(".")][-3:]
    return machine == _MACHINE and process.isdigit() and not psutil.pid_exists(int(process))


def sweep(folder: Path, name: str = "*") -> None:
    """Remove what processes of this machine that were killed have left in a folder."""
    for left in folder.glob(f"{name}.*{UNFINISHED}"):
        if is_abandoned(left):
            remove(left)


def remove(path: Path) -> None:
    """Remove a temporary file or folder, as far as possible."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink(missing_ok=True)


def follow_umask(folder: Path) -> None:
    """Give all files in a folder that was made with :meth:`Path.mkdir` the modes that the umask asks for.

    Some libraries, safetensors among them, write files that their owner alone may read.
    """
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode)


@contextmanager
def reading(files: Iterable[Path]) -> Iterator[None]:
    """Read files from elsewhere: pipes and devices are refused, and files that this user may not read are named."""
    there = []
    for path in files:
        with suppress(FileNotFoundError):  # other threads and processes may delete it meanwhile
            mode = path.stat().st_mode
            there.append(path)
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise ValueError(f"{path} is a pipe, a socket or a device, and only regular files are read; delete it")
    try:
        yield
    except Exception as error:
        make_visible(error)
        gone = getattr(error, "errno", None) == errno.ENOENT  # safetensors raises it without a number for closed files
        if closed := [str(path) for path in there if not gone and not os.access(path, os.R_OK) and path.is_file()]:
            raise PermissionError(
                f"{', '.join(closed)}: permission denied ({error}); ask the owner to let you read it (chmod a+r)"
            ) from error
        raise


@contextmanager
def decoding(path: str | Path) -> Iterator[None]:
    """Name a file or a folder from elsewhere in every error about its content."""
    try:
        with reading([Path(path)]):
            yield
    except ImportError:
        raise
    except (ValueError, OSError) as error:
        if str(path) in str(error):
            raise
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"{path} cannot be read: {error}") from error
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def digest(*paths: Path) -> str:
    """Compute a digest of files."""
    found = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(2**20):
                found.update(block)
    return f"sha256:{found.hexdigest()}"


def flush(*paths: Path) -> None:
    """Wait until the disk contains files, and the names in folders."""
    for path in paths:
        if path.is_dir() and os.name == "nt":  # Windows opens no folders
            continue
        opened = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


@contextmanager
def readable_errors(failure: str, remedy: str) -> Iterator[None]:
    """Raise :class:`OSError` with an explanation for every error of the operating system, also those of libraries."""
    try:
        yield
    except Exception as error:
        signs = "os error", "IoError(Os"  # as safetensors and tokenizers write it, and older safetensors
        if not isinstance(error, OSError) and not any(sign in str(error) for sign in signs):
            raise
        kind = PermissionError if isinstance(error, PermissionError) else OSError
        readable = kind(f"{failure} ({getattr(error, 'strerror', None) or error}); {remedy}")
        readable.errno = getattr(error, "errno", None)
        raise readable from error
