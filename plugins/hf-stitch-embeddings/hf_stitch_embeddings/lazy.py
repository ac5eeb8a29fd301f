"""Lazy upgrade: documents are embedded again when a query comes near them, and their mapped vectors replaced."""

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
from hf_stitch_embeddings.stores.base import Rows, VectorStore, written
from hf_stitch_embeddings.vectors import Metric, differ, encode, lengths, normalized, read_vectors

First: TypeAlias = Literal["hubs", "asked", "random"]
"""Which rows to embed again first: those nearest to other documents, to queries of the past, or random ones."""
WAITING = "in_store = 0 AND vector IS NOT NULL"
CHECKED, ALIKE = 3, 0.99
"""Documents by which a file is checked, and smallest cosine of equal ones (remote encoders are not exact)."""
NEAR, HUBS_OF = 10, 20_000
"""Neighbours that count, and most documents whose neighbours are counted."""


class LazyUpgrade:
    """Search in an upgraded store that embeds again what it finds, and so becomes exact where it is used.

    A query finds its nearest mapped documents; those that have a text and are not exact yet are embedded by the new
    encoder, and all are ranked again. Exact vectors are kept in a file, which survives ``kill -9``, and replace the
    mapped ones in the store, :attr:`every` so many rows and at the end.

    Args:
        store: An upgraded store.
        encoder: The new encoder, as for :func:`~hf_stitch_embeddings.encode`.
        texts: Ids -> their texts; None for a row whose text is gone.
        kept: File for exact vectors (SQLite), created if needed; of this store and this encoder only,
            which is checked by embedding three of its documents again.
        metric: Metric of the store.
        every: Rows after which the store is updated.

    Attributes:
        embedded: Number of texts that this object has embedded and kept.

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
        self._place = Path(kept).expanduser()
        with _named(self._place):
            self._place.parent.mkdir(parents=True, exist_ok=True)
            self._kept = sqlite3.connect(self._place)
            with self._kept:
                self._kept.execute(
                    "CREATE TABLE IF NOT EXISTS exact (id PRIMARY KEY, vector BLOB, in_store INTEGER NOT NULL)"
                )
            if not self._kept.execute("SELECT 1 FROM sqlite_master WHERE name = 'exact' AND type = 'table'").fetchone():
                raise sqlite3.DatabaseError("it has something else in the place of the table")
        self._check_file()

    def _read(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with _named(self._place):
            return self._kept.execute(query, values).fetchall()

    def _vectors(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, Any]]:
        """Read ids and their vectors, which are None for documents without a text."""
        with decoding(self._place):
            return [
                (each, None if vector is None else np.frombuffer(vector, np.float32))
                for each, vector in self._read(query, values)
            ]

    def _write(self, query: str, rows: Iterable[Sequence[Any]]) -> None:
        """Write all rows or none."""
        with _named(self._place), self._kept:
            self._kept.executemany(query, rows)

    def _check_file(self) -> None:
        """Embed up to three kept documents again: another encoder or another store gives other vectors."""
        kept = self._vectors("SELECT id, vector FROM exact WHERE vector IS NOT NULL LIMIT ?", (CHECKED,))
        texts = list(self.texts([each for each, _ in kept])) if kept else []
        there = [(text, vector) for text, (_, vector) in zip(texts, kept, strict=True) if text is not None]
        if not there:
            return
        found = normalized(encode(self.encoder, [text for text, _ in there]))
        rows = [vector for _, vector in there]
        alike = [
            len(a) == len(b) and float(a @ normalized(b[None])[0]) > ALIKE for a, b in zip(found, rows, strict=True)
        ]
        if not any(alike):
            self._kept.close()
            raise ValueError(
                f"{self._place} has exact vectors of another encoder or another store: the texts of {len(there)} of "
                "its documents now have other vectors; use another file"
            )

    def __enter__(self) -> Self:
        """Return the object."""
        return self

    def __exit__(self, *error: object) -> None:
        """Update the store, unless an error is on its way, and close the file."""
        if error[0] is None:
            self.close()
        else:
            self._kept.close()  # what is kept there comes into the store next time

    def close(self) -> None:
        """Put all exact vectors into the store, and close the file."""
        try:
            self.update_store()
        finally:
            self._kept.close()

    @property
    def exact(self) -> int:
        """Number of documents whose vectors are exact."""
        return int(self._read("SELECT count(*) FROM exact WHERE vector IS NOT NULL")[0][0])

    def search(self, queries: Any, k: int = 10, *, rerank: int = 100) -> list[list[Any]]:
        """Search, embed again what is found, and rank it again.

        Args:
            queries: ``(n, d)`` vectors of the new encoder.
            k: Number of documents for each query.
            rerank: Number of mapped documents that are embedded and ranked for each query; at least k.

        Returns:
            For each query ids, nearest first.

        Raises:
            ValueError: If k is greater than ``rerank``.
        """
        if not 1 <= k <= rerank:
            raise ValueError(f"k must be from 1 to rerank, {rerank}, got {k}")
        asked = read_vectors(queries, "queries").astype(np.float32)
        found = self.store.search(asked, rerank)
        exact = self._exact(list(dict.fromkeys(each for row in found for each in row)))
        answers = []
        for query, near in zip(asked, found, strict=True):
            there = np.stack([exact[each] for each in near])
            order = exact_search(query[None], there, min(k, len(near)), metric=self.metric)[0][0]
            answers.append([near[place] for place in order])
        return answers

    def embed(self, ids: Sequence[Any]) -> int:
        """Embed documents again, without a query.

        Args:
            ids: Ids of documents; see :func:`rows_first`.

        Returns:
            Number of those that are now exact; the others have no text.
        """
        ids = _plain(ids)
        self._exact(ids)
        return sum(vector is not None for vector in self._known(ids).values())

    def forget(self, ids: Sequence[Any]) -> None:
        """Forget exact vectors, because texts have changed; the next query that comes near embeds them again.

        Args:
            ids: Ids of documents.
        """
        self._write("DELETE FROM exact WHERE id = ?", [(each,) for each in _plain(ids)])

    def update_store(self) -> int:
        """Put exact vectors that are not there yet into the store.

        Returns:
            Their number.
        """
        waiting = self._vectors(f"SELECT id, vector FROM exact WHERE {WAITING}")
        for start in range(0, len(waiting), self.every):
            some = waiting[start : start + self.every]
            ids = [each for each, _ in some]
            with written(f"the {type(self.store).__name__}"):
                self.store.replace(ids, np.stack([vector for _, vector in some]))
            self._write("UPDATE exact SET in_store = 1 WHERE id = ?", [(each,) for each in ids])
        return len(waiting)

    def _known(self, ids: Sequence[Any]) -> dict[Any, Rows | None]:
        """Return what the file has of some ids: a vector, or None for a document without a text."""
        found: dict[Any, Rows | None] = {}
        for start in range(0, len(ids), 500):
            some = ids[start : start + 500]
            marks = ", ".join("?" * len(some))
            found |= dict(self._vectors(f"SELECT id, vector FROM exact WHERE id IN ({marks})", some))
        return found

    def _exact(self, ids: list[Any]) -> dict[Any, Rows]:
        """Return exact vectors of documents, embedding those that are not known; mapped ones where no text is."""
        known = self._known(ids)
        unknown = [each for each in ids if each not in known]
        if unknown:
            texts = list(self.texts(unknown))
            if len(texts) != len(unknown):
                raise ValueError(f"texts returned {len(texts)} texts for {len(unknown)} ids; return None for no text")
            there = [(each, text) for each, text in zip(unknown, texts, strict=True) if text is not None]
            fresh = encode(self.encoder, [text for _, text in there]) if there else np.empty((0, 0), np.float32)
            fresh = normalized(fresh) if self.metric == "cosine" else fresh
            if there and self.metric != "cosine" and not self.embedded:
                self._check_lengths([each for each, _ in there], fresh)
            vectors: dict[Any, Rows | None] = dict.fromkeys(unknown) | dict(
                zip([each for each, _ in there], fresh, strict=True)
            )
            self._write(
                "INSERT OR REPLACE INTO exact VALUES (?, ?, 0)",
                [(each, None if row is None else row.tobytes()) for each, row in vectors.items()],
            )
            self.embedded += len(there)
            known |= vectors
        gone = [each for each in ids if known[each] is None]
        known |= dict(zip(gone, self.store.vectors(gone), strict=True)) if gone else {}
        if self._read(f"SELECT count(*) FROM exact WHERE {WAITING}")[0][0] >= self.every:
            self.update_store()
        return {each: row for each, row in known.items() if row is not None}

    def _check_lengths(self, ids: list[Any], fresh: Rows) -> None:
        """Refuse vectors of other lengths than those that they replace, which would outrank all others, or none."""
        there = lengths(self.store.vectors(ids))
        if there.size and (found := lengths(fresh)).size and differ(found, (float(there.min()), float(there.max()))):
            raise ValueError(
                f"the encoder makes vectors of lengths from {found.min():.3g} to {found.max():.3g}, and those in the "
                f"store have {there.min():.3g} to {there.max():.3g}, on which ranking by {self.metric} depends: let it "
                "make vectors like those of the pairs, normalised or not"
            )


@contextmanager
def _named(place: Path) -> Iterator[None]:
    """Name the file in errors of SQLite and of the disk."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise OSError(
            f"{place} could not be used ({error}); what was kept in it is unchanged: make room on the disk, end the "
            "process that locks it, or use another file"
        ) from error


