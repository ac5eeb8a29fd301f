"""Collections of Qdrant."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_stitch_embeddings.stores.base import Description, Rows, VectorStore, needed, warn_of_unfinished
from hf_stitch_embeddings.vectors import Metric, Quantization

METRICS: dict[str, tuple[Metric, ...]] = {"Cosine": ("cosine",), "Dot": ("cosine", "dot"), "Euclid": ("cosine", "l2")}
"""Distance of a collection -> metrics by which it ranks if vectors have length 1 with cosine."""

PAGE = 1000
"""Points that are read back at once."""
FLOATS = ("float32", "float16")
"""Data types that hold mapped vectors; the others are integers, or codes whose error an upgrade would refuse."""
UPGRADED = re.compile(".+_[0-9a-f]{12}")
"""Names of new vectors."""


class QdrantStore(VectorStore):
    """Vectors in a Qdrant collection.

    New vectors get a vector name of their own in the same collection. A name cannot be changed, so that queries must
    name the new one when it is whole (``using=``). Ids and payloads stay, and so do the old vectors. With the distance
    Cosine, Qdrant stores vectors with length 1. A second upgrade with the same map at the same time, which only the
    local mode prevents, writes the same values. Tested with the client's local mode; the same calls serve a server.

    Args:
        location: Folder of the local mode, URL of a server, or a ``QdrantClient``.
        collection: Name of the collection.
        vector_name: Name of the old vectors. Default: the only ones.
        quantization: What vectors of the data type uint8 stand for, as for
            :func:`~hf_stitch_embeddings.read_vectors`.
        ranges: Ranges of these.

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
        qdrant_client = needed("qdrant_client", "qdrant")
        self._models = qdrant_client.models
        self._given = self._shared = not isinstance(location, str | Path)
        self._client = location
        if not self._given:
            remote = str(location).startswith(("http://", "https://"))
            if not remote and not Path(location).expanduser().is_dir():
                raise FileNotFoundError(f"{location} is no folder of Qdrant, and no URL")
            self._shared = remote
            try:
                where = {"url": str(location)} if remote else {"path": str(Path(location).expanduser())}
                self._client = qdrant_client.QdrantClient(**where)
            except RuntimeError as error:
                raise OSError(f"{location} cannot be opened: {error}") from error
        self.collection, self._asked = collection, vector_name
        self.name = f"Qdrant collection {collection}"
        self._old, self._integers = "", False
        self._started: str | None = None

    @classmethod
    def holds(cls, path: Path) -> bool:
        """A folder of the local mode, which lists its collections in a file."""
        return (path / "meta.json").is_file() and (path / "collection").is_dir()

    def describe(self) -> Description:
        """Describe the old vectors."""
        if not self._client.collection_exists(self.collection):
            known = [each.name for each in self._client.get_collections().collections]
            raise FileNotFoundError(f"there is no {self.name}, only: {', '.join(known) or 'none'}")
        named = self._named()
        shown = ", ".join(repr(each) for each in named)
        own = [each for each in named if not (UPGRADED.fullmatch(each) and self._asked is None)]
        if self._asked is None and len(own) != 1:
            raise ValueError(f"{self.name} has several vectors, {shown}: pass vector_name")
        self._old = own[0] if self._asked is None else self._asked
        if self._old not in named:
            raise ValueError(f"{self.name} has no vectors {self._old!r}, only {shown}")
        params = named[self._old]
        distance = str(params.distance.value)
        if distance not in METRICS or params.multivector_config is not None:
            kind = "several vectors for each point" if params.multivector_config is not None else distance
            raise ValueError(f"{self.name} ranks by {kind}; a map serves {', '.join(METRICS)} and single vectors")
        rows = self._client.count(self.collection, exact=True).count
        without = self._without(self._old)
        if not rows or without:
            raise ValueError(
                f"{without} of {rows} points of {self.name} have no vector {self._old!r}; all must have one"
            )
        self._integers = params.datatype == self._models.Datatype.UINT8
        first = self._client.scroll(self.collection, limit=1, with_payload=False, with_vectors=[self._old])[0]
        return Description(self.name, rows, self._rows(first, self._old).shape[1], METRICS[distance])

    @property
    def _new(self) -> str:
        """Name of the new vectors: of the upgrade that was started, or the only one that the collection has."""
        if self._started is None:
            self.describe()
            place = re.compile(re.escape(self._old or "vector") + "_[0-9a-f]{12}")
            found = [each for each in self._named() if place.fullmatch(each)]
            if len(found) != 1:
                raise ValueError(
                    f"{self.name} has {len(found) or 'no'} new vectors{f', {found}' if found else ''}: "
                    + ("delete those that are not in use" if found else "upgrade it first")
                )
            self._started = found[0]
        return self._started

    def _named(self) -> dict[str, Any]:
        configured = self._client.get_collection(self.collection).config.params.vectors
        return configured if isinstance(configured, dict) else {"": configured}

    def _lacking(self, name: str) -> Any:
        return self._models.Filter(must_not=[self._models.HasVectorCondition(has_vector=name)])

    def _without(self, name: str) -> int:
        found: int = self._client.count(self.collection, count_filter=self._lacking(name), exact=True).count
        return found

    def start(self, key: str, width: int) -> None:
        """Add a vector name, or find it."""
        named = self._named()
        warn_of_unfinished(self.name, f"{self._old or 'vector'}_", key, named)
        self._started = f"{self._old or 'vector'}_{key}"
        if self._new not in named:
            old = named[self._old]
            kind = old.datatype if str(getattr(old.datatype, "value", "")) in FLOATS else None
            dense = self._models.DenseVectorConfig(size=width, distance=old.distance, datatype=kind)
            config = self._models.DenseVectorNameConfig(dense=dense)
            self._client.create_vector_name(self.collection, self._new, config)
        if set(self._lost()) - {"datatype"}:
            declared = {field: getattr(named[self._old], field, None) for field in self._changeable}
            change = self._models.VectorParamsDiff(**declared)
            self._client.update_collection(self.collection, vectors_config={self._new: change})

    @property
    def _changeable(self) -> list[str]:
        """What can be declared for a vector after it was made."""
        return list(self._models.VectorParamsDiff.model_fields)

    def _lost(self) -> dict[str, Any]:
        """Return what the old vectors declare and the new ones do not."""
        named = self._named()
        old, new = ({field: getattr(named[name], field, None) for field in ("datatype", *self._changeable)}
                    for name in (self._old, self._new))  # fmt: skip
        default = {"datatype": self._models.Datatype.FLOAT32, "on_disk": False}
        return {
            field: value
            for field, value in old.items()
            if value is not None and value != new[field] and not (new[field] is None and value == default.get(field))
        }

    def pending(self, batch_size: int) -> Iterator[tuple[Sequence[Any], Rows]]:
        """Yield points without the new vector, in the order of ids."""
        offset = None
        while True:
            points, offset = self._client.scroll(
                self.collection, scroll_filter=self._lacking(self._new), limit=batch_size, offset=offset,
                with_payload=False, with_vectors=[self._old],
            )  # fmt: skip
            if points:
                yield [each.id for each in points], self._rows(points, self._old)
            if offset is None:
                return

    def _rows(self, points: Sequence[Any], name: str) -> Rows:
        found = [each.vector if isinstance(each.vector, list) else (each.vector or {}).get(name) for each in points]
        if lacking := [point.id for point, vector in zip(points, found, strict=True) if vector is None]:
            raise ValueError(f"{len(lacking)} points of {self.name} have no vector {name!r}, e.g. {lacking[0]!r}")
        if name != self._old:
            return np.array(found, dtype=np.float32)
        rows = np.array(found, dtype=np.float32)
        if self._integers and (rows != np.round(rows)).any():
            raise ValueError(
                f"vectors {name!r} of {self.name} have the data type uint8 and no integers any more: with the distance "
                "Cosine they have been normalised, so that no ranges read them; take them from where they came"
            )
        return self.floats(rows.astype(np.uint8) if self._integers else rows, self.name)

    def write(self, ids: Sequence[Any], vectors: Rows) -> None:
        """Write new vectors of points, and wait until they are there."""
        points = [
            self._models.PointVectors(id=each, vector={self._new: row})
            for each, row in zip(ids, np.asarray(vectors, np.float32).tolist(), strict=True)
        ]
        self._client.update_vectors(self.collection, points, wait=True)

    def missing(self) -> int:
        """Return the number of points without the new vector."""
        return self._without(self._new)

    def sample(self, count: int, seed: int) -> Iterator[tuple[Sequence[Any], Rows, Rows]]:
        """Read random points, drawn by Qdrant; all of them if others may have changed points since they were mapped."""
        if self._shared:
            yield from self._all()
        elif count:
            random = self._models.SampleQuery(sample=self._models.Sample.RANDOM)
            points = self._client.query_points(
                self.collection, query=random, limit=count, with_payload=False, with_vectors=[self._old, self._new]
            ).points
            yield self._both(points)

    def _all(self) -> Iterator[tuple[Sequence[Any], Rows, Rows]]:
        offset = None
        while True:
            points, offset = self._client.scroll(
                self.collection, limit=PAGE, offset=offset, with_payload=False, with_vectors=[self._old, self._new]
            )
            if points:
                yield self._both(points)
            if offset is None:
                return

    def _both(self, points: Sequence[Any]) -> tuple[Sequence[Any], Rows, Rows]:
        return [each.id for each in points], self._rows(points, self._old), self._rows(points, self._new)

    def switch(self) -> str:
        """Tell the name of the new vectors, and what the old ones declare and these do not."""
        lost = ", ".join(f"{field}={_plain(value)}" for field, value in self._lost().items())
        return (
            f"Search {self.name} with using={self._new!r} and the new model; points that are added later need a vector "
            "of this name, too. The old vectors are still there; "
            f"client.delete_vector_name({self.collection!r}, {self._old!r}) removes them."
            + (f" The new vectors lack what these declare, {lost}: see client.update_collection." if lost else "")
        )

    def search(self, queries: Rows, k: int) -> list[list[Any]]:
        """Search the new vectors."""
        return [
            [
                each.id
                for each in self._client.query_points(
                    self.collection, query=query, using=self._new, limit=k, with_payload=False
                ).points
            ]
            for query in np.asarray(queries, np.float32).tolist()
        ]

    def vectors(self, ids: Sequence[Any]) -> Rows:
        """Read new vectors."""
        points = self._client.retrieve(self.collection, list(ids), with_payload=False, with_vectors=[self._new])
        found = {each.id: each for each in points}
        if missing := [each for each in ids if each not in found]:
            raise ValueError(f"{self.name} has no point with id {missing[0]!r}")
        return self._rows([found[each] for each in ids], self._new)

    def replace(self, ids: Sequence[Any], vectors: Rows) -> None:
        """Overwrite new vectors of points; ids of none are left out."""
        there = {each.id for each in self._client.retrieve(self.collection, list(ids), with_payload=False)}
        kept = [row for row, each in enumerate(ids) if each in there]
        if kept:
            self.write([ids[row] for row in kept], np.asarray(vectors)[kept])

    def close(self) -> None:
        """Close the client, unless it was given."""
        if not self._given:
            self._client.close()


def _plain(value: Any) -> Any:
    """Return a setting as it is written in JSON."""
    return (
        value.model_dump(mode="json", exclude_none=True)
        if hasattr(value, "model_dump")
        else getattr(value, "value", value)
    )
