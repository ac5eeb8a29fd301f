"""Store of vectors in Qdrant collections."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_stitch_embeddings.stores.base import Description, Rows, VectorStore, import_package, warn_of_unfinished
from hf_stitch_embeddings.vectors import Metric, Quantization

METRICS: dict[str, tuple[Metric, ...]] = {"Cosine": ("cosine",), "Dot": ("cosine", "dot"), "Euclid": ("cosine", "l2")}
"""Distance of a collection -> supported metrics; with cosine, vectors have length 1."""

PAGE = 1000
"""Points per read operation."""
FLOATS = ("float32", "float16")
"""Data types for mapped vectors; all remaining types are integers, or codes with too large an error for upgrades."""
UPGRADED = re.compile(".+_[0-9a-f]{12}")
"""Pattern of names of new vectors."""


class QdrantStore(VectorStore):
    """Store of vectors in a Qdrant collection.

    New vectors get a new vector name in the same collection. Qdrant cannot rename vectors, so that queries must use the
    new name after the upgrade (``using=``). Ids, payloads and old vectors stay unchanged. With distance Cosine, Qdrant
    stores vectors with length 1. Concurrent upgrades with the same map are possible on a server, and write the same
    values. Tested with the client's local mode; a server uses the same calls.

    Args:
        location: Folder of the local mode, URL of a server, or a ``QdrantClient``.
        collection: Name of the collection.
        vector_name: Name of the old vectors. Default: the only vectors of the collection.
        quantization: Meaning of uint8 vectors, as for :func:`~hf_stitch_embeddings.read_vectors`.
        ranges: Ranges of ``"int8"`` vectors.

    Raises:
        ImportError: If qdrant-client is not installed.
        OSError: If another process uses the folder.

    Example:
        >>> import qdrant_client
        >>> from qdrant_client.models import Distance, PointStruct, VectorParams
        >>> client = qdrant_client.QdrantClient(":memory:")
        >>> _ = client.create_collection("docs", vectors_config=VectorParams(size=2, distance=Distance.DOT))
        >>> _ = client.upsert("docs", [PointStruct(id=7, vector=[1.0, 0.0])])
        >>> QdrantStore(client, "docs").describe().metrics
        ('cosine', 'dot')
    """

    def __init__(
        self,
        location: Any,
        collection: str,
        *,
        vector_name: str | None = None,
        quantization: Quantization | None = None,
        ranges: Any = None,
    ) -> None:
        self.quantization, self.ranges = quantization, ranges
        qdrant_client = import_package("qdrant_client", "qdrant")
        self._models = qdrant_client.models
        self._is_client_given = self._shared = not isinstance(location, str | Path)
        self._client = location
        if not self._is_client_given:
            remote = str(location).startswith(("http://", "https://"))
            if not remote and not Path(location).expanduser().is_dir():
                raise FileNotFoundError(f"location must be a Qdrant folder or a URL, got {location}")
            self._shared = remote
            try:
                client_options = {"url": str(location)} if remote else {"path": str(Path(location).expanduser())}
                self._client = qdrant_client.QdrantClient(**client_options)
            except RuntimeError as error:
                raise OSError(f"{location} cannot be opened: {error}") from error
        self.collection, self._vector_name = collection, vector_name
        self.name = f"Qdrant collection {collection}"
        self._old, self._integers = "", False
        self._new_name: str | None = None

    @classmethod
    def holds(cls, path: Path) -> bool:
        """Return whether the folder belongs to Qdrant's local mode."""
        return (path / "meta.json").is_file() and (path / "collection").is_dir()

    def describe(self) -> Description:
        """Describe the old vectors."""
        if not self._client.collection_exists(self.collection):
            collections = [entry.name for entry in self._client.get_collections().collections]
            raise FileNotFoundError(f"{self.name} does not exist; collections: {', '.join(collections) or 'none'}")
        params_by_name = self._vector_params()
        listing = ", ".join(repr(name) for name in params_by_name)
        candidates = [name for name in params_by_name if not (UPGRADED.fullmatch(name) and self._vector_name is None)]
        if self._vector_name is None and len(candidates) != 1:
            raise ValueError(f"{self.name} has several vectors: pass one of {listing} as vector_name")
        self._old = candidates[0] if self._vector_name is None else self._vector_name
        if self._old not in params_by_name:
            raise ValueError(f"vector_name must be one of {listing} in {self.name}, got {self._old!r}")
        params = params_by_name[self._old]
        distance = str(params.distance.value)
        if distance not in METRICS or params.multivector_config is not None:
            kind = "several vectors per point" if params.multivector_config is not None else distance
            raise ValueError(
                f"{self.name} must have a single vector per point and distance {', '.join(METRICS)}, got {kind}"
            )
        rows = self._client.count(self.collection, exact=True).count
        missing_count = self._count_without(self._old)
        if not rows or missing_count:
            raise ValueError(
                f"all points of {self.name} must have a vector {self._old!r}, but {missing_count} of {rows} lack one"
            )
        self._integers = params.datatype == self._models.Datatype.UINT8
        first = self._client.scroll(self.collection, limit=1, with_payload=False, with_vectors=[self._old])[0]
        return Description(self.name, rows, self._rows(first, self._old).shape[1], METRICS[distance])

    @property
    def _new(self) -> str:
        """Name of the new vectors: from the started upgrade, or the only candidate in the collection."""
        if self._new_name is None:
            self.describe()
            pattern = re.compile(re.escape(self._old or "vector") + "_[0-9a-f]{12}")
            matches = [name for name in self._vector_params() if pattern.fullmatch(name)]
            if len(matches) != 1:
                raise ValueError(
                    f"{self.name} must have new vectors under one name, got {matches or 'none'}: "
                    + ("delete unused ones" if matches else "upgrade it first")
                )
            self._new_name = matches[0]
        return self._new_name

    def _vector_params(self) -> dict[str, Any]:
        vector_config = self._client.get_collection(self.collection).config.params.vectors
        return vector_config if isinstance(vector_config, dict) else {"": vector_config}

    def _without_vector(self, name: str) -> Any:
        return self._models.Filter(must_not=[self._models.HasVectorCondition(has_vector=name)])

    def _count_without(self, name: str) -> int:
        count: int = self._client.count(self.collection, count_filter=self._without_vector(name), exact=True).count
        return count

    def start(self, key: str, width: int) -> None:
        """Add a vector name, or reuse it."""
        params_by_name = self._vector_params()
        warn_of_unfinished(self.name, f"{self._old or 'vector'}_", key, params_by_name)
        self._new_name = f"{self._old or 'vector'}_{key}"
        if self._new not in params_by_name:
            old = params_by_name[self._old]
            datatype = old.datatype if str(getattr(old.datatype, "value", "")) in FLOATS else None
            dense = self._models.DenseVectorConfig(size=width, distance=old.distance, datatype=datatype)
            config = self._models.DenseVectorNameConfig(dense=dense)
            self._client.create_vector_name(self.collection, self._new, config)
        if set(self._lost_settings()) - {"datatype"}:
            settings = {field: getattr(params_by_name[self._old], field, None) for field in self._changeable}
            settings_diff = self._models.VectorParamsDiff(**settings)
            self._client.update_collection(self.collection, vectors_config={self._new: settings_diff})

    @property
    def _changeable(self) -> list[str]:
        """Settings of a vector that can be changed after its creation."""
        return list(self._models.VectorParamsDiff.model_fields)

    def _lost_settings(self) -> dict[str, Any]:
        """Return the settings of the old vectors that the new vectors lack."""
        params_by_name = self._vector_params()
        old, new = ({field: getattr(params_by_name[name], field, None) for field in ("datatype", *self._changeable)}
                    for name in (self._old, self._new))  # fmt: skip
        defaults = {"datatype": self._models.Datatype.FLOAT32, "on_disk": False}
        return {
            field: value
            for field, value in old.items()
            if value is not None and value != new[field] and not (new[field] is None and value == defaults.get(field))
        }

    def pending(self, batch_size: int) -> Iterator[tuple[Sequence[Any], Rows]]:
        """Yield points without the new vector, in the order of ids."""
        offset = None
        while True:
            points, offset = self._client.scroll(
                self.collection, scroll_filter=self._without_vector(self._new), limit=batch_size, offset=offset,
                with_payload=False, with_vectors=[self._old],
            )  # fmt: skip
            if points:
                yield [point.id for point in points], self._rows(points, self._old)
            if offset is None:
                return

    def _rows(self, points: Sequence[Any], name: str) -> Rows:
        vectors = [p.vector if isinstance(p.vector, list) else (p.vector or {}).get(name) for p in points]
        if lacking := [point.id for point, vector in zip(points, vectors, strict=True) if vector is None]:
            raise ValueError(f"{len(lacking)} points of {self.name} lack a vector {name!r}, e.g. {lacking[0]!r}")
        if name != self._old:
            return np.array(vectors, dtype=np.float32)
        rows = np.array(vectors, dtype=np.float32)
        if self._integers and (rows != np.round(rows)).any():
            raise ValueError(
                f"uint8 vectors {name!r} of {self.name} cannot be decoded, because distance Cosine has normalised "
                "them; upgrade the original vectors"
            )
        return self.floats(rows.astype(np.uint8) if self._integers else rows, self.name)

    def write(self, ids: Sequence[Any], vectors: Rows) -> None:
        """Write new vectors of points, and wait for completion."""
        points = [
            self._models.PointVectors(id=id_, vector={self._new: row})
            for id_, row in zip(ids, np.asarray(vectors, np.float32).tolist(), strict=True)
        ]
        self._client.update_vectors(self.collection, points, wait=True)

    def missing(self) -> int:
        """Return the number of points without the new vector."""
        return self._count_without(self._new)

    def sample(self, count: int, seed: int) -> Iterator[tuple[Sequence[Any], Rows, Rows]]:
        """Read a random sample from Qdrant; all points if other writers may have changed them during the upgrade."""
        if self._shared:
            yield from self._read_all()
        elif count:
            query = self._models.SampleQuery(sample=self._models.Sample.RANDOM)
            points = self._client.query_points(
                self.collection, query=query, limit=count, with_payload=False, with_vectors=[self._old, self._new]
            ).points
            yield self._old_and_new(points)

    def _read_all(self) -> Iterator[tuple[Sequence[Any], Rows, Rows]]:
        offset = None
        while True:
            points, offset = self._client.scroll(
                self.collection, limit=PAGE, offset=offset, with_payload=False, with_vectors=[self._old, self._new]
            )
            if points:
                yield self._old_and_new(points)
            if offset is None:
                return

    def _old_and_new(self, points: Sequence[Any]) -> tuple[Sequence[Any], Rows, Rows]:
        return [point.id for point in points], self._rows(points, self._old), self._rows(points, self._new)

    def switch(self) -> str:
        """Return the name of the new vectors, and the settings of the old vectors that they lack."""
        lost = ", ".join(f"{field}={_plain(value)}" for field, value in self._lost_settings().items())
        return (
            f"Search {self.name} with using={self._new!r} and the new model; points added later must have a vector "
            f"with this name. client.delete_vector_name({self.collection!r}, {self._old!r}) removes the old vectors."
            + (f" The new vectors lack the settings {lost}: see client.update_collection." if lost else "")
        )

    def search(self, queries: Rows, k: int) -> list[list[Any]]:
        """Search the new vectors."""
        return [
            [
                point.id
                for point in self._client.query_points(
                    self.collection, query=query, using=self._new, limit=k, with_payload=False
                ).points
            ]
            for query in np.asarray(queries, np.float32).tolist()
        ]

    def vectors(self, ids: Sequence[Any]) -> Rows:
        """Read new vectors."""
        points = self._client.retrieve(self.collection, list(ids), with_payload=False, with_vectors=[self._new])
        by_id = {point.id: point for point in points}
        if missing := [id_ for id_ in ids if id_ not in by_id]:
            raise ValueError(f"id {missing[0]!r} does not exist in {self.name}")
        return self._rows([by_id[id_] for id_ in ids], self._new)

    def replace(self, ids: Sequence[Any], vectors: Rows) -> None:
        """Overwrite new vectors of points; unknown ids are ignored."""
        existing = {point.id for point in self._client.retrieve(self.collection, list(ids), with_payload=False)}
        existing_rows = [row for row, id_ in enumerate(ids) if id_ in existing]
        if existing_rows:
            self.write([ids[row] for row in existing_rows], np.asarray(vectors)[existing_rows])

    def close(self) -> None:
        """Close the client if this object opened it."""
        if not self._is_client_given:
            self._client.close()


def _plain(value: Any) -> Any:
    """Convert a setting to a JSON value."""
    return (
        value.model_dump(mode="json", exclude_none=True)
        if hasattr(value, "model_dump")
        else getattr(value, "value", value)
    )
