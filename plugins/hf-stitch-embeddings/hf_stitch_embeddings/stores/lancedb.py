"""Tables of LanceDB."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_stitch_embeddings.stores.arrays import drawn
from hf_stitch_embeddings.stores.base import Description, Rows, VectorStore, needed, warn_of_unfinished
from hf_stitch_embeddings.vectors import Metric, Quantization

METRICS: dict[str, tuple[Metric, ...]] = {"cosine": ("cosine",), "dot": ("cosine", "dot"), "l2": ("cosine", "l2")}
"""Distance of an index -> metrics by which it ranks if vectors have length 1 with cosine."""


class LanceStore(VectorStore):
    """Vectors in a column of a LanceDB table.

    New vectors fill a column of their own. When it is whole, both columns are renamed in one commit: the new one gets
    the name of the old one, so that queries stay as they are. The old vectors stay in the table. If they had an index,
    the new ones get one of the same kind before the switch, with what LanceDB tells of its settings; the sentence of
    the result names what it does not. Ids and all other columns stay; the order of rows changes, and until the switch
    LanceDB searches the old column without its index, which is slower.

    **Queries should name the column** (``vector_column_name``): of two columns of vectors of one width, which there are
    during and after the upgrade, LanceDB chooses none and raises an error. To end this, drop the old column.

    Args:
        uri: Folder or URI of the database.
        table: Name of the table.
        column: Column of old vectors.
        id_column: Column of ids, which must be unique.
        quantization: What integers stand for, as for :func:`~hf_stitch_embeddings.read_vectors`.
        ranges: Ranges of these integers.

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
        lancedb = needed("lancedb", "lancedb")
        self.uri, self.column, self.id_column = str(uri), column, id_column
        try:
            self._table: Any = lancedb.connect(self.uri).open_table(table)
        except (ValueError, FileNotFoundError) as error:
            known = lancedb.connect(self.uri).list_tables().tables
            raise FileNotFoundError(
                f"{uri} has no LanceDB table {table!r}, only: {', '.join(known) or 'none'}"
            ) from error
        self.name = f"LanceDB table {table}"
        self._key = self._fresh = self._notes = ""
        self._version: int | None = None
        """Version after the last write of this object; None if it did not make the column of new vectors itself."""

    @classmethod
    def holds(cls, path: Path) -> bool:
        """A folder with tables, which are folders ``.lance``."""
        return next(path.glob("*.lance"), None) is not None

    def describe(self) -> Description:
        """Describe the column."""
        schema = self._table.schema
        for column in (self.column, self.id_column):
            if column not in schema.names:
                raise ValueError(f"{self.name} has no column {column!r}, only: {', '.join(schema.names)}")
        if before := [name for name in schema.names if name.startswith(f"{self.column}_before_")]:
            raise ValueError(
                f"{self.name} is already upgraded: {self.column!r} holds new vectors, and {before[0]!r} the old ones. "
                f"To map those again, restore the table first; to map the new ones once more, drop {before[0]!r} first"
            )
        kind = schema.field(self.column).type
        width = getattr(kind, "list_size", -1)
        if width < 1:
            raise ValueError(f"column {self.column!r} of {self.name} must hold vectors of one width, got {kind}")
        if empty := self._count_empty(self.column):
            raise ValueError(
                f"{empty} rows of {self.name} have no vector in {self.column!r}; fill or delete them first"
            )
        rows = self._table.count_rows()
        if not rows:
            raise ValueError(f"{self.name} is empty")
        first = self._table.search().select([self.column]).limit(1).to_arrow()
        width = self._matrix(first[self.column]).shape[1]
        index = self._index()
        distance = "" if index is None else str(self._table.index_stats(index.name).distance_type)
        return Description(self.name, rows, width, METRICS.get(distance, ("cosine", "dot", "l2")))

    def _index(self) -> Any:
        return next((each for each in self._table.list_indices() if each.columns == [self.column]), None)

    def start(self, key: str, width: int) -> None:
        """Add a column for new vectors, or find it."""
        import pyarrow

        names = self._table.schema.names
        self._check_ids()
        warn_of_unfinished(self.name, f"{self.column}_", key, names)
        if width == self._table.schema.field(self.column).type.list_size:
            warnings.warn(
                f"{self.name} will have two columns of vectors of width {width}; LanceDB then searches only if queries "
                f"name one, with vector_column_name={self.column!r}",
                stacklevel=3,
            )
        self._key, self._fresh = key, f"{self.column}_{key}"
        item = self._table.schema.field(self.column).type.value_type
        if not pyarrow.types.is_floating(item):
            item = pyarrow.float32()
        kind = pyarrow.list_(item, width)
        if self._fresh in names and self._table.schema.field(self._fresh).type != kind:
            raise ValueError(
                f"column {self._fresh!r} of {self.name} must hold vectors of width {width}, got "
                f"{self._table.schema.field(self._fresh).type}; drop it and run again"
            )
        if self._fresh not in names:
            self._table.add_columns(pyarrow.schema([pyarrow.field(self._fresh, kind)]))
            self._version = self._table.version

    def _check_ids(self) -> None:
        seen: set[Any] = set()
        for batch in self._table.search().select([self.id_column]).to_batches():
            for each in batch[self.id_column].to_pylist():
                if each in seen or each is None:
                    problem = "is empty" if each is None else f"has {each!r} more than once"
                    raise ValueError(f"column {self.id_column!r} of {self.name} {problem}; ids must be unique")
                seen.add(each)

    def pending(self, batch_size: int) -> Iterator[tuple[Sequence[Any], Rows]]:
        """Yield rows whose new vector is NULL, of the table as it is at the start of the pass."""
        query = self._table.search().where(f"`{self._fresh}` IS NULL").select([self.id_column, self.column])
        for batch in query.to_batches(batch_size):
            if len(batch):
                yield batch[self.id_column].to_pylist(), self._matrix(batch[self.column])

    def write(self, ids: Sequence[Any], vectors: Rows) -> None:
        """Merge new vectors by id, in one commit."""
        self._merge(self._fresh, ids, vectors)

    def _merge(self, column: str, ids: Sequence[Any], vectors: Rows) -> None:
        import pyarrow

        if self._version is not None and self._table.version != self._version:
            self._version = None  # somebody else writes, too
        item = self._table.schema.field(column).type.value_type
        flat = pyarrow.array(np.ascontiguousarray(vectors, np.float32).ravel()).cast(item)
        lists = pyarrow.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
        kind = self._table.schema.field(self.id_column).type
        rows = pyarrow.table({self.id_column: pyarrow.array(ids, kind), column: lists})
        self._table.merge_insert(self.id_column).when_matched_update_all().execute(rows)
        if self._version is not None:
            self._version += 1

    def missing(self) -> int:
        """Return the number of rows whose new vector is NULL."""
        self._table.checkout_latest()
        return self._count_empty(self._fresh)

    def sample(self, count: int, seed: int) -> Iterator[tuple[Sequence[Any], Rows, Rows]]:
        """Read some rows; all of them if others may have changed rows since they were mapped."""
        total = self._table.count_rows()
        if self._version is None or self._table.version != self._version:
            count = total
        for some in drawn(total, count, seed):
            query = self._table.take_offsets(some.tolist()).select([self.id_column, self.column, self._fresh])
            found = query.to_arrow()
            yield found[self.id_column].to_pylist(), self._matrix(found[self.column]), _matrix(found[self._fresh])

    def _matrix(self, column: Any) -> Rows:
        """Read old vectors."""
        return self.floats(_matrix(column, None), f"column {self.column!r} of {self.name}")

    def switch(self) -> str:
        """Index the new column as the old one is, and exchange their names in one commit."""
        old = f"{self.column}_before_{self._key}"
        if (index := self._index()) is not None:
            self._build_index(index)
        self._table.checkout_latest()
        if self._count_empty(self._fresh):
            raise ValueError(f"rows were added to {self.name} just before the switch; run again, which continues")
        version = self._table.version
        self._rename(self.column, old, self._fresh)
        if self._count_empty(self.column):
            self._rename(self.column, self._fresh, old)
            raise ValueError(f"rows were added to {self.name} during the switch, which was undone; run again")
        return (
            f"Column {self.column!r} now holds the new vectors: search it with the new model. The old ones are in "
            f"{old!r}: table.drop_columns([{old!r}]) removes them, table.restore({version}) goes back.{self._notes}"
        )

    def _rename(self, column: str, aside: str, instead: str) -> None:
        """Rename a column, and another one to its name, in one commit."""
        self._table.alter_columns({"path": column, "rename": aside}, {"path": instead, "rename": column})

    def _count_empty(self, column: str) -> int:
        found: int = self._table.count_rows(f"`{column}` IS NULL")
        return found

    def _build_index(self, index: Any) -> None:
        import lancedb.index

        stats = self._table.index_stats(index.name)
        kinds: dict[str, Any] = {
            name.lower(): kind for name, kind in vars(lancedb.index).items() if isinstance(kind, type)
        }
        kind = kinds.get(str(index.index_type).lower().replace("_", ""))
        if kind is None or stats.distance_type is None:
            raise ValueError(
                f"the index {index.name} of {self.name} is of the unknown kind {index.index_type}; drop it"
            )
        if stats.distance_type not in METRICS:
            self._notes = f" The index of {stats.distance_type} distances was not made again: it takes no floats."
            return
        wanted, width = self._settings(index), self._table.schema.field(self._fresh).type.list_size
        known = {key: value for key, value in wanted.items() if key in kind.__dataclass_fields__}
        lost = ["num_partitions"]  # LanceDB does not tell it
        if width % known.get("num_sub_vectors", 1):
            lost.append(f"num_sub_vectors={known.pop('num_sub_vectors')}")
        self._notes = (
            f" Its index of kind {index.index_type} has the settings of the old one, except {' and '.join(lost)}, "
            "which are LanceDB's defaults: make another with table.create_index if you had chosen them."
        )
        config = kind(distance_type=stats.distance_type, **known)
        self._table.create_index(self._fresh, config=config, name=f"{self._fresh}_idx")

    def _settings(self, index: Any) -> dict[str, int]:
        """Return what LanceDB tells of the settings of an index, by the names that it takes."""
        details = getattr(index, "index_details", None) or {}
        coded, graph = details.get("compression") or {}, details.get("hnsw") or {}
        found = {key: coded.get(key) for key in ("num_bits", "num_sub_vectors")}
        found |= {"m": graph.get("max_connections"), "ef_construction": graph.get("construction_ef")}
        return {key: value for key, value in found.items() if value is not None}

    def search(self, queries: Rows, k: int) -> list[list[Any]]:
        """Search the new vectors, by the distance of the index, or by cosine."""
        index = self._index()
        distance = "cosine" if index is None else str(self._table.index_stats(index.name).distance_type)
        found = []
        for query in np.asarray(queries, np.float32):
            asked = self._table.search(query, vector_column_name=self.column).distance_type(distance)
            found.append(asked.select([self.id_column]).limit(k).to_arrow()[self.id_column].to_pylist())
        return found

    def vectors(self, ids: Sequence[Any]) -> Rows:
        """Read new vectors."""
        rows = self._table.search().where(self._among(ids)).select([self.id_column, self.column]).to_arrow()
        places = {each: place for place, each in enumerate(rows[self.id_column].to_pylist())}
        if missing := [each for each in ids if each not in places]:
            raise ValueError(f"{self.name} has no row with id {missing[0]!r}")
        return _matrix(rows[self.column])[[places[each] for each in ids]]

    def _among(self, ids: Sequence[Any]) -> str:
        quoted = ("'" + each.replace("'", "''") + "'" if isinstance(each, str) else str(each) for each in ids)
        return f"`{self.id_column}` IN ({', '.join(quoted)})"

    def replace(self, ids: Sequence[Any], vectors: Rows) -> None:
        """Merge exact vectors by id, in one commit."""
        if not any(name.startswith(f"{self.column}_before_") for name in self._table.schema.names):
            raise ValueError(f"{self.name} is not upgraded: column {self.column!r} holds the old vectors")
        self._merge(self.column, ids, vectors)


def _matrix(column: Any, dtype: Any = np.float32) -> Rows:
    """Read a column of vectors."""
    whole = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    if hasattr(whole, "chunks"):  # a chunked array of one chunk or none
        whole = whole.chunk(0)
    if whole.null_count:
        raise ValueError(f"{whole.null_count} vectors are missing; stop other writers and run again")
    flat = np.asarray(whole.flatten(), dtype=dtype)
    return flat.reshape(len(whole), -1)
