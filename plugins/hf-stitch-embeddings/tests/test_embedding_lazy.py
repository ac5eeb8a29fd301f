"""Lazy upgrade: exact answers where texts are, what is kept, what is replaced."""

from __future__ import annotations

import resource
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_stitch_embeddings import LazyUpgrade, exact_search, normalized, rows_first
from hf_stitch_embeddings.stores import ArrayStore

from tests.killing import survives  # isort: skip

RANDOM = np.random.default_rng(0)
EXACT = normalized(RANDOM.normal(size=(300, 8)).astype(np.float32))
MAPPED = normalized(EXACT + 0.3 * RANDOM.normal(size=EXACT.shape).astype(np.float32))
QUERIES = normalized(RANDOM.normal(size=(12, 8)).astype(np.float32))
TRUTH = exact_search(QUERIES, EXACT, 10)[0].tolist()


class Encoder:
    """An encoder that knows the exact vectors and counts texts."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.texts: list[str] = []
        self.fails_after = fails_after

    def encode(self, texts: list[str]) -> Any:
        if self.fails_after is not None and len(self.texts) >= self.fails_after:
            raise RuntimeError("the API is gone")
        self.texts += texts
        return EXACT[[int(text) for text in texts]]


def texts_of(ids: list[int]) -> list[str | None]:
    return [str(each) for each in ids]


def replaced(folder: Path) -> set[int]:
    """Return the rows of the store that are exact."""
    return set(np.flatnonzero(np.isclose(np.load(folder / "new.npy"), EXACT, atol=1e-6).all(1)).tolist())


@pytest.fixture
def store(tmp_path: Path) -> ArrayStore:
    np.save(tmp_path / "new.npy", MAPPED)
    return ArrayStore(tmp_path / "old.npy", tmp_path / "new.npy")


def test_reranking_all_documents_is_re_embedding(store: ArrayStore, tmp_path: Path) -> None:
    encoder = Encoder()
    with LazyUpgrade(store, encoder, texts_of, tmp_path / "exact.sqlite") as lazy:
        assert lazy.search(QUERIES, 10, rerank=300) == TRUTH
        assert lazy.search(QUERIES, 10, rerank=300) == TRUTH
        assert (lazy.embedded, lazy.exact, len(encoder.texts)) == (300, 300, 300)
    np.testing.assert_allclose(np.load(tmp_path / "new.npy"), EXACT, atol=1e-7)


@pytest.mark.parametrize(("metric", "length"), [("cosine", 1), ("l2", 1.5)])
def test_lengths_are_kept_where_they_count(metric: Any, length: float, store: ArrayStore, tmp_path: Path) -> None:
    def encoder(texts: list[str]) -> Any:
        return 1.5 * EXACT[[int(text) for text in texts]]

    with LazyUpgrade(store, encoder, texts_of, tmp_path / "exact.sqlite", metric=metric) as lazy:
        assert lazy.embed(range(20)) == 20
    np.testing.assert_allclose(np.load(tmp_path / "new.npy")[:20], length * EXACT[:20], atol=1e-6)


@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_vectors_of_other_lengths_than_those_in_the_store_are_refused(
    metric: Any, store: ArrayStore, tmp_path: Path
) -> None:
    def encoder(texts: list[str]) -> Any:
        return 5 * EXACT[[int(text) for text in texts]]

    with (
        pytest.raises(ValueError, match="vectors of lengths 1 to 1 as in the store, got 5 to 5"),
        LazyUpgrade(store, encoder, texts_of, tmp_path / "exact.sqlite", metric=metric) as lazy,
    ):
        lazy.search(QUERIES, 3)
    assert not replaced(tmp_path)


def test_reranked_answers_are_the_best_of_those_found(store: ArrayStore, tmp_path: Path) -> None:
    near = exact_search(QUERIES, MAPPED, 40)[0]
    expected = [[each for each in true if each in some][:3] for true, some in zip(
        exact_search(QUERIES, EXACT, 300)[0].tolist(), near.tolist(), strict=True)]  # fmt: skip
    with LazyUpgrade(store, Encoder(), texts_of, tmp_path / "exact.sqlite") as lazy:
        assert lazy.search(QUERIES, 3, rerank=40) == expected


def test_touched_rows_are_replaced_in_the_store(store: ArrayStore, tmp_path: Path) -> None:
    with LazyUpgrade(store, Encoder(), texts_of, tmp_path / "exact.sqlite", every=20) as lazy:
        lazy.search(QUERIES[:1], 10, rerank=15)
        np.testing.assert_array_equal(np.load(tmp_path / "new.npy"), MAPPED)
        lazy.search(QUERIES[1:3], 10, rerank=15)
        assert len(replaced(tmp_path)) == lazy.exact
    found = replaced(tmp_path)
    assert found == {int(text) for text in lazy.encoder.texts}


def test_documents_without_texts_keep_their_mapped_vectors(store: ArrayStore, tmp_path: Path) -> None:
    def some_texts(ids: list[int]) -> list[str | None]:
        return [None if each % 2 else str(each) for each in ids]

    encoder = Encoder()
    with LazyUpgrade(store, encoder, some_texts, tmp_path / "exact.sqlite") as lazy:
        lazy.search(QUERIES, 10, rerank=300)
        assert lazy.exact == lazy.embedded == 150
        lazy.search(QUERIES, 10, rerank=300)
        assert lazy.embed([0, 1, 2]) == 2
    np.testing.assert_array_equal(np.load(tmp_path / "new.npy")[1::2], MAPPED[1::2])


def test_what_was_embedded_survives_an_end_without_closing(store: ArrayStore, tmp_path: Path) -> None:
    lazy = LazyUpgrade(store, Encoder(), texts_of, tmp_path / "exact.sqlite")
    lazy.embed(np.arange(50))
    del lazy  # as after kill -9: no close, nothing in the store
    encoder = Encoder()
    with LazyUpgrade(store, encoder, texts_of, tmp_path / "exact.sqlite") as lazy:
        lazy.embed(range(60))
        assert encoder.texts[3:] == [str(each) for each in range(50, 60)]  # three check the file
    assert replaced(tmp_path) == set(range(60))


def test_an_api_that_fails_leaves_what_was_done(store: ArrayStore, tmp_path: Path) -> None:
    with LazyUpgrade(store, Encoder(fails_after=10), texts_of, tmp_path / "exact.sqlite") as lazy:
        lazy.embed(range(10))
        with pytest.raises(RuntimeError, match="the API is gone"):
            lazy.embed(range(20))
        assert lazy.exact == 10
    assert replaced(tmp_path) == set(range(10))


def test_a_full_disk_leaves_what_was_done(store: ArrayStore, tmp_path: Path) -> None:
    kept = tmp_path / "exact.sqlite"
    with LazyUpgrade(store, Encoder(), texts_of, kept) as lazy:
        lazy.embed(range(10))

    def attempt() -> None:
        lazy = LazyUpgrade(store, Encoder(), texts_of, kept)
        resource.setrlimit(resource.RLIMIT_FSIZE, (kept.stat().st_size,) * 2)
        with pytest.raises(OSError, match=r"exact\.sqlite could not be used \(.*\); its vectors are unchanged: free"):
            lazy.embed(range(300))

    assert survives(attempt)
    with LazyUpgrade(store, Encoder(), texts_of, kept) as lazy:
        assert lazy.exact == 10
        assert lazy.embed(range(20)) == 20
    assert replaced(tmp_path) == set(range(20))


@pytest.mark.parametrize("kind", ["text", "folder", "table", "view"])
def test_a_file_of_something_else(kind: str, store: ArrayStore, tmp_path: Path) -> None:
    kept = tmp_path / "exact.sqlite"
    if kind == "text":
        kept.write_text("no database" * 100)
    elif kind == "folder":
        kept.mkdir()
    else:
        made = {
            "table": "CREATE TABLE exact (name TEXT)",
            "view": "CREATE VIEW exact AS WITH RECURSIVE t(i) AS (SELECT 1 UNION ALL SELECT i FROM t) SELECT * FROM t",
        }
        with sqlite3.connect(kept) as other:
            other.execute(made[kind])
    with pytest.raises(OSError, match=r"exact\.sqlite could not be used .* use a new file"):
        LazyUpgrade(store, Encoder(), texts_of, kept)


@pytest.mark.parametrize("vector", ["text", 5, b"123"])
def test_a_file_with_something_else_than_vectors(vector: Any, store: ArrayStore, tmp_path: Path) -> None:
    with LazyUpgrade(store, Encoder(), texts_of, tmp_path / "exact.sqlite") as lazy:
        lazy.embed([1, 2, 3])
    with sqlite3.connect(tmp_path / "exact.sqlite") as other:
        other.execute("UPDATE exact SET vector = ?", (vector,))
    with pytest.raises(ValueError, match=r"exact\.sqlite cannot be read"):
        LazyUpgrade(store, Encoder(), texts_of, tmp_path / "exact.sqlite")


def test_forgotten_documents_are_embedded_again(store: ArrayStore, tmp_path: Path) -> None:
    encoder = Encoder()
    with LazyUpgrade(store, encoder, texts_of, tmp_path / "exact.sqlite") as lazy:
        lazy.embed(range(5))
        lazy.forget(np.array([2, 3]))
        assert lazy.exact == 3
        lazy.embed(range(5))
    assert encoder.texts == ["0", "1", "2", "3", "4", "2", "3"]


@pytest.mark.parametrize("width", [8, 3])
def test_a_file_of_another_encoder(store: ArrayStore, tmp_path: Path, width: int) -> None:
    with LazyUpgrade(store, Encoder(), texts_of, tmp_path / "exact.sqlite") as lazy:
        lazy.embed([1, 2, 3])
    with pytest.raises(ValueError, match="belongs to a different encoder or store"):
        LazyUpgrade(store, lambda texts: np.ones((len(texts), width)), texts_of, tmp_path / "exact.sqlite")
    with pytest.raises(ValueError, match="belongs to a different encoder or store"):
        LazyUpgrade(store, Encoder(), lambda ids: [str(each + 100) for each in ids], tmp_path / "exact.sqlite")


def test_rows_that_the_store_no_longer_has(store: ArrayStore, tmp_path: Path) -> None:
    with LazyUpgrade(store, Encoder(), texts_of, tmp_path / "exact.sqlite") as lazy:
        lazy.embed([10, 290])
        np.save(store.target, MAPPED[:100])
    found = np.load(store.target)
    np.testing.assert_allclose(found[10], EXACT[10], atol=1e-6)
    assert len(found) == 100


def test_bad_input(store: ArrayStore, tmp_path: Path) -> None:
    with LazyUpgrade(store, Encoder(), lambda ids: ["1"], tmp_path / "exact.sqlite") as lazy:
        with pytest.raises(ValueError, match=r"must return one text or None per id .3 ids., got 1"):
            lazy.embed([1, 2, 3])
        with pytest.raises(ValueError, match="from 1 to rerank, 5, got 10"):
            lazy.search(QUERIES, 10, rerank=5)


def test_rows_first() -> None:
    asked = rows_first(MAPPED, 30, first="asked", queries=QUERIES)
    times = np.bincount(exact_search(QUERIES, MAPPED, 10)[0].ravel(), minlength=300)
    assert times[asked].tolist() == sorted(times, reverse=True)[:30]
    hubs = rows_first(MAPPED, 300)
    near = exact_search(MAPPED, MAPPED, 11)[0][:, 1:]
    assert (np.diff(np.bincount(near.ravel(), minlength=300)[hubs]) <= 0).all()
    assert sorted(hubs.tolist()) == list(range(300))
    assert len(set(rows_first(MAPPED, 50, first="random").tolist())) == 50
    for options in ({"first": "asked"}, {"queries": QUERIES}, {"first": "best"}):
        with pytest.raises(ValueError, match="first"):
            rows_first(MAPPED, 5, **options)
    with pytest.raises(ValueError, match="from 1 to the number of documents"):
        rows_first(MAPPED, 301, first="random")
