"""Store of vectors in LanceDB tables."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_stitch_embeddings.stores.arrays import sample_batches
from hf_stitch_embeddings.stores.base import Description, Rows, VectorStore, import_package, warn_of_unfinished
from hf_stitch_embeddings.vectors import Metric, Quantization

METRICS: dict[str, tuple[Metric, ...]] = {"cosine": ("cosine",), "dot": ("cosine", "dot"), "l2": ("cosine", "l2")}
"""Distance of an index -> supported metrics; with cosine, vectors have length 1."""


class LanceStore(VectorStore):
    """Store of vectors in a column of a LanceDB table.

    New vectors fill a new column. When it is complete, both columns are renamed in one commit: the new column takes the
    name of the old one, so that queries stay unchanged. The old vectors stay in the table. An index of the old column
    is built again for the new column before the switch, with the settings that LanceDB reports; the sentence of the
    result lists settings that it does not report. Ids and all remaining columns stay unchanged. The order of rows
    changes, and until the switch LanceDB searches the old column without its index, which is slower.

    **Queries should name the column** (``vector_column_name``): during and after the upgrade, the table may have two
    vector columns of the same width, and LanceDB then raises an error for queries without a column. Drop the old column
    to avoid this.

    Args:
        uri: Folder or URI of the database.
        table: Name of the table.
        column: Column of old vectors.
        id_column: Column of unique ids.
        quantization: Meaning of integers, as for :func:`~hf_stitch_embeddings.read_vectors`.
        ranges: Ranges of ``"int8"`` vectors.

    Raises:
        ImportError: If lancedb is not installed.

    Example:
        >>> import lancedb, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rows = [{"id": "a", "vector": [1.0, 0.0]}, {"id": "b", "vector": [0.0, 1.0]}]
        ...     _ = lancedb.connect(folder).create_table("docs", rows)
        ...     LanceStore(folder, "docs").describe().rows
        2
    """

    def __init__(
        self,
        uri: str,
        table: str,
        *,
        column: str = "vector",
        id_column: str = "id",
        quantization: Quantization | None = None,
        ranges: Any = None,
    ) -> None:
        self.quantization, self.ranges = quantization, ranges
        lancedb = import_package("lancedb", "lancedb")
        self.uri, self.column, self.id_column = str(uri), column, id_column
        try:
            self._table: Any = lancedb.connect(self.uri).open_table(table)
        except (ValueError, FileNotFoundError) as error:
            tables = lancedb.connect(self.uri).list_tables().tables
            raise FileNotFoundError(
                f"LanceDB table {table!r} does not exist in {uri}; tables: {', '.join(tables) or 'none'}"
            ) from error
        self.name = f"LanceDB table {table}"
        self._key = self._new_column = self._notes = ""
        self._version: int | None = None
        """Version after the last write of this object; None if this object did not create the column of new vectors."""

    @classmethod
    def holds(cls, path: Path) -> bool:
        """Return whether the folder contains ``.lance`` tables."""
        return next(path.glob("*.lance"), None) is not None

    def describe(self) -> Description:
        """Describe the column."""
        schema = self._table.schema
        for column in (self.column, self.id_column):
            if column not in schema.names:
                raise ValueError(f"{self.name} must have a column {column!r}, got: {', '.join(schema.names)}")
        if old := [name for name in schema.names if name.startswith(f"{self.column}_before_")]:
            raise ValueError(
                f"{self.name} is already upgraded: {self.column!r} holds the new vectors, {old[0]!r} the old ones. "
                f"Restore the table to map the old vectors again, or drop {old[0]!r} to map the new ones"
            )
        dtype = schema.field(self.column).type
        width = getattr(dtype, "list_size", -1)
        if width < 1:
            raise ValueError(f"column {self.column!r} of {self.name} must hold vectors of equal width, got {dtype}")
        if empty := self._count_empty(self.column):
            raise ValueError(f"{empty} rows of {self.name} lack a vector in {self.column!r}; fill or delete them first")
        rows = self._table.count_rows()
        if not rows:
            raise ValueError(f"{self.name} is empty")
        first = self._table.search().select([self.column]).limit(1).to_arrow()
        width = self._matrix(first[self.column]).shape[1]
        index = self._index()
        distance = "" if index is None else str(self._table.index_stats(index.name).distance_type)
        return Description(self.name, rows, width, METRICS.get(distance, ("cosine", "dot", "l2")))

    def _index(self) -> Any:
        return next((index for index in self._table.list_indices() if index.columns == [self.column]), None)

    def start(self, key: str, width: int) -> None:
        """Add a column for new vectors, or reuse it."""
        import pyarrow

        names = self._table.schema.names
        self._check_ids()
        warn_of_unfinished(self.name, f"{self.column}_", key, names)
        if width == self._table.schema.field(self.column).type.list_size:
            warnings.warn(
                f"{self.name} will have two vector columns of width {width}; pass "
                f"vector_column_name={self.column!r} with queries, which LanceDB then requires",
                stacklevel=3,
            )
        self._key, self._new_column = key, f"{self.column}_{key}"
        value_type = self._table.schema.field(self.column).type.value_type
        if not pyarrow.types.is_floating(value_type):
            value_type = pyarrow.float32()
        column_type = pyarrow.list_(value_type, width)
        if self._new_column in names and self._table.schema.field(self._new_column).type != column_type:
            raise ValueError(
                f"column {self._new_column!r} of {self.name} must hold vectors of width {width}, got "
                f"{self._table.schema.field(self._new_column).type}; drop it and rerun"
            )
        if self._new_column not in names:
            self._table.add_columns(pyarrow.schema([pyarrow.field(self._new_column, column_type)]))
            self._version = self._table.version

    def _check_ids(self) -> None:
        seen: set[Any] = set()
        for batch in self._table.search().select([self.id_column]).to_batches():
            for id_ in batch[self.id_column].to_pylist():
                if id_ in seen or id_ is None:
                    problem = "an empty id" if id_ is None else f"{id_!r} more than once"
                    raise ValueError(f"column {self.id_column!r} of {self.name} must have unique ids, got {problem}")
                seen.add(id_)

    def pending(self, batch_size: int) -> Iterator[tuple[Sequence[Any], Rows]]:
        """Yield rows with NULL as new vector, from a snapshot of the table."""
        query = self._table.search().where(f"`{self._new_column}` IS NULL").select([self.id_column, self.column])
        for batch in query.to_batches(batch_size):
            if len(batch):
                yield batch[self.id_column].to_pylist(), self._matrix(batch[self.column])

    def write(self, ids: Sequence[Any], vectors: Rows) -> None:
        """Merge new vectors by id, in one commit."""
        self._merge(self._new_column, ids, vectors)

    def _merge(self, column: str, ids: Sequence[Any], vectors: Rows) -> None:
        import pyarrow

        if self._version is not None and self._table.version != self._version:
            self._version = None  # another process writes, too
        value_type = self._table.schema.field(column).type.value_type
        flat = pyarrow.array(np.ascontiguousarray(vectors, np.float32).ravel()).cast(value_type)
        lists = pyarrow.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
        id_type = self._table.schema.field(self.id_column).type
        rows = pyarrow.table({self.id_column: pyarrow.array(ids, id_type), column: lists})
        self._table.merge_insert(self.id_column).when_matched_update_all().execute(rows)
        if self._version is not None:
            self._version += 1

    def missing(self) -> int:
        """Return the number of rows with NULL as new vector."""
        self._table.checkout_latest()
        return self._count_empty(self._new_column)

    def sample(self, count: int, seed: int) -> Iterator[tuple[Sequence[Any], Rows, Rows]]:
        """Read a sample of rows; all rows if other writers may have changed them during the upgrade."""
        total = self._table.count_rows()
        if self._version is None or self._table.version != self._version:
            count = total
        for offsets in sample_batches(total, count, seed):
            query = self._table.take_offsets(offsets.tolist()).select([self.id_column, self.column, self._new_column])
            sample = query.to_arrow()
            old, new = self._matrix(sample[self.column]), _matrix(sample[self._new_column])
            yield sample[self.id_column].to_pylist(), old, new

    def _matrix(self, column: Any) -> Rows:
        """Convert a column of old vectors."""
        return self.floats(_matrix(column, None), f"column {self.column!r} of {self.name}")

    def switch(self) -> str:
        """Index the new column like the old one, and swap their names in one commit."""
        old = f"{self.column}_before_{self._key}"
        if (index := self._index()) is not None:
            self._build_index(index)
        self._table.checkout_latest()
        if self._count_empty(self._new_column):
            raise ValueError(f"rows were added to {self.name} just before the switch; rerun to continue")
        version = self._table.version
        self._rename(self.column, old, self._new_column)
        if self._count_empty(self.column):
            self._rename(self.column, self._new_column, old)
            raise ValueError(f"rows were added to {self.name} during the switch, which was undone; rerun")
        return (
            f"Column {self.column!r} now holds the new vectors: search it with the new model. The old vectors are in "
            f"{old!r}: table.drop_columns([{old!r}]) removes them, table.restore({version}) reverts.{self._notes}"
        )

    def _rename(self, column: str, old_name: str, new_column: str) -> None:
        """Rename a column, and give its name to a second column, in one commit."""
        self._table.alter_columns({"path": column, "rename": old_name}, {"path": new_column, "rename": column})

    def _count_empty(self, column: str) -> int:
        count: int = self._table.count_rows(f"`{column}` IS NULL")
        return count

    def _build_index(self, index: Any) -> None:
        import lancedb.index

        stats = self._table.index_stats(index.name)
        classes: dict[str, Any] = {
            name.lower(): kind for name, kind in vars(lancedb.index).items() if isinstance(kind, type)
        }
        index_class = classes.get(str(index.index_type).lower().replace("_", ""))
        if index_class is None or stats.distance_type is None:
            raise ValueError(
                f"the kind {index.index_type} of index {index.name} of {self.name} is not supported; drop the index"
            )
        if stats.distance_type not in METRICS:
            self._notes = f" The index of {stats.distance_type} distances was not rebuilt: it does not support floats."
            return
        settings, width = self._settings(index), self._table.schema.field(self._new_column).type.list_size
        supported = {key: value for key, value in settings.items() if key in index_class.__dataclass_fields__}
        lost_settings = ["num_partitions"]  # LanceDB does not report it
        if width % supported.get("num_sub_vectors", 1):
            lost_settings.append(f"num_sub_vectors={supported.pop('num_sub_vectors')}")
        self._notes = (
            f" Its {index.index_type} index has the settings of the old one, except {' and '.join(lost_settings)} with "
            "LanceDB's defaults: use table.create_index if you had set them."
        )
        config = index_class(distance_type=stats.distance_type, **supported)
        self._table.create_index(self._new_column, config=config, name=f"{self._new_column}_idx")

    def _settings(self, index: Any) -> dict[str, int]:
        """Return the settings of an index reported by LanceDB, as options of a new index."""
        details = getattr(index, "index_details", None) or {}
        compression, graph = details.get("compression") or {}, details.get("hnsw") or {}
        settings = {key: compression.get(key) for key in ("num_bits", "num_sub_vectors")}
        settings |= {"m": graph.get("max_connections"), "ef_construction": graph.get("construction_ef")}
        return {key: value for key, value in settings.items() if value is not None}

    def search(self, queries: Rows, k: int) -> list[list[Any]]:
        """Search the new vectors by the distance of the index, or by cosine without an index."""
        index = self._index()
        distance = "cosine" if index is None else str(self._table.index_stats(index.name).distance_type)
        neighbours = []
        for query in np.asarray(queries, np.float32):
            search = self._table.search(query, vector_column_name=self.column).distance_type(distance)
            neighbours.append(search.select([self.id_column]).limit(k).to_arrow()[self.id_column].to_pylist())
        return neighbours

    def vectors(self, ids: Sequence[Any]) -> Rows:
        """Read new vectors."""
        rows = self._table.search().where(self._where_ids(ids)).select([self.id_column, self.column]).to_arrow()
        row_by_id = {id_: row for row, id_ in enumerate(rows[self.id_column].to_pylist())}
        if missing := [id_ for id_ in ids if id_ not in row_by_id]:
            raise ValueError(f"id {missing[0]!r} does not exist in {self.name}")
        return _matrix(rows[self.column])[[row_by_id[id_] for id_ in ids]]

    def _where_ids(self, ids: Sequence[Any]) -> str:
        quoted = ("'" + id_.replace("'", "''") + "'" if isinstance(id_, str) else str(id_) for id_ in ids)
        return f"`{self.id_column}` IN ({', '.join(quoted)})"

    def replace(self, ids: Sequence[Any], vectors: Rows) -> None:
        """Merge exact vectors by id, in one commit."""
        if not any(name.startswith(f"{self.column}_before_") for name in self._table.schema.names):
            raise ValueError(f"replace requires an upgraded table, but column {self.column!r} holds old vectors")
        self._merge(self.column, ids, vectors)


def _matrix(column: Any, dtype: Any = np.float32) -> Rows:
    """Convert a column of vectors to a matrix."""
    array = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    if hasattr(array, "chunks"):  # a chunked array of at most one chunk
        array = array.chunk(0)
    if array.null_count:
        raise ValueError(f"{array.null_count} vectors are missing; stop other writers and rerun")
    flat = np.asarray(array.flatten(), dtype=dtype)
    return flat.reshape(len(array), -1)
