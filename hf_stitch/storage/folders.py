"""Replacement of several files of a folder together: all of them are replaced, or none.

A save writes its files aside, into a hidden folder beside those that they replace, and then a journal that names them.
The journal decides: before it exists, the old files are untouched; afterwards only renames are left, which
:func:`complete` repeats if the process was killed between them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from hf_stitch.storage.files import KEPT, flush, follow_umask, readable_errors, reading

T = TypeVar("T")

ASIDE, NEW, JOURNAL, LOCK = ".hf_stitch_save", "new", "journal.json", "lock"
"""The hidden folder, and in it: the files that are being written, the journal, and the lock of the writing process."""

WAIT = 600.0
"""Seconds to wait for another process that saves to the same folder."""


@contextmanager
def replacing(
    folder: Path, stale: Callable[[Path], Iterable[str]] = lambda folder: (), *, sync: bool = False
) -> Iterator[Path]:
    """Replace files of a folder by files that the body of the ``with`` statement writes to a temporary folder.

    A process that is killed, a full disk and an exception leave the old files. One process writes at a time; others
    wait. Files of the folder that are not rewritten stay, except for the stale ones.

    ``stale`` names the files to delete if they are not rewritten; it is called after other processes have finished.
    ``sync`` waits for the disk, so that the files also survive a power failure.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    with _locked(folder) as aside:
        _finish(folder)
        new, draft = aside / NEW, aside / f"{JOURNAL}.unfinished"
        try:
            with readable_errors(f"{folder} could not be saved", KEPT):
                shutil.rmtree(new, ignore_errors=True)  # of a process that was killed
                new.mkdir()
                yield new
                names = sorted(path.name for path in new.iterdir() if path.is_file())
                follow_umask(new)
                journal = {"files": names, "stale": sorted(set(stale(folder)) - set(names))}
                draft.write_text(json.dumps(journal), "utf-8")
                if sync:
                    flush(*(new / name for name in names), new, draft)
                draft.replace(aside / JOURNAL)
                if sync:
                    flush(aside, folder, *(each.parent for each in made))  # the names of new folders, too
        except BaseException:
            if not (aside / JOURNAL).exists():  # else the save is decided, and the next load or save completes it
                shutil.rmtree(new, ignore_errors=True)
                draft.unlink(missing_ok=True)
            raise
        _finish(folder, sync)


def complete(folder: Path) -> None:
    """Complete a save that was interrupted after it had written all files."""
    if (folder / ASIDE / JOURNAL).is_file():
        with _locked(folder, "an interrupted save must be completed first: load it once from where it can be written"):
            _finish(folder)


def load_whole(folder: Path, first: str, load: Callable[[], T]) -> T:
    """Load files of a folder that another process may replace meanwhile: all old ones or all new ones."""
    while True:
        before = _identity(folder / first)
        complete(folder)
        try:
            with reading(folder.glob("*")):
                loaded = load()
        except (ValueError, FileNotFoundError):
            complete(folder)
            if _identity(folder / first) == before:
                raise
        else:
            if _identity(folder / first) == before:  # otherwise, a file may have been replaced before it was checked
                return loaded


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _finish(folder: Path, sync: bool = False) -> None:
    """Do what the journal demands, if there is one; what is done already is skipped."""
    aside = folder / ASIDE
    if not (aside / JOURNAL).is_file():
        return
    files, stale = _read(aside / JOURNAL)
    with readable_errors(
        f"an interrupted save to {folder} could not be completed", "load or save again to complete it"
    ):
        for name in files:
            with suppress(FileNotFoundError):
                (aside / NEW / name).replace(folder / name)
        for name in stale:
            (folder / name).unlink(missing_ok=True)
        if sync:
            flush(folder, aside)
        (aside / JOURNAL).unlink()
    shutil.rmtree(aside / NEW, ignore_errors=True)


def _read(journal: Path) -> tuple[list[str], list[str]]:
    """Read a journal, which may come with an untrusted folder: it may name plain files of this folder only."""
    try:
        found = json.loads(journal.read_bytes())
        parts = found["files"], found["stale"]
        plain = all(
            isinstance(name, str) and Path(name).name == name not in ("", "..") for part in parts for name in part
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{journal} is damaged ({error}); delete the folder {journal.parent}") from error
    if not plain or any(path.is_symlink() for path in (journal.parent, journal.parent / NEW)):
        raise ValueError(f"{journal} names files outside of its folder; delete the folder {journal.parent}")
    return parts


@contextmanager
def _locked(folder: Path, remedy: str = KEPT) -> Iterator[Path]:
    """Create the hidden folder, lock it against other processes, and remove it at the end."""
    aside = folder / ASIDE
    lock = FileLock(aside / LOCK, timeout=WAIT)
    with readable_errors(f"{folder} could not be locked", remedy):
        while not lock.is_locked:
            try:
                aside.mkdir(parents=True, exist_ok=True)
                lock.acquire()
            except FileNotFoundError:  # the last process removed the folder in between
                continue
            except FileExistsError:  # the same, while mkdir looked whether it is a folder
                if aside.is_file() or aside.is_symlink():
                    raise OSError(f"{aside} is no folder; delete it") from None
            except Timeout:
                raise OSError(f"another process has been saving there for more than {WAIT:.0f} seconds") from None
    try:
        yield aside
    finally:
        # Removed while it is locked: processes that wait for this file notice that it is gone, and make another.
        with suppress(OSError):
            os.unlink(aside / LOCK)
            aside.rmdir()
        lock.release()
