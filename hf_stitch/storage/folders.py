"""Replacement of several files of a folder together."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(folder: Path, last: str, stale: Iterable[str]) -> Iterator[Path]:
    """Write files to a temporary folder and move them into a folder once all of them are written.

    Args:
        folder: Target folder, created if needed. Files in it that are not rewritten stay, except for the stale ones.
        last: Name of the file that is moved last. If it is there, all other files are there too.
        stale: Names of files that are deleted if they are not rewritten.

    Yields:
        An empty temporary folder on the same file system, to write into.

    Raises:
        OSError: If a file cannot be written; the target folder then stays unchanged.

    Example:
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as name:
        ...     folder = Path(name)
        ...     _ = (folder / "old.bin").write_text("old weights")
        ...     with replacing(folder, last="config.json", stale=["old.bin"]) as temporary:
        ...         _ = (temporary / "weights.bin").write_text("weights")
        ...         _ = (temporary / "config.json").write_text("{}")
        ...     sorted(path.name for path in folder.iterdir())
        ['config.json', 'weights.bin']
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
