"""Vectors in ``.npy`` files; and new vectors on their way into a file."""

from __future__ import annotations

import glob
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from hf_stitch.storage.files import decoding, flush, readable_errors, sweep, write_whole
from hf_stitch_embeddings.retrieval import exact_search
from hf_stitch_embeddings.stores.base import Description, Rows, VectorStore
from hf_stitch_embeddings.vectors import BATCH, Metric, Quantization, Vectors, read_vectors


class UnfinishedRows:
    """New vectors of an upgrade that is not finished, in a folder beside the file that they are for.

    The first ``done`` rows are written. The folder has the lock of the writing process, too.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.folder = target.with_name(f"{target.name}.upgrade")
        self.done = 0
        self._journal, self.file = self.folder / "journal.json", self.folder / "vectors.npy"
        self._lock = FileLock(self.folder / "lock", timeout=0)
        self._state: dict[str, Any] = {}
        self._full = f"{self.file} could not be written", "make room and run again, which continues"

    def open(self, key: str, source: Path, rows: int, width: int) -> None:
        """Make the folder, or find that of an interrupted upgrade."""
        if self.target.exists():
            self._sweep()
            raise FileExistsError(f"{self.target} exists; delete it, or upgrade into another file")
        with readable_errors(*self._full):
            self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout:
            raise OSError(f"another process upgrades {source} into {self.target} now; wait for it") from None
        state = {"map": key, "source": identity(source), "rows": rows, "width": width}
        if self._journal.is_file():
            with decoding(self.folder):
                kept = json.loads(self._journal.read_text(encoding="utf-8"))
                self.done = int(kept.pop("done"))
            if kept != state:
                self.close()
                what = (
                    "with another map" if kept.get("map") != key else f"from vectors that have changed since: {source}"
                )
                raise ValueError(
                    f"{self.folder} has {self.done} of {kept['rows']} rows of an upgrade {what}; delete this folder "
                    "and run again"
                )
        else:
            with readable_errors(*self._full):
                np.lib.format.open_memmap(self.file, mode="w+", dtype=np.float32, shape=(rows, width)).flush()
        self._state = state
        self._note()

    def _sweep(self) -> None:
        """Remove what a process has left that was killed after the last step: the folder, if it has all rows."""
        sweep(self.target.parent, glob.escape(self.target.name))
        if not self.folder.is_dir():
            return
        with suppress(OSError, ValueError, KeyError, Timeout), self._lock:
            kept = json.loads(self._journal.read_text(encoding="utf-8")) if self._journal.exists() else None
            if kept is None or kept["done"] == kept["rows"]:  # None: killed while it removed the folder
                shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, first: int, vectors: Rows) -> None:
        """Write the next rows."""
        if first != self.done:
            raise ValueError(f"rows must be written in order: expected row {self.done} next, got {first}")
        mapped = self.rows()
        with readable_errors(*self._full):
            with self.file.open("r+b") as file:  # a write to mapped memory ends the process if the disk is full
                file.seek(self.file.stat().st_size - mapped.nbytes + first * mapped.strides[0])
                file.write(np.ascontiguousarray(vectors, mapped.dtype).data)
            flush(self.file)
        self.done += len(vectors)
        self._note()

    def rows(self) -> Vectors:
        """Return the vectors, memory-mapped."""
        found = read_vectors(self.file, str(self.file))
        if (*found.shape, found.dtype) != (self._state["rows"], self._state["width"], np.float32):
            raise ValueError(f"{self.file} is damaged: delete {self.folder} and run again")
        return found

    def check_source(self, source: Path) -> None:
        """Check that the file with the old vectors is the same as at the start."""
        if identity(source) != self._state["source"]:
            raise ValueError(
                f"{source} has changed during the upgrade; {self.target} was not written. Delete {self.folder} and run "
                "again"
            )

    def close(self, remove: bool = False) -> None:
        """Release the lock."""
        if remove:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release(force=True)  # however often it was opened

    def _note(self) -> None:
        text = json.dumps({**self._state, "done": self.done})
        write_whole(self._journal, lambda path: path.write_text(text, encoding="utf-8"))


def drawn(rows: int, count: int, seed: int) -> Iterator[npt.NDArray[np.int64]]:
    """Draw rows without replacement."""
    order = np.random.default_rng(seed).permutation(rows)[:count]
    for start in range(0, len(order), BATCH):
        yield np.sort(order[start : start + BATCH])


def identity(path: Path) -> list[int]:
    """Return size and time of change of a file, which tell whether it was written meanwhile."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


