"""Folders whose files are exchanged together."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(folder: Path, last: str, stale: Iterable[str]) -> Iterator[Path]:
    """Files that take the place of those in a folder once all of them are written.

    Args:
        folder: Created if needed. What is in it and not written anew stays, but for the stale files.
        last: Name of the file that vouches for the others: it is moved last.
        stale: Names of files that go where they are not written anew.

    Yields:
        An empty folder on the same file system, to write into.

    Raises:
        OSError: If something cannot be written; the folder is left as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder))
    try:
        yield aside
        written = sorted(path.name for path in aside.iterdir())
        for name in sorted(written, key=lambda name: name == last):
            (aside / name).replace(folder / name)
        for name in set(stale) - set(written):
            (folder / name).unlink(missing_ok=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