def _plain(ids: Sequence[Any]) -> list[Any]:
    """Return ids as SQLite compares them: numbers of numpy as int."""
    return [each.item() if isinstance(each, np.generic) else each for each in ids]


@checked
def rows_first(
    documents: Any, count: int, *, first: First = "hubs", queries: Any = None, metric: Metric = "cosine", seed: int = 0
) -> npt.NDArray[np.int64]:
    """Choose the rows of an index to embed again first.

    Args:
        documents: ``(n, d)``: the index.
        count: Number of rows.
        first: ``"hubs"``: those that are most often among the ten nearest of other documents, at most 20,000 evenly
            spaced ones; ``"asked"``: among the ten nearest of queries; ``"random"``. Ties are broken at random.
        queries: ``(q, d)``: queries of the past, in the space of the index; needed for ``"asked"`` alone.
        metric: Metric of the index.
        seed: Seed.

    Returns:
        ``(count,)`` numbers of rows, the first ones first.

    Raises:
        ValueError: If count is out of range, or queries are missing or not needed.

    Example:
        >>> documents = np.random.default_rng(0).normal(size=(30, 2))
        >>> asked = rows_first(documents, 10, first="asked", queries=documents[[4]])
        >>> set(asked.tolist()) == set(exact_search(documents[[4]], documents, 10)[0][0].tolist())
        True
    """
    there = read_vectors(documents, "documents")
    if not 1 <= count <= len(there):
        raise ValueError(f"count must be from 1 to the number of documents, {len(there)}, got {count}")
    if (first == "asked") != (queries is not None):
        raise ValueError("first='asked' needs queries of the past, and the others take none")
    order = np.random.default_rng(seed).permutation(len(there))
    if first == "random":
        return order[:count]
    near = min(NEAR, len(there) - 1)
    if first == "asked":
        found = exact_search(queries, there, max(near, 1), metric=metric)[0]
    else:
        some = np.unique(np.linspace(0, len(there) - 1, min(HUBS_OF, len(there))).astype(int))
        found = exact_search(there[some], there, near + 1, metric=metric)[0]
        found = np.where(found == some[:, None], -1, found)
    counts = np.bincount(found[found >= 0], minlength=len(there))
    return order[np.argsort(-counts[order], kind="stable")][:count]
