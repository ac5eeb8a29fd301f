"""FAISS indexes that map queries answer as they do to mapped queries."""

from __future__ import annotations

import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_stitch_embeddings import EmbeddingMap

from hf_stitch.stitches import LinearStitch, LowRankStitch, ResidualMLPStitch

faiss = pytest.importorskip("faiss")
from hf_stitch_embeddings import upgrade  # noqa: E402
from hf_stitch_embeddings.stores.faiss import FaissStore, is_exact, search_mapped  # noqa: E402

from tests.killing import survives  # noqa: E402  # isort: skip

OLD, NEW = 16, 24
RANDOM = np.random.default_rng(0)
DOCUMENTS = RANDOM.normal(size=(500, OLD)).astype(np.float32)
DOCUMENTS /= np.linalg.norm(DOCUMENTS, axis=1, keepdims=True)
QUERIES = RANDOM.normal(size=(20, NEW)).astype(np.float32)
FACTORIES = ["Flat", "HNSW16", "IVF8,Flat", "SQ8", "IVF8,SQ8"]


def built(factory: str, metric: Any = None) -> Any:
    index = faiss.index_factory(OLD, factory, faiss.METRIC_INNER_PRODUCT if metric is None else metric)
    index.train(DOCUMENTS)
    if factory.startswith("IDMap"):
        index.add_with_ids(DOCUMENTS, np.arange(500) * 3)
    else:
        index.add(DOCUMENTS)
    return index


MAPS: dict[str, Callable[[], EmbeddingMap]] = {
    "affine": lambda: EmbeddingMap.of(LinearStitch(NEW, OLD), direction="query"),
    "low rank": lambda: EmbeddingMap.of(LowRankStitch(NEW, OLD, rank=5), direction="query"),
    "adjoint": lambda: EmbeddingMap.of(LinearStitch(OLD, NEW)).adjoint(),
    "dot": lambda: EmbeddingMap.of(LinearStitch(NEW, OLD), direction="query", metric="dot"),
}


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("name", MAPS)
def test_it_answers_as_to_mapped_queries(name: str, factory: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    index, embedding_map = built(factory), MAPS[name]()
    chain = search_mapped(index, embedding_map)
    expected_scores, expected = index.search(embedding_map(QUERIES), 10)
    scores, found = chain.search(QUERIES, 10)
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-4, atol=1e-5)
    assert (found == expected).mean() > 0.98  # ties may change places
    faiss.write_index(chain, str(tmp_path / "chain.faiss"))
    again = faiss.read_index(str(tmp_path / "chain.faiss")).search(QUERIES, 10)
    np.testing.assert_array_equal(again[1], found)


def test_distances_need_a_map_for_them() -> None:
    embedding_map = EmbeddingMap.of(LinearStitch(NEW, OLD), direction="query", metric="l2")
    index = built("Flat", faiss.METRIC_L2)
    np.testing.assert_array_equal(
        search_mapped(index, embedding_map).search(QUERIES, 5)[1], index.search(embedding_map(QUERIES), 5)[1]
    )
    with pytest.raises(ValueError, match="has metric l2, but the index ranks by inner products"):
        search_mapped(built("Flat"), embedding_map)


def test_documents_are_not_added_through_the_map_of_queries() -> None:
    index = built("Flat")
    chain = search_mapped(index, MAPS["affine"]())
    for action in (lambda: chain.add(QUERIES), lambda: chain.add_with_ids(QUERIES, np.arange(20))):
        with pytest.raises(TypeError, match="add documents, embedded by the old encoder, to the original index"):
            action()
    index.add(DOCUMENTS[:3])
    assert chain.search(QUERIES, 1)[1].shape == (20, 1) and index.ntotal == 503


