"""Atomic writes of one or several files, and digests of files.

Several files are first written to a hidden subfolder of the folder with the old files, followed by a journal that names
them. Until the journal exists, the old files are untouched; afterwards only renames remain, and :func:`complete`
finishes them if the process was killed.
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

KEPT = "the previous contents are unchanged"  # end of error messages about a failed write
UNFINISHED = ".unfinished"
"""Suffix of temporary folders, which are named ``<name>.<machine>.<process>.<thread>.unfinished``."""
_MACHINE = re.sub(r"\W", "", socket.gethostname())

ASIDE, NEW, JOURNAL, LOCK = ".hf_stitch_save", "new", "journal.json", "lock"
"""The hidden folder, and its contents: the new files, the journal, and the lock of the writing process."""

WAIT = 600.0
"""Seconds to wait for another process that saves to the same folder."""


def write_whole(path: Path, write: Callable[[Path], object], *, sync: bool = False) -> None:
    """Write a file atomically.

    If the process is killed or the disk is full, the old file stays. If several processes or threads write at the same
    time, the last one wins.

    ``write`` receives a path of the same name in a temporary folder. ``sync`` waits for the disk, so that the file also
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
    """Write a file or folder to a temporary path and rename it at the end, with file modes that follow the umask.

    Temporary files of killed processes on this machine are removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent, glob.escape(path.name))
    aside = path.with_name(f"{path.name}.{_MACHINE}.{os.getpid()}.{threading.get_ident()}{UNFINISHED}")
    remove(aside)  # from an earlier process with this id
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
    """Return whether a temporary file or folder belongs to a killed process on this machine."""
    machine, process, _ = ["", "", "", *path.name.removesuffix(UNFINISHED).split(".")][-3:]
    return machine == _MACHINE and process.isdigit() and not psutil.pid_exists(int(process))


def sweep(folder: Path, name: str = "*") -> None:
    """Remove temporary files of killed processes on this machine from a folder."""
    for temporary in folder.glob(f"{name}.*{UNFINISHED}"):
        if is_abandoned(temporary):
            remove(temporary)


def remove(path: Path) -> None:
    """Remove a temporary file or folder, as far as possible."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink(missing_ok=True)


def follow_umask(folder: Path) -> None:
    """Set the modes of all files in a folder created by :meth:`Path.mkdir` as the umask requires.

    Some libraries, for example safetensors, write files that only their owner can read.
    """
    file_mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(file_mode)


@contextmanager
def reading(files: Iterable[Path]) -> Iterator[None]:
    """Read untrusted files: raise an error for pipes and devices, and name files without read permission."""
    existing = []
    for path in files:
        with suppress(FileNotFoundError):  # other threads and processes may delete it meanwhile
            mode = path.stat().st_mode
            existing.append(path)
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise ValueError(f"{path} is a pipe, a socket or a device, not a regular file; delete it")
    try:
        yield
    except Exception as error:
        make_visible(error)
        gone = getattr(error, "errno", None) == errno.ENOENT  # safetensors raises it without a number for closed files
        if unreadable := [
            str(path) for path in existing if not gone and not os.access(path, os.R_OK) and path.is_file()
        ]:
            raise PermissionError(
                f"{', '.join(unreadable)}: permission denied ({error}); ask the owner to let you read it (chmod a+r)"
            ) from error
        raise


@contextmanager
def decoding(path: str | Path) -> Iterator[None]:
    """Add the path of an untrusted file or folder to errors about its content."""
    try:
        with reading([Path(path)]):
            yield
    except ImportError:
        raise
    except (ValueError, OSError) as error:
        if str(path) in str(error):
            raise
        error_class = OSError if isinstance(error, OSError) else ValueError
        raise error_class(f"{path} cannot be read: {error}") from error
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def digest(*paths: Path) -> str:
    """Compute the SHA-256 digest of files."""
    sha256 = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(2**20):
                sha256.update(block)
    return f"sha256:{sha256.hexdigest()}"


