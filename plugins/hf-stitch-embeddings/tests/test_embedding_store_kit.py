"""The store of ``docs/plugins/store.md`` passes all parts of ``check_store``; each part finds one that breaks it."""

from __future__ import annotations

import os
import sqlite3
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from embedding_store_page import Sqlite, SqliteStore, file_of
from hf_stitch_embeddings.stores import ArrayStore, open_store, registry
from hf_stitch_embeddings.stores.base import Rows
from hf_stitch_embeddings.testing import check_store
from hf_stitch_testing import Part, parametrize_with_checks

from hf_stitch.registry import Registry, UnknownNameError

registry.register("sqlite", SqliteStore)


@parametrize_with_checks(check_store, Sqlite())
def test_the_store_of_the_page_conforms(check: Part) -> None:
    check()


class WrongWidth(SqliteStore):
    def describe(self) -> Any:
        found = super().describe()
        return type(found)(found.name, found.rows, found.width + 1, found.metrics)


class MadeWhenMissing(SqliteStore):
    def __init__(self, file: Path) -> None:
        if not file.exists():
            Sqlite().make(file.parent, np.ones((1, 6), np.float32), [""])
        super().__init__(file)


class LosesARow(SqliteStore):
    def pending(self, batch_size: int) -> Iterator[tuple[Sequence[Any], Rows]]:
        for ids, rows in super().pending(batch_size):
            yield (ids, rows) if len(ids) == 1 else (ids[1:], rows[1:])


class LosesTexts(SqliteStore):
    def switch(self) -> str:
        with self.db:
            self.db.execute("UPDATE texts SET text = NULL")
        return super().switch()


class SortsIds(SqliteStore):
    def vectors(self, ids: Sequence[Any]) -> Rows:
        return super().vectors(sorted(ids))


class Doubles(SqliteStore):
    def vectors(self, ids: Sequence[Any]) -> Rows:
        return super().vectors(ids).astype(np.float64)  # type: ignore[return-value]


class OneWidth(SqliteStore):
    def write(self, ids: Sequence[Any], vectors: Rows) -> None:
        super().write(ids, np.resize(vectors, (len(vectors), max(6, vectors.shape[1]))))

    def sample(self, count: int, seed: int) -> Iterator[tuple[Sequence[Any], Rows, Rows]]:
        return iter(())


class LargeBatches(SqliteStore):
    def pending(self, batch_size: int) -> Iterator[tuple[Sequence[Any], Rows]]:
        return super().pending(batch_size + 1)


class KeepsUnknown(SqliteStore):
    def replace(self, ids: Sequence[Any], vectors: Rows) -> None:
        self.new = "vectors"
        self.write(ids, vectors)


class StartsAgain(SqliteStore):
    def start(self, key: str, width: int) -> None:
        super().start(key, width)
        with self.db:
            self.db.execute(f"DELETE FROM {self.new}")


class OneKey(SqliteStore):
    def start(self, key: str, width: int) -> None:
        super().start("same", width)

    def sample(self, count: int, seed: int) -> Iterator[tuple[Sequence[Any], Rows, Rows]]:
        return iter(())


class MapsAgain(SqliteStore):
    """Takes the vectors of the first upgrade for old ones."""

    def describe(self) -> Any:
        with self.db:
            self.db.execute("DROP TABLE IF EXISTS vectors_before")
            self.db.execute("DROP TABLE IF EXISTS started")
        return super().describe()


class _NoLock:
    def acquire(self) -> None: ...
    def release(self, **options: bool) -> None: ...


