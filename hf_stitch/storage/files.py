"""Atomic writing of files, and their digests."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]


def write_whole(path: Path, write: Callable[[Path], object], *, sync: bool = False) -> None:
    """Write a file atomically.

    A process that is killed and a full disk leave the old file. Of several processes or threads that write at the same
    time, the last one wins.

    Args:
        path: The file. An existing file is replaced; missing folders are created.
        write: Function that writes the content to the path that it receives, a temporary file in the same folder.
        sync: Whether to wait until the disk contains the file, so that it also survives a power failure.

    Raises:
        OSError: If the file cannot be written; the message contains path and reason.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "new" / "values.txt"
        ...     write_whole(path, lambda temporary: temporary.write_text("0.5"))
        ...     path.read_text()
        '0.5'
    """
    with readable_errors(f"{path} could not be written", KEPT):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path)
        unfinished = path.with_name(f"{path.name}.{_MACHINE}.{os.getpid()}.{threading.get_ident()}.unfinished")
        try:
            write(unfinished)
            if sync:
                flush(unfinished)
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        if sync:
            flush(path.parent)


KEPT = "what was there before is unchanged"
_MACHINE = re.sub(r"\W", "", socket.gethostname())


def _remove_abandoned(path: Path) -> None:
    """Remove what processes of this machine that were killed have left of a file."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.{_MACHINE}.*.unfinished"):
        process = left.name.removeprefix(f"{path.name}.{_MACHINE}.").split(".")[0]
        if process.isdigit() and not psutil.pid_exists(int(process)):
            left.unlink(missing_ok=True)


def digest(*paths: Path) -> str:
    """Compute a digest of files.

    Args:
        *paths: The files.

    Returns:
        The SHA-256 of their concatenated bytes, as ``sha256:…``.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "values.txt"
        ...     _ = path.write_text("0.5")
        ...     digest(path)[:15]
        'sha256:d2cbad71'
    """
    found = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(2**20):
                found.update(block)
    return f"sha256:{found.hexdigest()}"


def flush(*paths: Path) -> None:
    """Wait until the disk contains files, and the names in folders.

    Args:
        *paths: Files and folders.

    Raises:
        OSError: If the disk reports an error.

    Example:
        >>> flush(Path("."))
    """
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
    """Raise :class:`OSError` with an explanation for every error of the operating system, also those of libraries.

    Args:
        failure: What could not be done, with the path.
        remedy: What is left, or what to do.

    Yields:
        Nothing.

    Raises:
        OSError: ``failure``, the reason, and ``remedy``. :class:`PermissionError` keeps its class.

    Example:
        >>> with readable_errors("values.txt could not be read", "try again"):
        ...     raise OSError("disk full")
        Traceback (most recent call last):
        ...
        OSError: values.txt could not be read (disk full); try again
    """
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
