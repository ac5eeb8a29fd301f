"""Qdrant collections: names, distances, locks, bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_stitch_embeddings import EmbeddingMap, read_vectors, upgrade

from hf_stitch.stitches import LinearStitch

qdrant_client = pytest.importorskip("qdrant_client")
from hf_stitch_embeddings.stores.qdrant import QdrantStore  # noqa: E402

models = qdrant_client.models
VECTORS = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
MAP = EmbeddingMap.of(LinearStitch.of(weight=torch.randn(6, 4, generator=torch.Generator().manual_seed(0))))


def client_with(config: Any, vectors: Any = VECTORS, **more: Any) -> Any:
    client = qdrant_client.QdrantClient(":memory:")
    client.create_collection("docs", vectors_config=config)
    points = [
        models.PointStruct(id=number, vector=({"old": row} if isinstance(config, dict) else row), payload={"n": number})
        for number, row in enumerate(vectors.tolist())
    ]
    if points:
        client.upsert("docs", points)
    return client


def params(distance: str = "COSINE", **more: Any) -> Any:
    return models.VectorParams(size=4, distance=getattr(models.Distance, distance), **more)


@pytest.mark.parametrize("distance, metric", [("COSINE", "cosine"), ("DOT", "dot"), ("EUCLID", "l2")])
def test_the_new_vectors_are_searched_by_the_distance_of_the_old_ones(distance: str, metric: Any) -> None:
    made = EmbeddingMap.of(MAP.stitch, metric=metric)
    client = client_with(params(distance))
    done = upgrade(QdrantStore(client, "docs"), made, progress=False)
    using = done.sentence.partition("using='")[2].partition("'")[0]
    assert client.get_collection("docs").config.params.vectors[using].distance == getattr(models.Distance, distance)
    query = made(VECTORS[9:10])[0].tolist()
    if metric != "dot":  # a longer vector may have the greater inner product
        assert client.query_points("docs", query=query, using=using, limit=1).points[0].id == 9
    np.testing.assert_allclose(QdrantStore(client, "docs", vector_name="").describe().rows, 60)


DECLARED = {
    "datatype": models.Datatype.FLOAT16,
    "on_disk": True,
    "hnsw_config": models.HnswConfigDiff(m=24, ef_construct=77),
    "quantization_config": models.ScalarQuantization(
        scalar=models.ScalarQuantizationConfig(type=models.ScalarType.INT8, quantile=0.99)
    ),
}


class Server(qdrant_client.QdrantClient):  # type: ignore[misc]
    """The local mode, which declares nothing of a vector but its size and distance; this one does as a server does."""

    def _vector(self, collection: str, name: str) -> Any:
        return self._client.collections[collection].config.vectors[name]

    def create_vector_name(self, collection_name: str, vector_name: str, config: Any, **more: Any) -> Any:
        done = super().create_vector_name(collection_name, vector_name, config, **more)
        self._vector(collection_name, vector_name).datatype = config.dense.datatype
        return done

    def update_collection(self, collection_name: str, *, vectors_config: Any, **more: Any) -> bool:
        for name, change in vectors_config.items():
            for field, value in change.model_dump().items():
                if value is not None:
                    setattr(self._vector(collection_name, name), field, getattr(change, field))
        return bool(super().update_collection(collection_name, vectors_config=vectors_config, **more))


@pytest.mark.parametrize("name", ["old", ""])
def test_what_the_old_vectors_declare_goes_over(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qdrant_client, "QdrantClient", Server)
    client = client_with({"old": params(**DECLARED)} if name else params(**DECLARED))
    done = upgrade(QdrantStore(client, "docs"), MAP, progress=False)
    new = client.get_collection("docs").config.params.vectors[done.sentence.partition("using='")[2].partition("'")[0]]
    assert {field: getattr(new, field) for field in DECLARED} == DECLARED
    assert "lack" not in done.sentence


@pytest.mark.parametrize("datatype", ["uint8", "turbo4", "float16", "float32", None])
@pytest.mark.parametrize("more", [False, True])
def test_the_report_says_what_did_not_go_over(datatype: str | None, more: bool) -> None:
    """The local mode declares nothing; mapped vectors are no integers and no codes anywhere."""
    given = {**(DECLARED if more else {}), "datatype": datatype}
    codes = np.random.default_rng(0).integers(0, 256, size=VECTORS.shape).astype(np.float32)
    client = client_with({"old": params("DOT", **given)}, codes if datatype == "uint8" else VECTORS)
    options: dict[str, Any] = {"quantization": "int8", "ranges": (-1, 1)} if datatype == "uint8" else {}
    store = QdrantStore(client, "docs", **options)
    said = upgrade(store, EmbeddingMap.of(MAP.stitch, metric="dot"), progress=False).sentence.partition(
        "lack the settings "
    )[2]
    assert (f"datatype={datatype}" in said) == (datatype not in (None, "float32"))
    for each in ("on_disk=True", "hnsw_config={'m': 24, 'ef_construct': 77}", "'quantile': 0.99"):
        assert (each in said) == more


@pytest.mark.parametrize("distance", ["COSINE", "DOT"])
def test_integers_are_read_as_what_they_stand_for(distance: str) -> None:
    codes = np.random.default_rng(0).integers(0, 256, size=(60, 4), dtype=np.uint8)
    client = client_with({"old": params(distance, datatype="uint8")}, codes)
    cosine = distance == "COSINE"  # the local mode keeps them at length 1
    refused = (
        "uint8 vectors .* cannot be decoded" if cosine else "docs must be floating point, got uint8 .* to the store"
    )
    with pytest.raises(ValueError, match=refused):
        upgrade(QdrantStore(client, "docs"), MAP, progress=False)
    if cosine:
        return
    store = QdrantStore(client, "docs", quantization="int8", ranges=(-3, 3))
    upgrade(store, MAP, progress=False)
    wanted = MAP(read_vectors(codes, quantization="int8", ranges=(-3, 3)))
    np.testing.assert_allclose(store.vectors([5]), wanted[5:6], atol=1e-6)


def test_points_that_are_added_meanwhile_are_mapped_too() -> None:
    client = client_with({"old": params()})
    store = QdrantStore(client, "docs")
    write, added = store.write, [False]

    def written(ids: Any, vectors: Any) -> None:
        write(ids, vectors)
        if not added[0]:
            added[0] = True
            client.upsert("docs", [models.PointStruct(id=900, vector={"old": [1.0, 2.0, 3.0, 4.0]})])

    store.write = written  # type: ignore[method-assign]
    assert upgrade(store, MAP, batch_size=20, progress=False).rows == 61
    assert store.missing() == 0


def test_a_half_of_another_map_is_named() -> None:
    client = client_with({"old": params()})
    store = QdrantStore(client, "docs")
    store.describe()
    store.start("0123456789ab", 6)
    with pytest.warns(UserWarning, match="of a different map in 'old_0123456789ab'"):
        upgrade(QdrantStore(client, "docs", vector_name="old"), MAP, progress=False)


@pytest.mark.parametrize("config", [{"old": params("DOT")}, params("DOT")], ids=["named", "unnamed"])
def test_a_collection_that_is_opened_again_serves_the_new_vectors(config: Any) -> None:
    """Also of equal width, where nothing else would tell them from the old ones."""
    client = client_with(config)
    square = EmbeddingMap.of(LinearStitch.of(weight=-torch.eye(4)), metric="dot")
    with pytest.raises(ValueError, match="under one name, got none: upgrade it first"):
        QdrantStore(client, "docs").replace([0], np.ones((1, 4)))
    upgrade(QdrantStore(client, "docs"), square, progress=False)
    again = QdrantStore(client, "docs")
    np.testing.assert_allclose(again.vectors([3]), -VECTORS[3:4], atol=1e-6)
    again.replace([3], np.ones((1, 4), np.float32))
    np.testing.assert_allclose(again.vectors([3]), np.ones((1, 4)))
    old = client.retrieve("docs", [3], with_vectors=True)[0].vector["old" if isinstance(config, dict) else ""]
    np.testing.assert_allclose(old, VECTORS[3], atol=1e-6)


def test_old_vectors_that_change_after_they_were_mapped() -> None:
    client = client_with({"old": params()})
    store = QdrantStore(client, "docs")
    write, changed = store.write, [False]

    def written(ids: Any, vectors: Any) -> None:
        write(ids, vectors)
        if not changed[0]:
            changed[0] = True
            client.update_vectors("docs", [models.PointVectors(id=ids[0], vector={"old": [1.0, 2.0, 3.0, 4.0]})])

    store.write = written  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="1 of 60 verified rows"):
        upgrade(store, MAP, batch_size=20, verify=5, progress=False)


def test_bad_input() -> None:
    several = {"old": params(), "image": params()}
    multi = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
    for client, options, message in (
        (client_with(several), {}, "has several vectors: pass one of 'old', 'image' as vector_name"),
        (client_with({"old": params()}), {"vector_name": "new"}, "vector_name must be one of 'old' .*, got 'new'"),
        (client_with({"old": params()}), {"collection": "pages"}, "pages does not exist; collections: docs"),
        (client_with(params("MANHATTAN")), {}, "got Manhattan"),
        (client_with({"old": params()}, VECTORS[:0]), {}, "0 of 0 lack one"),
        (client_with(several), {"vector_name": "image"}, "60 of 60 lack one"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            upgrade(QdrantStore(client, **{"collection": "docs", **options}), MAP, progress=False)  # type: ignore[arg-type]
    client = qdrant_client.QdrantClient(":memory:")
    client.create_collection("docs", vectors_config={"old": params(multivector_config=multi)})
    with pytest.raises(ValueError, match="several vectors per point"):
        QdrantStore(client, "docs").describe()


def test_a_folder_that_another_process_uses(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="must be a Qdrant folder or a URL"):
        QdrantStore(tmp_path / "absent", "docs")
    first = qdrant_client.QdrantClient(path=str(tmp_path))
    with pytest.raises(OSError, match="cannot be opened"):
        QdrantStore(tmp_path, "docs")
    first.close()
