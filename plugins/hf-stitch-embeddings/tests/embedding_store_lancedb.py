"""A LanceDB table, for the tests of all stores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from embedding_store_cases import Case
from hf_stitch_embeddings.stores import VectorStore


class Lance(Case):
    """A table with texts."""

    needs = ("lancedb",)

    def make(self, folder: Path, ids: Sequence[str], vectors: np.ndarray, texts: Sequence[str]) -> None:
        import lancedb
        import pyarrow

        lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors.ravel()), vectors.shape[1])
        rows = pyarrow.table({"id": list(ids), "text": list(texts), "vector": lists})
        lancedb.connect(str(folder)).create_table("docs", rows)

    def open(self, folder: Path) -> VectorStore:
        from hf_stitch_embeddings.stores.lancedb import LanceStore

        return LanceStore(str(folder), "docs")

    def read(self, folder: Path) -> dict[Any, tuple[np.ndarray, str | None]]:
        import lancedb

        rows = lancedb.connect(str(folder)).open_table("docs").to_arrow().to_pylist()
        found = {row["id"]: (np.array(row["vector"]), row["text"]) for row in rows}
        assert len(found) == len(rows)
        return found

    def finished(self, folder: Path) -> bool:
        import lancedb

        names = lancedb.connect(str(folder)).open_table("docs").schema.names
        return any(name.startswith("vector_before_") for name in names)
