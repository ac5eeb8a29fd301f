"""Lazy upgrade: re-embed documents when queries retrieve them, and replace their mapped vectors."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from hf_stitch.options import checked
from hf_stitch.storage.files import decoding
from hf_stitch_embeddings.retrieval import exact_search
from hf_stitch_embeddings.stores.base import Rows, VectorStore, write_errors
from hf_stitch_embeddings.vectors import Metric, encode, lengths, normalized, outside_range, read_vectors

First: TypeAlias = Literal["hubs", "asked", "random"]
"""Rows to re-embed first: nearest neighbours of many documents, nearest neighbours of past queries, or random rows."""
WAITING = "in_store = 0 AND vector IS NOT NULL"
"""SQL condition for exact vectors that are not in the store yet."""
CHECKED, SAME_COSINE = 3, 0.99
"""Number of documents to re-embed to check a file; minimum cosine of equal vectors (remote encoders are not exact)."""
NEAR, HUBS_OF = 10, 20_000
"""Number of neighbours per document, and maximum number of documents to count neighbours of."""


class LazyUpgrade:
    """Search in an upgraded store that re-embeds retrieved documents, and so becomes exact where it is used.

    A search retrieves the nearest mapped documents, embeds their texts with the new encoder if their vectors are not
    exact yet, and re-ranks all of them. Exact vectors are stored in a file that survives ``kill -9``. They replace the
    mapped vectors in the store after every :attr:`every` rows and at the end.

    Args:
        store: An upgraded store.
        encoder: The new encoder, as for :func:`~hf_stitch_embeddings.encode`.
        texts: Function from ids to their texts; None for a row without a text.
        kept: SQLite file for exact vectors, created if needed. A file belongs to one store and one encoder, which is
            checked by re-embedding three of its documents.
        metric: Metric of the store.
        every: Number of new exact rows before an update of the store.

    Attributes:
        embedded: Number of texts that this object has embedded and stored.

    Raises:
        ValueError: If the file belongs to another encoder or another store.

    Example:
        >>> import tempfile
        >>> from hf_stitch_embeddings.stores import ArrayStore
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     mapped, exact = np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32)[::-1]
        ...     np.save(Path(folder, "new.npy"), mapped)  # wrong for documents 0 and 2
        ...     store = ArrayStore(Path(folder, "old.npy"), Path(folder, "new.npy"))
        ...     texts = lambda ids: [str(each) for each in ids]
        ...     encoder = lambda some: [exact[int(text)] for text in some]
        ...     with LazyUpgrade(store, encoder, texts, Path(folder, "exact.sqlite")) as lazy:
        ...         print(lazy.search(exact[:1], k=1, rerank=3), lazy.embedded)
        [[0]] 3
    """

    @checked
    def __init__(
        self,
        store: VectorStore,
        encoder: Any,
        texts: Callable[[list[Any]], Sequence[str | None]],
        kept: str | Path,
        *,
        metric: Metric = "cosine",
        every: int = 1000,
    ) -> None:
        self.store, self.encoder, self.texts, self.metric, self.every = store, encoder, texts, metric, every
        self.embedded = 0
        self._file = Path(kept).expanduser()
        with _name_file_in_errors(self._file):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self._file)
            with self._db:
                self._db.execute(
                    "CREATE TABLE IF NOT EXISTS exact (id PRIMARY KEY, vector BLOB, in_store INTEGER NOT NULL)"
                )
            if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'exact' AND type = 'table'").fetchone():
                raise sqlite3.DatabaseError("'exact' is not a table")
        self._check_file()

    def _read(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with _name_file_in_errors(self._file):
            return self._db.execute(query, values).fetchall()

    def _vectors(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, Any]]:
        """Return ids and their vectors; the vector is None for documents without a text."""
        with decoding(self._file):
            return [
                (id_, None if vector is None else np.frombuffer(vector, np.float32))
                for id_, vector in self._read(query, values)
            ]

    def _write(self, query: str, rows: Iterable[Sequence[Any]]) -> None:
        """Write all rows or none."""
        with _name_file_in_errors(self._file), self._db:
            self._db.executemany(query, rows)

    def _check_file(self) -> None:
        """Raise an error if re-embedding three stored documents shows that the encoder or the store differs."""
        stored = self._vectors("SELECT id, vector FROM exact WHERE vector IS NOT NULL LIMIT ?", (CHECKED,))
        texts = list(self.texts([id_ for id_, _ in stored])) if stored else []
        with_text = [(text, vector) for text, (_, vector) in zip(texts, stored, strict=True) if text is not None]
        if not with_text:
            return
        fresh = normalized(encode(self.encoder, [text for text, _ in with_text]))
        rows = [vector for _, vector in with_text]
        alike = [
            len(a) == len(b) and float(a @ normalized(b[None])[0]) > SAME_COSINE
            for a, b in zip(fresh, rows, strict=True)
        ]
        if not any(alike):
            self._db.close()
            raise ValueError(
                f"{self._file} belongs to a different encoder or store: re-embedding {len(with_text)} of its "
                "documents gives different vectors; use a new file"
            )

    def __enter__(self) -> Self:
        """Return the object."""
        return self

    def __exit__(self, *error: object) -> None:
        """Update the store if no error occurred, and close the file."""
        if error[0] is None:
            self.close()
        else:
            self._db.close()  # its vectors go to the store at the next update

    def close(self) -> None:
        """Write all exact vectors to the store, and close the file."""
        try:
            self.update_store()
        finally:
            self._db.close()

    @property
    def exact(self) -> int:
        """Number of documents with exact vectors."""
        return int(self._read("SELECT count(*) FROM exact WHERE vector IS NOT NULL")[0][0])

    def search(self, queries: Any, k: int = 10, *, rerank: int = 100) -> list[list[Any]]:
        """Search, re-embed the retrieved documents, and re-rank them.

        Args:
            queries: ``(n, d)`` vectors of the new encoder.
            k: Number of documents for each query.
            rerank: Number of mapped documents to embed and re-rank for each query; at least k.

        Returns:
            Ids for each query, nearest first.

        Raises:
            ValueError: If k is greater than ``rerank``.
        """
        if not 1 <= k <= rerank:
            raise ValueError(f"k must be from 1 to rerank, {rerank}, got {k}")
        query_rows = read_vectors(queries, "queries").astype(np.float32)
        neighbours = self.store.search(query_rows, rerank)
        exact = self._exact_vectors(list(dict.fromkeys(id_ for row in neighbours for id_ in row)))
        ranked_ids = []
        for query, retrieved in zip(query_rows, neighbours, strict=True):
            candidates = np.stack([exact[id_] for id_ in retrieved])
            order = exact_search(query[None], candidates, min(k, len(retrieved)), metric=self.metric)[0][0]
            ranked_ids.append([retrieved[position] for position in order])
        return ranked_ids

    def embed(self, ids: Sequence[Any]) -> int:
        """Re-embed documents without a query.

        Args:
            ids: Ids of documents; see :func:`rows_first`.

        Returns:
            Number of documents with exact vectors; the remaining documents do not have a text.
        """
        ids = _sqlite_ids(ids)
        self._exact_vectors(ids)
        return sum(vector is not None for vector in self._stored_vectors(ids).values())

    def forget(self, ids: Sequence[Any]) -> None:
        """Drop the exact vectors of documents with changed texts; the next search re-embeds them.

        Args:
            ids: Ids of documents.
        """
        self._write("DELETE FROM exact WHERE id = ?", [(id_,) for id_ in _sqlite_ids(ids)])

    def update_store(self) -> int:
        """Write pending exact vectors to the store.

        Returns:
            Number of vectors written.
        """
        waiting = self._vectors(f"SELECT id, vector FROM exact WHERE {WAITING}")
        for start in range(0, len(waiting), self.every):
            chunk = waiting[start : start + self.every]
            ids = [id_ for id_, _ in chunk]
            with write_errors(f"the {type(self.store).__name__}"):
                self.store.replace(ids, np.stack([vector for _, vector in chunk]))
            self._write("UPDATE exact SET in_store = 1 WHERE id = ?", [(id_,) for id_ in ids])
        return len(waiting)

    def _stored_vectors(self, ids: Sequence[Any]) -> dict[Any, Rows | None]:
        """Return the stored vectors of ids; None for a document without a text."""
        vectors: dict[Any, Rows | None] = {}
        for start in range(0, len(ids), 500):
            chunk = ids[start : start + 500]
            placeholders = ", ".join("?" * len(chunk))
            vectors |= dict(self._vectors(f"SELECT id, vector FROM exact WHERE id IN ({placeholders})", chunk))
        return vectors

    def _exact_vectors(self, ids: list[Any]) -> dict[Any, Rows]:
        """Return exact vectors, embedding new documents; documents without a text keep their mapped vectors."""
        exact = self._stored_vectors(ids)
        unknown = [id_ for id_ in ids if id_ not in exact]
        if unknown:
            texts = list(self.texts(unknown))
            if len(texts) != len(unknown):
                raise ValueError(
                    f"texts must return one text or None per id ({len(unknown)} ids), got {len(texts)} texts"
                )
            with_text = [(id_, text) for id_, text in zip(unknown, texts, strict=True) if text is not None]
            fresh = encode(self.encoder, [text for _, text in with_text]) if with_text else np.empty((0, 0), np.float32)
            fresh = normalized(fresh) if self.metric == "cosine" else fresh
            if with_text and self.metric != "cosine" and not self.embedded:
                self._check_lengths([id_ for id_, _ in with_text], fresh)
            vectors: dict[Any, Rows | None] = dict.fromkeys(unknown) | dict(
                zip([id_ for id_, _ in with_text], fresh, strict=True)
            )
            self._write(
                "INSERT OR REPLACE INTO exact VALUES (?, ?, 0)",
                [(id_, None if row is None else row.tobytes()) for id_, row in vectors.items()],
            )
            self.embedded += len(with_text)
            exact |= vectors
        without_text = [id_ for id_ in ids if exact[id_] is None]
        exact |= dict(zip(without_text, self.store.vectors(without_text), strict=True)) if without_text else {}
        if self._read(f"SELECT count(*) FROM exact WHERE {WAITING}")[0][0] >= self.every:
            self.update_store()
        return {id_: row for id_, row in exact.items() if row is not None}

    def _check_lengths(self, ids: list[Any], fresh: Rows) -> None:
        """Raise an error if exact vectors differ in length from the vectors they replace, which distorts ranking."""
        stored, exact = lengths(self.store.vectors(ids)), lengths(fresh)
        if stored.size and exact.size and outside_range(exact, (float(stored.min()), float(stored.max()))):
            raise ValueError(
                f"encoder must return vectors of lengths {stored.min():.3g} to {stored.max():.3g} as in the store, got "
                f"{exact.min():.3g} to {exact.max():.3g}, and metric {self.metric} depends on lengths: configure "
                "normalisation as for the pairs"
            )


@contextmanager
def _name_file_in_errors(file: Path) -> Iterator[None]:
    """Add the file name to errors of SQLite and of the disk."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise OSError(
            f"{file} could not be used ({error}); its vectors are unchanged: free disk space, end the process that "
            "locks the file, or use a new file"
        ) from error


