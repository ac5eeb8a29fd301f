"""A Qdrant collection in a folder, for the tests of all stores."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from embedding_store_cases import Case
from hf_stitch_embeddings.stores import VectorStore


class Qdrant(Case):
    """A collection with texts as payloads.

    Args:
        named: Whether the old vectors have a name.
    """

    needs = ("qdrant_client",)

    def __init__(self, named: bool = True) -> None:
        self.named = named

    def make(self, folder: Path, ids: Sequence[str], vectors: np.ndarray, texts: Sequence[str]) -> None:
        from qdrant_client import QdrantClient, models

        params = models.VectorParams(size=vectors.shape[1], distance=models.Distance.COSINE)
        with closing(QdrantClient(path=str(folder))) as client:
            client.create_collection("docs", vectors_config={"old": params} if self.named else params)
            points = [
                models.PointStruct(id=each, vector={"old": row} if self.named else row, payload={"text": text})
                for each, row, text in zip(self.ids(ids), vectors.tolist(), texts, strict=True)
            ]
            client.upsert("docs", points)

    def open(self, folder: Path) -> VectorStore:
        from hf_stitch_embeddings.stores.qdrant import QdrantStore

        return QdrantStore(folder, "docs", vector_name="old" if self.named else "")

    def read(self, folder: Path) -> dict[Any, tuple[np.ndarray, str | None]]:
        from qdrant_client import QdrantClient

        with closing(QdrantClient(path=str(folder))) as client:
            points = client.scroll("docs", limit=10_000, with_vectors=True)[0]
        found = {}
        start = "old_" if self.named else "vector_"
        (name,) = [
            each for each in points[0].vector if each.startswith(start) and all(each in p.vector for p in points)
        ]
        for point in points:
            found[point.id] = (np.array(point.vector[name]), point.payload["text"])
        return found

    def finished(self, folder: Path) -> bool:
        from qdrant_client import QdrantClient

        with closing(QdrantClient(path=str(folder))) as client:
            points = client.scroll("docs", limit=10_000, with_vectors=True)[0]
        return all(isinstance(point.vector, dict) and len(point.vector) == 2 for point in points)

    def ids(self, ids: Sequence[str]) -> list[Any]:
        return [1000 + 3 * number for number in range(len(ids))]