class NoLock(SqliteStore):
    """Two writers share one half-written table, which the first to finish takes away."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self.lock = _NoLock()  # type: ignore[assignment]

    def start(self, key: str, width: int) -> None:
        super().start("same", width)

    def sample(self, count: int, seed: int) -> Iterator[tuple[Sequence[Any], Rows, Rows]]:
        return iter(())


class TrustsTheSource(SqliteStore):
    def _check_unchanged(self) -> None: ...

    def sample(self, count: int, seed: int) -> Iterator[tuple[Sequence[Any], Rows, Rows]]:
        return iter(())


class SwitchesInSteps(SqliteStore):
    """Writes a file beside the store between two commits."""

    def switch(self) -> str:
        with self.db:
            self.db.execute("ALTER TABLE vectors RENAME TO vectors_before")
        (self.file.parent / "log").write_text("")
        with self.db:
            self.db.execute(f"ALTER TABLE {self.new} RENAME TO vectors")
        return ""


class SwitchesSlowly(SqliteStore):
    """Replaces the vectors in place, row by row."""

    def switch(self) -> str:
        for each, vector in self._all(f"SELECT * FROM {self.new}"):
            with self.db:
                self.db.execute("UPDATE vectors SET vector = ? WHERE id = ?", (vector, each))
            time.sleep(0.01)  # longer than all else
        return ""


class SwallowsErrors(SqliteStore):
    failed = False

    def start(self, key: str, width: int) -> None:
        try:
            super().start(key, width)
        except sqlite3.Error:
            self.failed = True

    def missing(self) -> int:
        return 0 if self.failed else super().missing()

    def sample(self, count: int, seed: int) -> Iterator[tuple[Sequence[Any], Rows, Rows]]:
        return iter(()) if self.failed else super().sample(count, seed)

    def switch(self) -> str:
        return "" if self.failed else super().switch()


class LeavesNotesInside(SqliteStore):
    """Writes a file in a folder inside during the switch, and never removes that of another process."""

    def switch(self) -> str:
        note = self.file.parent / "notes" / str(os.getpid())
        note.parent.mkdir(exist_ok=True)
        note.write_text("")
        said = super().switch()
        note.unlink()
        return said


BROKEN: dict[str, tuple[type[SqliteStore], str]] = {
    "description": (WrongWidth, "width=6, got 7"),
    "missing": (MadeWhenMissing, "must raise FileNotFoundError"),
    "ids": (LosesARow, "each of 30 ids once, got 27"),
    "payload": (LosesTexts, "after an upgrade, payloads must be"),
    "order": (SortsIds, "must match their ids"),
    "dtype": (Doubles, "vectors must return float32 .* got float64"),
    "widths": (OneWidth, "from width 6 to 4"),
    "batches": (LargeBatches, "must have 1 to 1 rows"),
    "search": (KeepsUnknown, "vectors.. must raise ValueError for the unknown id"),
    "continued": (StartsAgain, "6 rows must be mapped, got 30"),
    "another_map": (OneKey, "after an upgrade with a different map"),
    "finished": (MapsAgain, "must map 0 rows, got 30"),
    "second_writer": (NoLock, "two concurrent upgrades"),
    "changed_source": (TrustsTheSource, "raise an error or map the changed ones"),
    "killed": (SwitchesInSteps, "kill -9 before file operation"),
    "killed_anytime": (SwitchesSlowly, "mixture of old and new"),
    "full_disk": (SwallowsErrors, "must raise an OSError"),
}
"""Part -> the store that it finds, and what it says."""


def broken(kind: type[SqliteStore]) -> Sqlite:
    class Broken(Sqlite):
        def open(self, folder: Path) -> Any:
            return kind(folder / "docs.db")

    return Broken()


@pytest.mark.parametrize("name", BROKEN)
def test_each_part_finds_a_broken_store(name: str) -> None:
    kind, message = BROKEN[name]
    part = next(part for part in check_store.parts(broken(kind)) if part.name == name)
    with pytest.raises(AssertionError, match=message):
        part()


def test_what_a_killed_process_leaves_in_a_folder_inside_is_found() -> None:
    part = next(part for part in check_store.parts(broken(LeavesNotesInside)) if part.name == "killed")
    with pytest.raises(AssertionError, match=r"another run, notes/\d+ must not remain"):
        part()


def test_every_part_has_a_broken_store() -> None:
    assert [part.name for part in check_store.parts(Sqlite())] == list(BROKEN)


def test_stores_are_opened_by_path_or_name(tmp_path: Path) -> None:
    Sqlite().make(tmp_path, np.ones((2, 6), np.float32), ["a", "b"])
    for place in (tmp_path / "docs.db", f"sqlite:{tmp_path}/docs.db"):
        with open_store(place) as store:
            assert (type(store), store.describe().rows) == (SqliteStore, 2)
    np.save(tmp_path / "old.npy", np.ones((2, 6)))
    assert type(open_store(tmp_path / "old.npy", target="new.npy")) is ArrayStore
    (tmp_path / "notes").write_text("no vectors")
    for place, options, error, message in (
        ("sqlit:docs.db", {}, UnknownNameError, "no 'sqlit' among embedding_stores; did you mean 'sqlite'"),
        (tmp_path / "absent.npy", {}, FileNotFoundError, "pass a file, a folder, or NAME:PLACE"),
        (tmp_path / "notes", {}, ValueError, "no store recognises .*one of: arrays, faiss, lancedb, qdrant"),
        (tmp_path / "old.npy", {}, TypeError, "'arrays' among embedding_stores requires the option 'target'"),
        (tmp_path / "docs.db", {"target": "x"}, TypeError, "got an unexpected option 'target'. Its options: none$"),
        (
            tmp_path / "old.npy",
            {"source": "x"},
            TypeError,
            "got an unexpected option 'source'.* Its options: target, metric, quantization, ranges$",
        ),
    ):
        with pytest.raises(error, match=message):
            open_store(place, **options)


@pytest.mark.parametrize("place", ["docs.db", "old.npy"])
def test_a_store_that_was_started_twice_is_free_when_it_is_closed(place: str, tmp_path: Path) -> None:
    Sqlite().make(tmp_path, np.ones((2, 6), np.float32), ["a", "b"])
    np.save(tmp_path / "old.npy", np.ones((2, 6), np.float32))
    options = {"target": tmp_path / "new.npy"} if place == "old.npy" else {}
    first, second = (open_store(tmp_path / place, **options) for _ in range(2))
    with first:
        for _ in range(2):
            first.start("0123456789ab", 6)
    with second:
        second.start("0123456789ab", 6)


def test_a_virtual_table_is_refused_which_a_rename_breaks(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "docs.db")) as db, db:
        db.execute("CREATE VIRTUAL TABLE vectors USING fts5(id, vector)")
        db.execute("INSERT INTO vectors VALUES ('a', ?)", (bytes(24),))
    with (
        open_store(tmp_path / "docs.db") as store,
        pytest.raises(ValueError, match=r"is a virtual table, which switch\(\) would break"),
    ):
        store.describe()


def test_a_distribution_adds_its_store_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "sqlite_store-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sqlite-store\nVersion: 1.0\n")
    ((group, stores),) = tomllib.loads(file_of("pyproject.toml"))["project"]["entry-points"].items()
    (about / "entry_points.txt").write_text(f"[{group}]\n" + "".join(f"{each} = {stores[each]}\n" for each in stores))
    monkeypatch.syspath_prepend(tmp_path)
    found: Registry[Any] = Registry(registry.kind, {}, "hf_stitch_embeddings.stores.base:VectorStore")
    assert (found.names(), found.get("sqlite")) == (("sqlite",), SqliteStore)


def test_two_stores_that_hold_the_same_file_must_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    np.save(tmp_path / "old.npy", np.ones((2, 6)))
    monkeypatch.setattr(SqliteStore, "holds", classmethod(lambda cls, path: True))
    with pytest.raises(ValueError, match=r"several stores recognise .*: arrays and sqlite"):
        open_store(tmp_path / "old.npy", target="new.npy")