def _sqlite_ids(ids: Sequence[Any]) -> list[Any]:
    """Convert numpy integers to int, as SQLite requires."""
    return [id_.item() if isinstance(id_, np.generic) else id_ for id_ in ids]


@checked
def rows_first(
    documents: Any, count: int, *, first: First = "hubs", queries: Any = None, metric: Metric = "cosine", seed: int = 0
) -> npt.NDArray[np.int64]:
    """Choose the rows of an index to re-embed first.

    Args:
        documents: ``(n, d)`` vectors of the index.
        count: Number of rows.
        first: ``"hubs"``: rows that are most often among the ten nearest neighbours of documents (at most 20,000 evenly
            spaced documents); ``"asked"``: among the ten nearest neighbours of queries; ``"random"``: random rows. Ties
            are broken at random.
        queries: ``(q, d)`` past queries in the space of the index; only for ``"asked"``.
        metric: Metric of the index.
        seed: Seed.

    Returns:
        ``(count,)`` row numbers in order of priority.

    Raises:
        ValueError: If count is out of range, or ``queries`` do not match ``first``.

    Example:
        >>> documents = np.random.default_rng(0).normal(size=(30, 2))
        >>> asked = rows_first(documents, 10, first="asked", queries=documents[[4]])
        >>> set(asked.tolist()) == set(exact_search(documents[[4]], documents, 10)[0][0].tolist())
        True
    """
    rows = read_vectors(documents, "documents")
    if not 1 <= count <= len(rows):
        raise ValueError(f"count must be from 1 to the number of documents, {len(rows)}, got {count}")
    if (first == "asked") != (queries is not None):
        raise ValueError("`queries` must be passed with first='asked', and only then")
    order = np.random.default_rng(seed).permutation(len(rows))
    if first == "random":
        return order[:count]
    neighbour_count = min(NEAR, len(rows) - 1)
    if first == "asked":
        neighbours = exact_search(queries, rows, max(neighbour_count, 1), metric=metric)[0]
    else:
        sample = np.unique(np.linspace(0, len(rows) - 1, min(HUBS_OF, len(rows))).astype(int))
        neighbours = exact_search(rows[sample], rows, neighbour_count + 1, metric=metric)[0]
        neighbours = np.where(neighbours == sample[:, None], -1, neighbours)
    frequency = np.bincount(neighbours[neighbours >= 0], minlength=len(rows))
    return order[np.argsort(-frequency[order], kind="stable")][:count]