def flush(*paths: Path) -> None:
    """Wait until files, and the names in folders, are on disk."""
    for path in paths:
        if path.is_dir() and os.name == "nt":  # Windows opens no folders
            continue
        descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def readable_errors(failure: str, remedy: str) -> Iterator[None]:
    """Turn errors of the operating system, also from libraries, into an :class:`OSError` with an explanation."""
    try:
        yield
    except Exception as error:
        signs = "os error", "IoError(Os"  # as safetensors and tokenizers write it, and older safetensors
        if not isinstance(error, OSError) and not any(sign in str(error) for sign in signs):
            raise
        error_class = PermissionError if isinstance(error, PermissionError) else OSError
        readable = error_class(f"{failure} ({getattr(error, 'strerror', None) or error}); {remedy}")
        readable.errno = getattr(error, "errno", None)
        raise readable from error


@contextmanager
def replacing(
    folder: Path, stale: Callable[[Path], Iterable[str]] = lambda folder: (), *, sync: bool = False
) -> Iterator[Path]:
    """Replace files of a folder by files that the body of the ``with`` statement writes to a temporary folder.

    If the process is killed, the disk is full or an exception is raised, the old files stay. One process writes at a
    time; others wait. Files that are not rewritten stay, except stale files.

    ``stale`` returns the names of files to delete unless they are rewritten; it is called after other processes have
    finished. ``sync`` waits for the disk, so that the files also survive a power failure.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    with _locked(folder) as aside:
        _finish(folder)
        new, draft = aside / NEW, aside / f"{JOURNAL}.unfinished"
        try:
            with readable_errors(f"{folder} could not be saved", KEPT):
                shutil.rmtree(new, ignore_errors=True)  # from a killed process
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
                    flush(aside, folder, *(path.parent for path in missing))  # the names of new folders, too
        except BaseException:
            if not (aside / JOURNAL).exists():  # otherwise the next load or save completes this save
                shutil.rmtree(new, ignore_errors=True)
                draft.unlink(missing_ok=True)
            raise
        _finish(folder, sync)


def complete(folder: Path) -> None:
    """Complete a save that was interrupted after all files were written."""
    if (folder / ASIDE / JOURNAL).is_file():
        with _locked(folder, "to complete an interrupted save, load it once with write access to this folder"):
            _finish(folder)


def load_whole(folder: Path, first: str, load: Callable[[], T]) -> T:
    """Load all old or all new files of a folder that another process may replace during loading."""
    while True:
        identity = _identity(folder / first)
        complete(folder)
        try:
            with reading(folder.glob("*")):
                loaded = load()
        except (ValueError, FileNotFoundError):
            complete(folder)
            if _identity(folder / first) == identity:
                raise
        else:
            if _identity(folder / first) == identity:  # otherwise, a file may have been replaced before the check
                return loaded


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _finish(folder: Path, sync: bool = False) -> None:
    """Carry out the remaining steps of the journal, if the journal exists."""
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
    """Read a journal; it may be untrusted, so it may only name plain files of this folder."""
    try:
        contents = json.loads(journal.read_bytes())
        name_lists = contents["files"], contents["stale"]
        all_plain = all(
            isinstance(name, str) and Path(name).name == name not in ("", "..")
            for names in name_lists
            for name in names
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{journal} is damaged ({error}); delete the folder {journal.parent}") from error
    if not all_plain or any(path.is_symlink() for path in (journal.parent, journal.parent / NEW)):
        raise ValueError(f"{journal} names files outside its folder; delete the folder {journal.parent}")
    return name_lists


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
            except FileExistsError:  # the same, while mkdir checked whether it is a folder
                if aside.is_file() or aside.is_symlink():
                    raise OSError(f"{aside} is not a folder; delete it") from None
            except Timeout:
                raise OSError(f"another process has been saving there for more than {WAIT:.0f} seconds") from None
    try:
        yield aside
    finally:
        # Removed while locked: processes that wait for this file notice that it is gone, and create another.
        with suppress(OSError):
            os.unlink(aside / LOCK)
            aside.rmdir()
        lock.release()
