"""A store in one file: vectors in a table of SQLite, written by what the README says on stores."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from hf_stitch_embeddings import exact_search
from hf_stitch_embeddings.stores import Description, VectorStore, registry
from hf_stitch_embeddings.stores.base import Rows
from hf_stitch_embeddings.testing import StoreCase


@registry.register("sqlite")
class SqliteStore(VectorStore):
    """Vectors in the table ``vectors`` (id, vector) of a file. New ones fill another table, which then takes its name.

    Args:
        file: The file.
    """

    def __init__(self, file: str | Path) -> None:
        self.file = Path(file)
        if not self.file.is_file():
            raise FileNotFoundError(f"{file} does not exist")
        self.lock = FileLock(f"{file}.lock", timeout=0)
        self.db = sqlite3.connect(file)
        self.new = self.key = ""

    @classmethod
    def holds(cls, path: Path) -> bool:
        return path.is_file() and path.read_bytes()[:15] == b"SQLite format 3"

    def close(self) -> None:
        self.db.close()
        self.lock.release()

    def _all(self, query: str, *values: Any) -> list[Any]:
        return self.db.execute(query, values).fetchall()

    def describe(self) -> Description:
        if self._all("SELECT 1 FROM sqlite_master WHERE name = 'vectors_before'"):
            raise ValueError(f"{self.file} is already upgraded")
        rows, size = self._all("SELECT count(*), max(length(vector)) FROM vectors")[0]
        return Description(str(self.file), rows, size // 4, ("cosine",))

    def start(self, key: str, width: int) -> None:
        try:
            self.lock.acquire()
        except Timeout:
            raise OSError(f"another process upgrades {self.file} now") from None
        self.new, self.key = f"new_{key}", key
        with self.db:
            self.db.execute("CREATE TABLE IF NOT EXISTS started (key PRIMARY KEY, source)")
            self.db.execute("INSERT OR IGNORE INTO started VALUES (?, ?)", (key, self._source()))
            self.db.execute(f"CREATE TABLE IF NOT EXISTS {self.new} (id PRIMARY KEY, vector BLOB)")
        self._check_source()

    def _source(self) -> str:
        return hashlib.sha256(b"".join(row for (row,) in self._all("SELECT vector FROM vectors"))).hexdigest()

    def _check_source(self) -> None:
        if self._all("SELECT source FROM started WHERE key = ?", self.key) != [(self._source(),)]:
            raise ValueError(f"the vectors of {self.file} have changed since the start: drop {self.new}, and run again")

    def pending(self, batch_size: int) -> Iterator[tuple[Sequence[Any], Rows]]:
        last = ""
        while found := self._all(
            f"SELECT * FROM vectors WHERE id > ? AND id NOT IN (SELECT id FROM {self.new}) ORDER BY id LIMIT ?",
            *(last, batch_size),
        ):
            yield [each for each, _ in found], rows_of(found)
            last = found[-1][0]

    def write(self, ids: Sequence[Any], vectors: Rows) -> None:
        with self.db:
            given = zip(ids, (row.tobytes() for row in np.asarray(vectors, np.float32)), strict=True)
            self.db.executemany(f"INSERT OR REPLACE INTO {self.new} VALUES (?, ?)", given)

    def missing(self) -> int:
        return self._all(f"SELECT count(*) FROM vectors WHERE id NOT IN (SELECT id FROM {self.new})")[0][0]

    def sample(self, count: int, seed: int) -> Iterator[tuple[Sequence[Any], Rows, Rows]]:
        query = f"SELECT id, vectors.vector, new.vector FROM vectors JOIN {self.new} AS new USING (id)"
        found = self._all(query)
        some = [found[row] for row in np.random.default_rng(seed).permutation(len(found))[:count]]
        yield [each[0] for each in some], rows_of(some), rows_of([each[1:] for each in some])

    def switch(self) -> str:
        with self.db:
            self.db.execute("BEGIN IMMEDIATE")
            self._check_source()
            self.db.execute("ALTER TABLE vectors RENAME TO vectors_before")
            self.db.execute(f"ALTER TABLE {self.new} RENAME TO vectors")
        return "The table vectors has the new vectors, and vectors_before the old ones."

    def search(self, queries: Rows, k: int) -> list[list[Any]]:
        there = self._all("SELECT * FROM vectors")
        return [[there[row][0] for row in found] for found in exact_search(queries, rows_of(there), k)[0]]

    def vectors(self, ids: Sequence[Any]) -> Rows:
        there = dict(self._all("SELECT * FROM vectors"))
        if unknown := [each for each in ids if each not in there]:
            raise ValueError(f"{self.file} has no row {unknown[0]!r}")
        return rows_of([(each, there[each]) for each in ids])

    def replace(self, ids: Sequence[Any], vectors: Rows) -> None:
        with self.db:
            given = zip((row.tobytes() for row in np.asarray(vectors, np.float32)), ids, strict=True)
            self.db.executemany("UPDATE vectors SET vector = ? WHERE id = ?", given)


def rows_of(found: Sequence[Any]) -> Rows:
    return np.stack([np.frombuffer(each[1], np.float32) for each in found])


class Sqlite(StoreCase):
    """Tables with texts in another one."""

    name, has_payloads = "sqlite", True
    store: type[SqliteStore] = SqliteStore

    def make(self, folder: Path, vectors: np.ndarray, payloads: Sequence[str]) -> Sequence[Any]:
        ids = [f"doc {row:03}" for row in range(len(vectors))]
        with closing(sqlite3.connect(folder / "docs.db")) as db, db:
            db.execute("CREATE TABLE texts (id PRIMARY KEY, text)")
            db.executemany("INSERT INTO texts VALUES (?, ?)", zip(ids, payloads, strict=True))
            db.execute("CREATE TABLE vectors (id PRIMARY KEY, vector BLOB)")
            db.executemany("INSERT INTO vectors VALUES (?, ?)", zip(ids, map(bytes, vectors), strict=True))
        return ids

    def change(self, folder: Path, ids: Sequence[Any], vectors: np.ndarray) -> None:
        with closing(sqlite3.connect(folder / "docs.db")) as db, db:
            db.executemany("UPDATE vectors SET vector = ? WHERE id = ?", zip(map(bytes, vectors), ids, strict=True))

    def open(self, folder: Path) -> VectorStore:
        return self.store(folder / "docs.db")

    def read(self, folder: Path) -> dict[Any, tuple[np.ndarray, str | None]]:
        with closing(sqlite3.connect(folder / "docs.db")) as db:
            found = db.execute("SELECT id, vector, text FROM texts LEFT JOIN vectors USING (id)").fetchall()
        return {each: (np.frombuffer(vector or b"", np.float32), text) for each, vector, text in found}
