"""Atomic writing of files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically.

    A process that is killed leaves either the old file or the new one. The same holds for several processes that write
    at the same time.

    Args:
        path: The file. An existing file is replaced; missing folders are created.
        write: Function that writes the content to the path that it receives, a temporary file in the same folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "new" / "values.txt"
        ...     write_whole(path, lambda temporary: temporary.write_text("0.5"))
        ...     path.read_text()
        '0.5'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    write(unfinished)
    unfinished.replace(path)
