"""Upgrades of vectors in files: what fits, locks, what exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_stitch_embeddings import EmbeddingMap, fit_embedding_map, normalized, read_vectors, upgrade
from hf_stitch_embeddings.stores import ArrayStore

from hf_stitch.stitches import LinearStitch

VECTORS = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
MAP = EmbeddingMap.of(LinearStitch.of(weight=torch.randn(3, 4, generator=torch.Generator().manual_seed(0))))


def store_in(folder: Path) -> ArrayStore:
    np.save(folder / "old.npy", VECTORS)
    return ArrayStore(folder / "old.npy", folder / "new.npy")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"direction": "query"}, "requires a map of direction 'index'"),
        ({"metric": "l2"}, "must be cosine as in .*old.npy, got l2"),
        ({"stitch": LinearStitch(9, 3)}, "requires vectors of width 9, got width 4 from .*old.npy"),
    ],
)
def test_maps_that_do_not_fit(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    made = EmbeddingMap.of(**{"stitch": MAP.stitch, **options})
    with pytest.raises(ValueError, match=message):
        upgrade(store_in(tmp_path), made, progress=False)


def test_zero_vectors(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    np.save(store.source, np.where(np.arange(50)[:, None] == 25, 0, VECTORS))
    with pytest.raises(ValueError, match=r"1 vectors of .* are zero or not finite, e.g. ids \[25\]"):
        upgrade(store, MAP, batch_size=10, progress=False)


def test_a_second_upgrade_at_the_same_time_is_refused(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.start("key", 3)
    with pytest.raises(OSError, match="another process is upgrading"):
        upgrade(ArrayStore(store.source, store.target), MAP, progress=False)


def test_a_target_that_exists_stays(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.target.write_bytes(b"precious")
    with pytest.raises(FileExistsError, match="exists; delete it"):
        upgrade(store, MAP, progress=False)
    assert store.target.read_bytes() == b"precious"


def test_a_stored_row_that_disagrees_with_the_map(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    write = store.write

    def wrong(ids: range, vectors: np.ndarray) -> None:
        write(ids, np.where(np.arange(len(vectors))[:, None] == 7, -vectors, vectors))

    store.write = wrong  # type: ignore[assignment, method-assign]
    with pytest.raises(ValueError, match=r"1 of 50 verified rows .* id 7:"):
        upgrade(store, MAP, progress=False)
    assert not store.target.exists()


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_dtypes(dtype: type, tmp_path: Path) -> None:
    np.save(tmp_path / "old.npy", VECTORS.astype(dtype))
    upgrade(ArrayStore(tmp_path / "old.npy", tmp_path / "new.npy"), MAP, batch_size=7, progress=False)
    np.testing.assert_allclose(np.load(tmp_path / "new.npy"), MAP(VECTORS.astype(dtype)), atol=1e-6)


@pytest.mark.parametrize("quantization", ["binary", "int8"])
def test_integers_are_read_as_what_they_stand_for(quantization: Any, tmp_path: Path) -> None:
    codes = np.random.default_rng(0).integers(0, 256, size=(50, 4 if quantization == "int8" else 2), dtype=np.uint8)
    ranges = np.array([[-1, -2, -3, -4], [1, 2, 3, 4]]) if quantization == "int8" else None
    options = {"quantization": quantization}
    np.save(tmp_path / "old.npy", codes)
    if ranges is not None:
        np.save(tmp_path / "ranges.npy", ranges)
        options["ranges"] = str(tmp_path / "ranges.npy")  # as the command line passes it
    old = read_vectors(codes, quantization=quantization, ranges=ranges)
    made = EmbeddingMap.of(LinearStitch.of(weight=torch.randn(3, old.shape[1])))
    with pytest.raises(ValueError, match=r"old\.npy must be floating point, got uint8 .* or to the store"):
        upgrade(ArrayStore(tmp_path / "old.npy", tmp_path / "new.npy"), made, progress=False)
    upgrade(ArrayStore(tmp_path / "old.npy", tmp_path / "new.npy", **options), made, batch_size=7, progress=False)
    np.testing.assert_allclose(np.load(tmp_path / "new.npy"), made(old), atol=1e-6)


def test_a_store_of_one_row_and_an_empty_one(tmp_path: Path) -> None:
    np.save(tmp_path / "old.npy", VECTORS[:1])
    assert upgrade(ArrayStore(tmp_path / "old.npy", tmp_path / "new.npy"), MAP, progress=False).rows == 1
    np.save(tmp_path / "old.npy", VECTORS[:0])
    with pytest.raises(ValueError, match=r"old\.npy must not be empty, got shape \(0, 4\)"):
        upgrade(ArrayStore(tmp_path / "old.npy", tmp_path / "other.npy"), MAP, progress=False)


def test_a_map_of_raw_vectors_and_a_store_of_normalised_ones(tmp_path: Path) -> None:
    old = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
    fitted = fit_embedding_map(old, old[:, ::-1], map="ridge", direction="index", progress=False)
    np.save(tmp_path / "old.npy", normalized(old))
    with pytest.raises(ValueError, match="have length 1, but the map was fitted to unnormalised vectors"):
        upgrade(ArrayStore(tmp_path / "old.npy", tmp_path / "new.npy"), fitted, progress=False)
    np.save(tmp_path / "old.npy", old)
    upgrade(ArrayStore(tmp_path / "old.npy", tmp_path / "other.npy"), fitted, progress=False)


def test_nothing_but_the_new_file_is_left(tmp_path: Path) -> None:
    upgrade(store_in(tmp_path), MAP, progress=False)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["new.npy", "old.npy"]


def test_a_broken_journal_is_named(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.start("key", 3)
    store.close()
    (tmp_path / "new.npy.upgrade" / "journal.json").write_text("[]")
    with pytest.raises(ValueError, match=r"new\.npy\.upgrade cannot be read"):
        upgrade(ArrayStore(store.source, store.target), MAP, progress=False)