@pytest.mark.parametrize(
    ("embedding_map", "why"),
    [
        (lambda: EmbeddingMap.of(LinearStitch(OLD, NEW)), r"upgrade the index with it, or use its adjoint\(\)"),
        (lambda: EmbeddingMap.old_model(OLD), "use old queries"),
        (
            lambda: EmbeddingMap.of(LinearStitch(NEW, 9), direction="query"),
            "must return vectors of width 16 as in the index, got 9",
        ),
        (lambda: EmbeddingMap.of(ResidualMLPStitch(NEW, OLD, hidden=3), direction="query"), "requires a linear map"),
    ],
)
def test_other_maps_are_refused(embedding_map: Callable[[], EmbeddingMap], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        search_mapped(built("Flat"), embedding_map())


INDEX_MAP = EmbeddingMap.of(LinearStitch.of(weight=torch.randn(NEW, OLD, generator=torch.Generator().manual_seed(0))))


def saved(folder: Path, factory: str, metric: Any = faiss.METRIC_INNER_PRODUCT) -> Path:
    path = folder / "old.faiss"
    faiss.write_index(built(factory, metric), str(path))
    return path


@pytest.mark.filterwarnings("ignore:.* returns vectors with an error")
@pytest.mark.parametrize("factory", [*FACTORIES, "SQfp16", "HNSW8,SQ8", "IVF4,PQ4", "IDMap,HNSW8"])
def test_the_new_index_is_of_the_same_kind(factory: str, tmp_path: Path) -> None:
    old = saved(tmp_path, factory.replace("IDMap,", ""))
    if "IDMap" in factory:
        wrapped = faiss.IndexIDMap(built(factory.replace("IDMap,", "")).__class__(OLD, 8, faiss.METRIC_INNER_PRODUCT))
        wrapped.add_with_ids(DOCUMENTS, np.arange(500) * 3)
        faiss.write_index(wrapped, str(old))
    upgrade(FaissStore(old, tmp_path / "new.faiss"), INDEX_MAP, progress=False)
    before, after = (faiss.read_index(str(tmp_path / name)) for name in ("old.faiss", "new.faiss"))
    assert type(after) is type(before)
    assert (after.ntotal, after.d, after.metric_type) == (500, NEW, before.metric_type)
    if "IVF" in factory:
        before_ivf, after_ivf = (faiss.extract_index_ivf(index) for index in (before, after))
        assert after_ivf.nlist == before_ivf.nlist
        after_ivf.nprobe = before_ivf.nlist
    # Each document finds itself, as far as the codes tell documents apart.
    queries = INDEX_MAP(DOCUMENTS)
    own = after.search(queries, 1)[1][:, 0] == np.arange(500) * (3 if "IDMap" in factory else 1)
    assert own.mean() > (0.5 if "PQ" in factory else 0.97)


def test_a_full_disk_leaves_the_old_index_and_is_an_error(tmp_path: Path) -> None:
    """FAISS itself ignores errors when it closes a file: of a few last bytes on a full disk, it tells nothing."""
    old, new = saved(tmp_path, "Flat"), tmp_path / "new.faiss"
    upgrade(FaissStore(old, new), INDEX_MAP, progress=False)
    whole = new.read_bytes()

    def attempt() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) - 1,) * 2)
        with pytest.raises(OSError, match=r"new\.faiss could not be written \(File too large\); .* unchanged"):
            FaissStore(old, new).replace([0], np.ones((1, NEW), np.float32))

    assert survives(attempt)
    assert new.read_bytes() == whole


def test_another_kind_of_index(tmp_path: Path) -> None:
    store = FaissStore(saved(tmp_path, "Flat"), tmp_path / "new.faiss", factory="IVF4,SQ8")
    upgrade(store, INDEX_MAP, progress=False)
    assert isinstance(faiss.read_index(str(tmp_path / "new.faiss")), faiss.IndexIVFScalarQuantizer)


