"""Store of vectors in ``.npy`` files, and unfinished new vectors of upgrades into files."""

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
    """New vectors of an unfinished upgrade, in a folder next to the target file.

    The first ``done`` rows are written. The folder also holds the lock of the writing process.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.folder = target.with_name(f"{target.name}.upgrade")
        self.done = 0
        self._journal, self.file = self.folder / "journal.json", self.folder / "vectors.npy"
        self._lock = FileLock(self.folder / "lock", timeout=0)
        self._state: dict[str, Any] = {}
        self._write_error = f"{self.file} could not be written", "free disk space and rerun to continue"

    def open(self, key: str, source: Path, rows: int, width: int) -> None:
        """Create the folder, or reuse the folder of an interrupted upgrade."""
        if self.target.exists():
            self._remove_remains()
            raise FileExistsError(f"{self.target} exists; delete it, or use a new target file")
        with readable_errors(*self._write_error):
            self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout:
            raise OSError(f"another process is upgrading {source} into {self.target}; wait until it ends") from None
        state = {"map": key, "source": identity(source), "rows": rows, "width": width}
        if self._journal.is_file():
            with decoding(self.folder):
                journal = json.loads(self._journal.read_text(encoding="utf-8"))
                self.done = int(journal.pop("done"))
            if journal != state:
                self.close()
                cause = (
                    "with a different map" if journal.get("map") != key else f"of vectors that have changed: {source}"
                )
                raise ValueError(
                    f"{self.folder} has {self.done} of {journal['rows']} rows of an upgrade {cause}; delete the folder "
                    "and rerun"
                )
        else:
            with readable_errors(*self._write_error):
                np.lib.format.open_memmap(self.file, mode="w+", dtype=np.float32, shape=(rows, width)).flush()
        self._state = state
        self._write_journal()

    def _remove_remains(self) -> None:
        """Remove the remains of a process killed after the last step: the folder, if it has all rows."""
        sweep(self.target.parent, glob.escape(self.target.name))
        if not self.folder.is_dir():
            return
        with suppress(OSError, ValueError, KeyError, Timeout), self._lock:
            journal = json.loads(self._journal.read_text(encoding="utf-8")) if self._journal.exists() else None
            if journal is None or journal["done"] == journal["rows"]:  # None: killed during the removal of the folder
                shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, first: int, vectors: Rows) -> None:
        """Write the next rows."""
        if first != self.done:
            raise ValueError(f"rows must be written in order: expected row {self.done}, got {first}")
        mapped = self.rows()
        with readable_errors(*self._write_error):
            with self.file.open("r+b") as file:  # a write to mapped memory ends the process if the disk is full
                file.seek(self.file.stat().st_size - mapped.nbytes + first * mapped.strides[0])
                file.write(np.ascontiguousarray(vectors, mapped.dtype).data)
            flush(self.file)
        self.done += len(vectors)
        self._write_journal()

    def rows(self) -> Vectors:
        """Return the vectors, memory-mapped."""
        vectors = read_vectors(self.file, str(self.file))
        if (*vectors.shape, vectors.dtype) != (self._state["rows"], self._state["width"], np.float32):
            raise ValueError(f"{self.file} is damaged: delete {self.folder} and rerun")
        return vectors

    def check_source(self, source: Path) -> None:
        """Check that the file with the old vectors has not changed since the start."""
        if identity(source) != self._state["source"]:
            raise ValueError(
                f"{source} has changed during the upgrade; {self.target} was not written. Delete {self.folder} and "
                "rerun"
            )

    def close(self, remove: bool = False) -> None:
        """Release the lock."""
        if remove:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release(force=True)  # however often it was opened

    def _write_journal(self) -> None:
        text = json.dumps({**self._state, "done": self.done})
        write_whole(self._journal, lambda path: path.write_text(text, encoding="utf-8"))


def sample_batches(rows: int, count: int, seed: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield batches of rows sampled without replacement."""
    order = np.random.default_rng(seed).permutation(rows)[:count]
    for start in range(0, len(order), BATCH):
        yield np.sort(order[start : start + BATCH])


