"""Files that are written whole or not at all, one or several of a folder together, and their digests.

Several files are written aside, into a hidden folder beside those that they replace, and then a journal that names
them. The journal decides: before it exists, the old files are untouched; afterwards only renames are left, which
:func:`complete` repeats if the process was killed between them.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import psutil  # type: ignore[import-untyped]
from filelock import FileLock, Timeout

from hf_stitch.printing import make_visible

T = TypeVar("T")

KEPT = "what was there before is unchanged"
UNFINISHED = ".unfinished"
"""End of the names of temporary folders: of ``<name>.<machine>.<process>.<thread>.unfinished``."""
_MACHINE = re.sub(r"\W", "", socket.gethostname())

ASIDE, NEW, JOURNAL, LOCK = ".hf_stitch_save", "new", "journal.json", "lock"
"""The hidden folder, and in it: the files that are being written, the journal, and the lock of the writing process."""

WAIT = 600.0
"""Seconds to wait for another process that saves to the same folder."""


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