def test_ids_survive_another_kind_without_ids(tmp_path: Path) -> None:
    index = faiss.index_factory(OLD, "IVF4,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(DOCUMENTS)
    index.add_with_ids(DOCUMENTS, np.arange(500)[::-1] + 1000)
    faiss.write_index(index, str(tmp_path / "old.faiss"))
    store = FaissStore(tmp_path / "old.faiss", tmp_path / "new.faiss", factory="HNSW16")
    upgrade(store, INDEX_MAP, progress=False)
    queries = INDEX_MAP(DOCUMENTS[:5])
    assert [found[0] for found in store.search(queries, 1)] == [1499, 1498, 1497, 1496, 1495]


@pytest.mark.parametrize(
    "factory, message", [("PQ5", "of width 24"), ("Flat,nonsense", "cannot build an index"), (None, "is unknown")]
)
def test_kinds_that_cannot_be_built(factory: str | None, message: str, tmp_path: Path) -> None:
    path = saved(tmp_path, "Flat")
    if factory is None:
        path = saved(tmp_path, "L2norm,Flat")
    with pytest.raises(ValueError, match=message):
        upgrade(FaissStore(path, tmp_path / "new.faiss", factory=factory), INDEX_MAP, progress=False)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["old.faiss"]


UNIT_MAP = EmbeddingMap.of(INDEX_MAP.stitch, input_normalized=True)
READ = {
    **dict.fromkeys(["Flat", "HNSW8", "IVF4,Flat", "IVF4_HNSW8,Flat", "IDMap,Flat", "Flat,RFlat", "PQ4x4,RFlat"], 0.0),
    **dict.fromkeys(["PCAR16,Flat", "IVF4,SQ8", "SQ8", "SQfp16", "SQbf16", "HNSW8,SQ8"], 0.02),
    **dict.fromkeys(["SQ4", "SQ6", "IVF4,SQ4", "IDMap2,SQ4", "PQ8x4", "PQ4x4fs", "IVF4,PQ8x4"], 1.0),
    **dict.fromkeys(["HNSW8,PQ8x4", "RaBitQ", "IVF4,RaBitQ", "PCA8,Flat", "PCA8,SQ4", "PCA8,HNSW8"], 1.0),
}  # fmt: skip
"""Kinds that are read and built again -> largest error of the vectors read back; 1: an error that is told."""


@pytest.mark.parametrize("metric", ["inner", "l2"])
@pytest.mark.parametrize("factory", READ)
def test_known_kinds_are_upgraded_and_their_error_is_told(factory: str, metric: str, tmp_path: Path) -> None:
    """The told error is near the true one, and vectors that had length 1 have it again before they are mapped."""
    path = saved(tmp_path, factory, faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT)
    store = FaissStore(path, tmp_path / "new.faiss")
    told = store.describe().error
    true = float(np.median(np.linalg.norm(store._old.rows(np.arange(500)) - DOCUMENTS[_rows(store)], axis=1)))
    by_distance = store._old.index.metric_type == faiss.METRIC_L2
    assert by_distance == (metric == "l2" or factory == "HNSW8,PQ8x4")  # which FAISS makes with no other metric
    assert store.describe().metrics == (("cosine", "l2") if by_distance else ("cosine", "dot"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = upgrade(store, UNIT_MAP, progress=False)
    messages = [str(each.message) for each in caught if "returns vectors with an error" in str(each.message)]
    if READ[factory] == 1:
        assert true / 1.5 < told < true * 1.5
        assert len(messages) == 1 and f"about {told:.2f} of their lengths" in messages[0]
    else:
        assert max(told, true) <= READ[factory] + 1e-6 and not messages
    before, after = (faiss.read_index(str(tmp_path / name)) for name in ("old.faiss", "new.faiss"))
    assert type(after) is type(before) and after.ntotal == 500
    assert ("Its codes change vectors by" in done.sentence) != is_exact(faiss, after)
    mapped = UNIT_MAP(DOCUMENTS)[_rows(store)]
    found = FaissStore(path, tmp_path / "new.faiss").vectors(store._old.ids.tolist())
    cosines = (found * mapped).sum(1) / np.linalg.norm(found, axis=1)
    assert np.median(cosines) > (0.999 if READ[factory] < 1 and "PCA" not in factory else 0.5)


def _rows(store: FaissStore) -> Any:
    """Numbers of the documents in the order of an index."""
    return store._old.ids // (3 if isinstance(store._old.index, faiss.IndexIDMap) else 1)


REFUSED = ["LSH", "LSHr", "ITQ8,LSH", "IMI2x2,Flat", "NSG8", "NSG8,Flat", "SQ0", "SQtq4", "SQtqmse4", "RaBitQfs",
           "LSQ2x4", "RQ2x4", "PLSQ2x2x4", "PRQ2x2x4", "ZnLattice2x4_4", "IVF4(PQ4x4),Flat",
           "RR8,Flat", "PCA8,SQ0", "IDMap,SQ0", "SQ0,RFlat", "Flat,Refine(SQ0)"]  # fmt: skip


def test_a_kind_that_faiss_makes_with_another_metric_is_refused(tmp_path: Path) -> None:
    store = FaissStore(saved(tmp_path, "Flat"), tmp_path / "new.faiss", factory="HNSW8,PQ8x4")
    with pytest.raises(ValueError, match=r"'HNSW8,PQ8x4' must have the metric of .*, 0, got 1"):
        upgrade(store, UNIT_MAP, progress=False)


@pytest.mark.parametrize("factory", REFUSED)
def test_all_other_kinds_are_refused_by_name_on_both_sides(factory: str, tmp_path: Path) -> None:
    made = faiss.index_factory(OLD, factory, faiss.METRIC_L2)
    for built, message in (
        (False, r"FAISS indexes of kind .* are not supported as old indexes: upgrade the original vectors"),
        (True, "FAISS indexes of kind .* are not supported as new indexes: pass a different factory"),
    ):
        with pytest.raises(ValueError, match=message):
            is_exact(faiss, made, is_new=built)
    path = saved(tmp_path, "Flat", faiss.METRIC_L2)
    with pytest.raises(ValueError, match="not supported as new indexes: pass a different factory"):
        upgrade(
            FaissStore(path, tmp_path / "new.faiss", factory=factory), EmbeddingMap.of(INDEX_MAP.stitch, metric="l2")
        )
    assert sorted(each.name for each in tmp_path.iterdir()) == ["old.faiss"]


@pytest.mark.parametrize("kind", ["rotation", "normalisation"])
def test_transforms_that_are_read_but_not_built_need_a_factory(kind: str, tmp_path: Path) -> None:
    """What trains a rotation, such as OPQ, is a plain linear transform in a file."""
    transform: Any = faiss.NormalizationTransform(OLD)
    if kind == "rotation":
        transform = faiss.LinearTransform(OLD, OLD, False)
        turn = np.linalg.qr(RANDOM.normal(size=(OLD, OLD)))[0].astype(np.float32)
        faiss.copy_array_to_vector(turn.ravel(), transform.A)
        transform.is_trained = True
        transform.set_is_orthonormal()
    index = faiss.IndexPreTransform(transform, faiss.IndexFlatIP(OLD))
    index.add(DOCUMENTS)
    faiss.write_index(index, str(tmp_path / "old.faiss"))
    with pytest.raises(ValueError, match=r"factory string .*IndexPreTransform\) is unknown; pass factory"):
        upgrade(FaissStore(tmp_path / "old.faiss", tmp_path / "new.faiss"), UNIT_MAP, progress=False)
    upgrade(FaissStore(tmp_path / "old.faiss", tmp_path / "new.faiss", factory="Flat"), UNIT_MAP, progress=False)
    found = FaissStore(tmp_path / "old.faiss", tmp_path / "new.faiss").vectors([3])
    np.testing.assert_allclose(found, UNIT_MAP(DOCUMENTS[3:4]), atol=1e-5)
    with pytest.raises(ValueError, match=r"kind OPQMatrix, IndexFlat are not supported as new indexes"):
        upgrade(FaissStore(tmp_path / "old.faiss", tmp_path / "other.faiss", factory="OPQ4,Flat"), UNIT_MAP)


@pytest.mark.parametrize("rows", [1, 20])
def test_stores_with_too_few_rows_for_their_kind(rows: int, tmp_path: Path) -> None:
    for factory, least in (("IVF64,Flat", 64), ("PQ4", 256), ("PCA24,Flat", 24), ("IDMap,IVF30,PQ4x4", 30)):
        path, index = tmp_path / "old.faiss", faiss.IndexFlatIP(OLD)
        index.add(DOCUMENTS[:rows])
        faiss.write_index(index, str(path))
        with pytest.raises(ValueError, match=rf"requires at least {least} rows for training, got {rows} from"):
            upgrade(FaissStore(path, tmp_path / "new.faiss", factory=factory), UNIT_MAP, progress=False)
    assert upgrade(FaissStore(path, tmp_path / "new.faiss"), UNIT_MAP, progress=False).rows == rows


def test_an_empty_index_a_binary_one_and_one_of_another_metric(tmp_path: Path) -> None:
    faiss.write_index(faiss.IndexFlatIP(OLD), str(tmp_path / "empty.faiss"))
    binary = faiss.IndexBinaryFlat(8 * OLD)
    binary.add(np.zeros((3, OLD), np.uint8))
    faiss.write_index_binary(binary, str(tmp_path / "binary.faiss"))
    other = faiss.index_factory(OLD, "Flat", faiss.METRIC_L1)
    other.add(DOCUMENTS)
    faiss.write_index(other, str(tmp_path / "l1.faiss"))
    for name, message in (
        ("empty", r"empty\.faiss is empty"),
        ("binary", r"binary\.faiss.* binary indexes are not supported; .*quantization='binary'"),
        ("l1", "must be inner product or Euclidean distance, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            FaissStore(tmp_path / f"{name}.faiss", tmp_path / "new.faiss").describe()


@pytest.mark.parametrize("factory", ["Flat", "HNSW8", "IVF4,Flat", "IDMap,IVF4,Flat"])
def test_queries_are_not_mapped_into_an_index_of_other_lengths(factory: str) -> None:
    raw = faiss.index_factory(OLD, factory, faiss.METRIC_INNER_PRODUCT)
    raw.train(5 * DOCUMENTS)
    raw.add_with_ids(5 * DOCUMENTS, np.arange(500)) if factory.startswith("IDMap") else raw.add(5 * DOCUMENTS)
    with pytest.raises(ValueError, match="metric cosine, but the index ranks unnormalised documents by inner product"):
        search_mapped(raw, MAPS["affine"]())
    of_unit = EmbeddingMap.of(LinearStitch(NEW, OLD), direction="query", metric="dot", lengths={"old": [1.0, 1.0]})
    with pytest.raises(ValueError, match=r"length 1 .* the documents of the index have lengths from 5 to 5"):
        search_mapped(raw, of_unit)
    search_mapped(built(factory), of_unit)


def test_a_file_that_is_no_index(tmp_path: Path) -> None:
    (tmp_path / "old.faiss").write_bytes(b"no index")
    with pytest.raises(ValueError, match=r"old\.faiss cannot be read: RuntimeError"):
        FaissStore(tmp_path / "old.faiss", tmp_path / "new.faiss").describe()


def test_an_index_that_changes_during_the_upgrade(tmp_path: Path) -> None:
    path = saved(tmp_path, "Flat")
    store = FaissStore(path, tmp_path / "new.faiss")
    missing = store.missing

    def changed() -> int:
        left = missing()
        if not left:
            faiss.write_index(built("SQ8"), str(path))
        return left

    store.missing = changed  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="has changed during the upgrade"):
        upgrade(store, INDEX_MAP, progress=False)
    assert not (tmp_path / "new.faiss").exists()


def test_ids_that_occur_twice(tmp_path: Path) -> None:
    index = faiss.IndexIDMap(faiss.IndexFlatIP(OLD))
    index.add_with_ids(DOCUMENTS[:3], np.array([5, 6, 5]))
    faiss.write_index(index, str(tmp_path / "old.faiss"))
    with pytest.raises(ValueError, match="must be unique"):
        FaissStore(tmp_path / "old.faiss", tmp_path / "new.faiss").describe()


def test_replacement_in_an_index_that_cannot(tmp_path: Path) -> None:
    store = FaissStore(saved(tmp_path, "HNSW16"), tmp_path / "new.faiss")
    upgrade(store, INDEX_MAP, progress=False)
    with pytest.raises(ValueError, match="does not support replacing rows"):
        store.replace([0], np.ones((1, NEW), np.float32))
    with pytest.raises(ValueError, match="id 500 does not exist"):
        store.vectors([500])