def identity(path: Path) -> list[int]:
    """Return size and modification time of a file, to detect changes."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


class ArrayStore(VectorStore):
    """Store of vectors in an ``.npy`` file with row numbers as ids. New vectors go to a second file.

    Args:
        source: File with old vectors, ``(n, d)``.
        target: File for new vectors, written as float32.
        metric: Metric of :meth:`search`.
        quantization: Meaning of integers, as for :func:`~hf_stitch_embeddings.read_vectors`.
        ranges: Ranges of ``"int8"`` vectors.

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
        """Return whether the file is an ``.npy`` file."""
        return path.suffix == ".npy"

    def _read_old(self) -> Vectors:
        with decoding(self.source):
            vectors: Vectors = np.load(self.source, mmap_mode="r")
        return vectors

    def describe(self) -> Description:
        """Describe the old vectors."""
        rows, width = len(old := self._read_old()), self.floats(old[:1], str(self.source)).shape[1]
        return Description(str(self.source), rows, width, (self.metric,))

    def start(self, key: str, width: int) -> None:
        """Create a folder for new vectors next to the target, or reuse it."""
        self._new.open(key, self.source, len(self._read_old()), width)

    def pending(self, batch_size: int) -> Iterator[tuple[Sequence[Any], Rows]]:
        """Yield rows without a new vector."""
        old = self._read_old()
        for start in range(self._new.done, len(old), batch_size):
            rows = self.floats(old[start : start + batch_size], str(self.source))
            yield range(start, start + len(rows)), rows

    def write(self, ids: Sequence[Any], vectors: Rows) -> None:
        """Write new vectors of consecutive rows."""
        self._new.write(ids[0], vectors)

    def missing(self) -> int:
        """Return the number of rows without a new vector."""
        return len(self._read_old()) - self._new.done

    def sample(self, count: int, seed: int) -> Iterator[tuple[Sequence[Any], Rows, Rows]]:
        """Read a sample of rows; :meth:`switch` checks that the file has not changed."""
        old, new = self._read_old(), self._new.rows()
        for rows in sample_batches(len(old), count, seed):
            yield rows.tolist(), self.floats(old[rows], str(self.source)), np.array(new[rows], np.float32)

    def switch(self) -> str:
        """Move the new file to the target."""
        self._new.check_source(self.source)
        flush(self._new.file)
        self._new.file.replace(self.target)
        self._new.close(remove=True)
        return f"Search {self.target} with the new model; {self.source} is unchanged."

    def close(self) -> None:
        """Release the lock of an upgrade."""
        self._new.close()

    def search(self, queries: Rows, k: int) -> list[list[Any]]:
        """Search the new vectors exhaustively."""
        neighbours: list[list[Any]] = exact_search(queries, self.target, k, metric=self.metric)[0].tolist()
        return neighbours

    def vectors(self, ids: Sequence[Any]) -> Rows:
        """Read new vectors."""
        stored, rows = read_vectors(self.target), np.asarray(ids, dtype=np.int64)
        if (unknown := (rows < 0) | (rows >= len(stored))).any():
            raise ValueError(f"ids must be rows of {self.target} (0 to {len(stored) - 1}), got {rows[unknown][0]}")
        return np.array(stored[rows], dtype=np.float32)

    def replace(self, ids: Sequence[Any], vectors: Rows) -> None:
        """Overwrite rows; unknown ids are ignored."""
        stored = np.lib.format.open_memmap(self.target, mode="r+")
        numbers = np.asarray(ids, dtype=np.int64)
        in_range = (numbers >= 0) & (numbers < len(stored))
        stored[numbers[in_range]] = np.asarray(vectors)[in_range]
        stored.flush()
