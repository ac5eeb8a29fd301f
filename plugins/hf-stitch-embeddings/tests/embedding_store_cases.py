"""The stores that the tests upgrade; a new store adds a case to :data:`CASES`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from hf_stitch_embeddings.stores import VectorStore, open_store
from hf_stitch_embeddings.testing import StoreCase

Read = dict[Any, tuple[np.ndarray, str | None]]


class Arrays(StoreCase):
    """Files of numpy."""

    name = "arrays"

    def make(self, folder: Path, vectors: np.ndarray, payloads: Sequence[str]) -> Sequence[Any]:
        np.save(folder / "old.npy", vectors)
        return range(len(vectors))

    def change(self, folder: Path, ids: Sequence[Any], vectors: np.ndarray) -> None:
        np.save(folder / "old.npy", vectors)

    def open(self, folder: Path) -> VectorStore:
        return open_store(f"arrays:{folder}/old.npy", target=folder / "new.npy")

    def read(self, folder: Path) -> Read:
        new = folder / "new.npy"
        return {row: (vector, None) for row, vector in enumerate(np.load(new if new.exists() else folder / "old.npy"))}


class Faiss(StoreCase):
    """A FAISS index of some kind."""

    def __init__(self, name: str, factory: str) -> None:
        self.name, self.factory = name, factory

    def make(self, folder: Path, vectors: np.ndarray, payloads: Sequence[str]) -> Sequence[Any]:
        given = "IVF" in self.factory or "IDMap" in self.factory
        ids = [7 * (len(vectors) - row) for row in range(len(vectors))] if given else list(range(len(vectors)))
        self.change(folder, ids, vectors)
        return ids

    def change(self, folder: Path, ids: Sequence[Any], vectors: np.ndarray) -> None:
        import faiss

        index = faiss.index_factory(vectors.shape[1], self.factory, faiss.METRIC_INNER_PRODUCT)
        index.train(vectors)
        index.add_with_ids(vectors, np.array(ids)) if ids[0] else index.add(vectors)
        faiss.write_index(index, str(folder / "old.faiss"))

    def open(self, folder: Path) -> VectorStore:
        return open_store(f"faiss:{folder}/old.faiss", target=folder / "new.faiss")

    def read(self, folder: Path) -> Read:
        import faiss

        new = folder / "new.faiss"
        index = faiss.read_index(str(new if new.exists() else folder / "old.faiss"))
        ids = range(index.ntotal)
        if isinstance(index, faiss.IndexIVF):
            index.set_direct_map_type(faiss.DirectMap.Hashtable)
        if self.factory != "Flat":
            ids = range(7, 7 * index.ntotal + 1, 7)
        return {each: (index.reconstruct(each), None) for each in ids}


class Lance(StoreCase):
    """A LanceDB table with texts."""

    name, has_payloads, start_method, closed = "lancedb", True, "forkserver", "*.lance"

    def _rows(self, ids: Sequence[Any], vectors: np.ndarray, **columns: Any) -> Any:
        import pyarrow

        lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors.ravel()), vectors.shape[1])
        return pyarrow.table({"id": list(ids), "vector": lists, **columns})

    def make(self, folder: Path, vectors: np.ndarray, payloads: Sequence[str]) -> Sequence[Any]:
        import lancedb

        ids = [f"doc-{row}" for row in range(len(vectors))]
        lancedb.connect(str(folder)).create_table("docs", self._rows(ids, vectors, text=list(payloads)))
        return ids

    def change(self, folder: Path, ids: Sequence[Any], vectors: np.ndarray) -> None:
        import lancedb

        table = lancedb.connect(str(folder)).open_table("docs")
        table.merge_insert("id").when_matched_update_all().execute(self._rows(ids, vectors))

    def open(self, folder: Path) -> VectorStore:
        return open_store(f"lancedb:{folder}", table="docs")

    def read(self, folder: Path) -> Read:
        import lancedb

        rows = lancedb.connect(str(folder)).open_table("docs").to_arrow().to_pylist()
        assert len({row["id"] for row in rows}) == len(rows)
        return {row["id"]: (np.array(row["vector"]), row["text"]) for row in rows}


class Qdrant(StoreCase):
    """A Qdrant collection with texts as payloads; its old vectors have a name or none."""

    has_payloads = True

    def __init__(self, name: str, vector: str) -> None:
        self.name, self.vector = name, vector

    def make(self, folder: Path, vectors: np.ndarray, payloads: Sequence[str]) -> Sequence[Any]:
        from qdrant_client import QdrantClient, models

        params = models.VectorParams(size=vectors.shape[1], distance=models.Distance.COSINE)
        ids = [1000 + 3 * row for row in range(len(vectors))]
        with closing(QdrantClient(path=str(folder))) as client:
            client.create_collection("docs", vectors_config={self.vector: params} if self.vector else params)
            points = [
                models.PointStruct(id=each, vector={self.vector: row} if self.vector else row, payload={"text": text})
                for each, row, text in zip(ids, vectors.tolist(), payloads, strict=True)
            ]
            client.upsert("docs", points)
        return ids

    def change(self, folder: Path, ids: Sequence[Any], vectors: np.ndarray) -> None:
        from qdrant_client import QdrantClient, models

        points = [
            models.PointVectors(id=each, vector={self.vector: row})
            for each, row in zip(ids, vectors.tolist(), strict=True)
        ]
        with closing(QdrantClient(path=str(folder))) as client:
            client.update_vectors("docs", points)

    def open(self, folder: Path) -> VectorStore:
        """Open it, and note the name that the upgrade tells at its end: queries must use it."""
        store = open_store(f"qdrant:{folder}", collection="docs", vector_name=self.vector)
        switch = store.switch

        def noting() -> str:
            sentence = switch()
            (folder / "using").write_text(sentence.partition("using='")[2].partition("'")[0])
            return sentence

        store.switch = noting  # type: ignore[method-assign]
        return store

    def read(self, folder: Path) -> Read:
        from qdrant_client import QdrantClient

        name = (folder / "using").read_text() if (folder / "using").exists() else ""
        with closing(QdrantClient(path=str(folder))) as client:
            points = client.scroll("docs", limit=10_000, with_vectors=True)[0]
        vectors = [each.vector if isinstance(each.vector, dict) else {"": each.vector} for each in points]
        return {
            each.id: (np.array(vector[name or self.vector]), each.payload["text"])
            for each, vector in zip(points, vectors, strict=True)
        }


CASES = [
    Arrays(),
    Faiss("faiss flat", "Flat"),
    Faiss("faiss with ids", "IDMap2,Flat"),
    Faiss("faiss IVF", "IVF4,Flat"),
    Lance(),
    Qdrant("qdrant", "old"),
    Qdrant("qdrant unnamed", ""),
]