class ArrayStore(VectorStore):
    """Vectors in an ``.npy`` file; ids are numbers of rows. New vectors go to another file.

    Args:
        source: File with old vectors, ``(n, d)``.
        target: File for new vectors, which will be float32.
        metric: Metric of :meth:`search`.
        quantization: What integers stand for, as for :func:`~hf_stitch_embeddings.read_vectors`.
        ranges: Ranges of these integers.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     np.save(Path(folder, "old.npy"), np.eye(3))
        ...     print(ArrayStore(Path(folder, "old.npy"), Path(folder, "new.npy")).describe().width)
        3
    """

    def __init__(
        self,
        source: str | Path,
        target: str | Path,
        *,
        metric: Metric = "cosine",
        quantization: Quantization | None = None,
        ranges: Any = None,
    ) -> None:
        self.quantization, self.ranges = quantization, ranges
        self.source, self.target = Path(source).expanduser(), Path(target).expanduser()
        self.metric: Metric = metric
        self._new = UnfinishedRows(self.target)

    @classmethod
    def holds(cls, path: Path) -> bool:
        """A file ``.npy``."""
        return path.suffix == ".npy"

    def _old(self) -> Vectors:
        with decoding(self.source):
            found: Vectors = np.load(self.source, mmap_mode="r")
        return found

    def describe(self) -> Description:
        """Describe the old vectors."""
        rows, width = len(old := self._old()), self.floats(old[:1], str(self.source)).shape[1]
        return Description(str(self.source), rows, width, (self.metric,))

    def start(self, key: str, width: int) -> None:
        """Make a folder for new vectors beside the target, or find it."""
        self._new.open(key, self.source, len(self._old()), width)

    def pending(self, batch_size: int) -> Iterator[tuple[Sequence[Any], Rows]]:
        """Yield rows without a new vector."""
        old = self._old()
        for start in range(self._new.done, len(old), batch_size):
            rows = self.floats(old[start : start + batch_size], str(self.source))
            yield range(start, start + len(rows)), rows

    def write(self, ids: Sequence[Any], vectors: Rows) -> None:
        """Write new vectors of consecutive rows."""
        self._new.write(ids[0], vectors)

    def missing(self) -> int:
        """Return the number of rows without a new vector."""
        return len(self._old()) - self._new.done

    def sample(self, count: int, seed: int) -> Iterator[tuple[Sequence[Any], Rows, Rows]]:
        """Read some rows; a file that has changed is refused anyway."""
        old, new = self._old(), self._new.rows()
        for some in drawn(len(old), count, seed):
            yield some.tolist(), self.floats(old[some], str(self.source)), np.array(new[some], np.float32)

    def switch(self) -> str:
        """Rename the new file to its place."""
        self._new.check_source(self.source)
        flush(self._new.file)
        self._new.file.replace(self.target)
        self._new.close(remove=True)
        return f"Search {self.target} with the new model; {self.source} is unchanged."

    def close(self) -> None:
        """Release the lock of an upgrade."""
        self._new.close()

    def search(self, queries: Rows, k: int) -> list[list[Any]]:
        """Search the new vectors, comparing with all."""
        found: list[list[Any]] = exact_search(queries, self.target, k, metric=self.metric)[0].tolist()
        return found

    def vectors(self, ids: Sequence[Any]) -> Rows:
        """Read new vectors."""
        there, rows = read_vectors(self.target), np.asarray(ids, dtype=np.int64)
        if (unknown := (rows < 0) | (rows >= len(there))).any():
            raise ValueError(f"{self.target} has no row {rows[unknown][0]}")
        return np.array(there[rows], dtype=np.float32)

    def replace(self, ids: Sequence[Any], vectors: Rows) -> None:
        """Overwrite rows; numbers of none are left out."""
        mapped = np.lib.format.open_memmap(self.target, mode="r+")
        numbers = np.asarray(ids, dtype=np.int64)
        known = (numbers >= 0) & (numbers < len(mapped))
        mapped[numbers[known]] = np.asarray(vectors)[known]
        mapped.flush()
