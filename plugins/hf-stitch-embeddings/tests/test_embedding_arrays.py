"""Upgrades of vectors in files: locks, changes, what exists."""

from __future__ import annotations

import resource
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_stitch_embeddings import EmbeddingMap, fit_embedding_map, normalized, upgrade
from hf_stitch_embeddings.stores import ArrayStore

from hf_stitch.stitches import LinearStitch

from tests.killing import killed_at_every_operation, survives  # isort: skip

VECTORS = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
MAP = EmbeddingMap.of(LinearStitch.of(weight=torch.randn(3, 4, generator=torch.Generator().manual_seed(0))))


def store_in(folder: Path) -> ArrayStore:
    np.save(folder / "old.npy", VECTORS)
    return ArrayStore(folder / "old.npy", folder / "new.npy")


def test_a_second_upgrade_at_the_same_time_is_refused(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.start("key", 3)
    with pytest.raises(OSError, match="another process upgrades"):
        upgrade(ArrayStore(store.source, store.target), MAP, progress=False)


def test_a_target_that_exists_stays(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.target.write_bytes(b"precious")
    with pytest.raises(FileExistsError, match="delete it, or upgrade into another file"):
        upgrade(store, MAP, progress=False)
    assert store.target.read_bytes() == b"precious"


def test_vectors_that_change_between_two_runs(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.start("key", 3)
    store.write(range(10), np.ones((10, 3), np.float32))
    store.close()
    np.save(store.source, VECTORS[::-1])
    with pytest.raises(ValueError, match=r"has 10 of 50 rows of an upgrade"):
        upgrade(ArrayStore(store.source, store.target), MAP, progress=False)


def test_a_stored_row_that_disagrees_with_the_map(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    write = store.write

    def wrong(ids: range, vectors: np.ndarray) -> None:
        write(ids, np.where(np.arange(len(vectors))[:, None] == 7, -vectors, vectors))

    store.write = wrong  # type: ignore[assignment, method-assign]
    with pytest.raises(ValueError, match=r"1 of 50 rows .* id 7:"):
        upgrade(store, MAP, progress=False)
    assert not store.target.exists()


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int8])
def test_other_dtypes(dtype: type, tmp_path: Path) -> None:
    vectors = np.round(VECTORS * 20).astype(dtype) if dtype is np.int8 else VECTORS.astype(dtype)
    np.save(tmp_path / "old.npy", vectors)
    upgrade(ArrayStore(tmp_path / "old.npy", tmp_path / "new.npy"), MAP, batch_size=7, progress=False)
    np.testing.assert_allclose(np.load(tmp_path / "new.npy"), MAP(vectors), atol=1e-6)


def test_a_map_of_raw_vectors_and_a_store_of_normalised_ones(tmp_path: Path) -> None:
    old = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
    fitted = fit_embedding_map(old, old[:, ::-1], map="ridge", direction="index", progress=False)
    np.save(tmp_path / "old.npy", normalized(old))
    with pytest.raises(ValueError, match="have length 1, and the map was fitted to vectors of other lengths"):
        upgrade(ArrayStore(tmp_path / "old.npy", tmp_path / "new.npy"), fitted, progress=False)
    np.save(tmp_path / "old.npy", old)
    upgrade(ArrayStore(tmp_path / "old.npy", tmp_path / "other.npy"), fitted, progress=False)


def test_nothing_but_the_new_file_is_left(tmp_path: Path) -> None:
    upgrade(store_in(tmp_path), MAP, progress=False)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["new.npy", "old.npy"]


def test_a_full_disk_is_an_error_and_the_upgrade_continues(tmp_path: Path) -> None:
    """Not the end of the process, which writes to mapped memory cause."""
    old, new = store_in(tmp_path).source, tmp_path / "new.npy"

    def attempt() -> None:
        store = ArrayStore(old, new)
        store.start("key", 3)
        store.write(range(5), np.ones((5, 3), np.float32))
        resource.setrlimit(resource.RLIMIT_FSIZE, (store._new.file.stat().st_size - 100,) * 2)
        with pytest.raises(
            OSError, match=r"vectors\.npy could not be written \(File too large\); make room and run again"
        ):
            store.write(range(5, 50), np.ones((45, 3), np.float32))

    assert survives(attempt)
    again = ArrayStore(old, new)
    again.start("key", 3)
    assert again.missing() == 45


def test_kills_leave_no_new_file_or_a_whole_one_and_nothing_beside_it(tmp_path: Path) -> None:
    store, states = store_in(tmp_path), set()
    for _ in killed_at_every_operation(lambda: upgrade(store_in(tmp_path), MAP, batch_size=30, progress=False), step=2):
        states.add(store.target.exists())
        with pytest.raises(FileExistsError) if store.target.exists() else nullcontext():
            upgrade(ArrayStore(store.source, store.target), MAP, progress=False)
        np.testing.assert_array_equal(np.load(store.target), MAP(VECTORS))
        assert sorted(each.name for each in tmp_path.iterdir()) == ["new.npy", "old.npy"]
        store.target.unlink()
    assert states == {False, True}


def test_a_broken_journal_is_named(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.start("key", 3)
    store.close()
    (tmp_path / "new.npy.upgrade" / "journal.json").write_text("[]")
    with pytest.raises(ValueError, match=r"new\.npy\.upgrade cannot be read"):
        upgrade(ArrayStore(store.source, store.target), MAP, progress=False)
