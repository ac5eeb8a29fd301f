"""FAISS indexes: rewriting one for a new encoder, or mapping the queries of a new encoder over one that stays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from hf_stitch.storage.files import decoding, write_whole
from hf_stitch_embeddings.embedding_map import EmbeddingMap
from hf_stitch_embeddings.export.sentence_transformers import dense_layers
from hf_stitch_embeddings.stores.arrays import UnfinishedRows, drawn
from hf_stitch_embeddings.stores.base import Description, Rows, VectorStore, needed
from hf_stitch_embeddings.vectors import SAMPLED, Metric, are_normalized, batches

CHANGES = ("add", "add_with_ids", "train")
TRAINING = 100_000
"""Most rows to which the clusters and codes of a new index are fitted."""


class _Contents:
    """Ids and vectors of an index."""

    def __init__(self, faiss: Any, index: Any) -> None:
        self.index = index
        self.inner = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexIDMap) else index
        self.ivf = faiss.try_extract_index_ivf(self.inner)
        places = np.arange(index.ntotal)
        if self.ivf is not None:
            lists = self.ivf.invlists
            found = [
                faiss.rev_swig_ptr(lists.get_ids(each), size).copy()
                for each in range(lists.nlist)
                if (size := lists.list_size(each))
            ]
            places = np.sort(np.concatenate(found)) if found else places[:0]
            self.ivf.set_direct_map_type(faiss.DirectMap.Hashtable)
        self._places = places
        self.ids = places if self.inner is index else faiss.vector_to_array(index.id_map)
        if len(np.unique(self.ids)) < len(self.ids):
            raise ValueError("the index has ids that occur more than once; FAISS cannot tell such rows apart")
        self._order = np.argsort(self.ids)

    @property
    def counted(self) -> bool:
        """Whether ids are the numbers of the rows."""
        return self.inner is self.index and bool((self.ids == np.arange(len(self.ids))).all())

    def positions(self, ids: Sequence[Any]) -> npt.NDArray[np.int64]:
        """Return the rows of ids."""
        asked = np.asarray(ids, np.int64)
        found = np.searchsorted(self.ids, asked, sorter=self._order).clip(max=len(self.ids) - 1)
        rows: npt.NDArray[np.int64] = self._order[found]
        if (unknown := self.ids[rows] != asked).any():
            raise ValueError(f"the index has no row with id {asked[unknown][0]}")
        return rows

    def rows(self, positions: npt.NDArray[np.int64]) -> Rows:
        """Return vectors."""
        found: Rows = self.inner.reconstruct_batch(np.ascontiguousarray(self._places[positions], np.int64))
        return found


class FaissStore(VectorStore):
    """Vectors in a FAISS index file. New vectors go to another file, an index of the same kind with the same ids.

    Old vectors are those that the index returns: of quantised indexes (SQ8, PQ) they are approximate. Mapped vectors
    are first collected in a folder beside the target. If the process is killed later, while the new index is built,
    only building is repeated.

    Args:
        source: File of the index of old vectors.
        target: File for the index of new vectors.
        factory: Kind of the new index, as for ``faiss.index_factory``. Default: that of the old one.

    Raises:
        ImportError: If faiss is not installed.

    Example:
        >>> import faiss
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     index = faiss.IndexFlatIP(3)
        ...     index.add(np.eye(3, dtype=np.float32))
        ...     faiss.write_index(index, str(Path(folder, "old.faiss")))
        ...     FaissStore(Path(folder, "old.faiss"), Path(folder, "new.faiss")).describe().metrics
        ('cosine', 'dot')
    """

    def __init__(self, source: str | Path, target: str | Path, *, factory: str | None = None) -> None:
        self._faiss = needed("faiss", "faiss")
        self.source, self.target = Path(source).expanduser(), Path(target).expanduser()
        self._factory = factory
        self._unfinished = UnfinishedRows(self.target)

    @classmethod
    def holds(cls, path: Path) -> bool:
        """A file ``.faiss`` or ``.index``."""
        return path.suffix in (".faiss", ".index")

    @cached_property
    def _old(self) -> _Contents:
        return self._read(self.source)

    @cached_property
    def _new(self) -> _Contents:
        return self._read(self.target)

    def _read(self, file: Path) -> _Contents:
        if not file.is_file():
            raise FileNotFoundError(f"{file} does not exist")
        with decoding(file):
            index = self._faiss.read_index(str(file))
            if not index.ntotal:
                raise ValueError(f"the FAISS index {file} is empty")
            return _Contents(self._faiss, index)

    def describe(self) -> Description:
        """Describe the old index."""
        index = self._old.index
        inner = index.metric_type == self._faiss.METRIC_INNER_PRODUCT
        some = next(drawn(index.ntotal, SAMPLED, 0))
        unit = not inner and are_normalized(self._old.rows(some))  # then distances rank as cosines do
        metrics: tuple[Metric, ...] = ("cosine", "dot") if inner else ("cosine", "l2") if unit else ("l2",)
        return Description(f"FAISS index {self.source}", index.ntotal, index.d, metrics)

    def start(self, key: str, width: int) -> None:
        """Make a folder for new vectors beside the target, or find it."""
        self._empty(width)  # a kind that cannot be built is an error now, not after all rows are mapped
        self._unfinished.open(key, self.source, len(self._old.ids), width)

    def _empty(self, width: int) -> Any:
        """Make an index of the same kind without rows."""
        faiss, old = self._faiss, self._old
        factory = self._factory
        if factory is None:
            from faiss.contrib.factory_tools import reverse_index_factory

            try:
                factory = reverse_index_factory(old.inner).replace("SQ8_direct", "SQ8")
            except (NotImplementedError, KeyError) as error:
                raise ValueError(
                    f"the kind of the FAISS index {self.source}, {type(old.inner).__name__}, is not known; pass "
                    "factory, e.g. 'Flat'"
                ) from error
        try:
            index = faiss.index_factory(width, factory, old.index.metric_type)
        except RuntimeError as error:
            raise ValueError(
                f"FAISS makes no index {factory!r} of width {width}: {error}; pass another factory"
            ) from error
        ivf = faiss.try_extract_index_ivf(index)
        if old.ivf is not None and ivf is not None:
            ivf.nprobe = old.ivf.nprobe
        if hasattr(old.inner, "hnsw") and hasattr(index, "hnsw"):
            index.hnsw.efSearch = old.inner.hnsw.efSearch
            index.hnsw.efConstruction = old.inner.hnsw.efConstruction
        if isinstance(old.index, faiss.IndexIDMap):
            return type(old.index)(index)
        return index if old.counted or ivf is not None else faiss.IndexIDMap2(index)

    def pending(self, batch_size: int) -> Iterator[tuple[Sequence[Any], Rows]]:
        """Yield rows without a new vector, in the order of the index."""
        for start in range(self._unfinished.done, len(self._old.ids), batch_size):
            rows = np.arange(start, min(start + batch_size, len(self._old.ids)))
            yield self._old.ids[rows].tolist(), self._old.rows(rows)

    def write(self, ids: Sequence[Any], vectors: Rows) -> None:
        """Write new vectors of the next rows."""
        self._unfinished.write(int(self._old.positions(ids[:1])[0]), vectors)

    def missing(self) -> int:
        """Return the number of rows without a new vector."""
        return len(self._old.ids) - self._unfinished.done

    def sample(self, count: int, seed: int) -> Iterator[tuple[Sequence[Any], Rows, Rows]]:
        """Read some rows, before they are quantised; a file that has changed is refused anyway."""
        new = self._unfinished.rows()
        for some in drawn(len(self._old.ids), count, seed):
            yield self._old.ids[some].tolist(), self._old.rows(some), np.array(new[some], np.float32)

    def switch(self) -> str:
        """Build the new index and write its file."""
        self._unfinished.check_source(self.source)
        rows = self._unfinished.rows()
        index = self._empty(rows.shape[1])
        if not index.is_trained:
            spread = np.unique(np.linspace(0, len(rows) - 1, min(TRAINING, len(rows))).astype(int))
            index.train(np.array(rows[spread], np.float32))
        start = 0
        for batch in batches(rows):
            if self._old.counted:
                index.add(batch)
            else:
                index.add_with_ids(batch, self._old.ids[start : start + len(batch)])
            start += len(batch)
        self._save(index)
        self._unfinished.close(remove=True)
        return f"Search {self.target} with the new model; {self.source} is unchanged."

    def _save(self, index: Any) -> None:
        def write(path: Path) -> None:
            with path.open("wb") as file:  # FAISS itself ignores errors when it closes a file
                self._faiss.write_index(index, self._faiss.PyCallbackIOWriter(file.write))

        write_whole(self.target, write, sync=True)

    def close(self) -> None:
        """Release the lock of an upgrade."""
        self._unfinished.close()

    def search(self, queries: Rows, k: int) -> list[list[Any]]:
        """Search the new index."""
        found = self._new.index.search(np.ascontiguousarray(queries, np.float32), k)[1]
        return [[each for each in row if each >= 0] for row in found.tolist()]

    def vectors(self, ids: Sequence[Any]) -> Rows:
        """Read new vectors, as the index returns them."""
        return self._new.rows(self._new.positions(ids))

    def replace(self, ids: Sequence[Any], vectors: Rows) -> None:
        """Put exact vectors in the place of mapped ones, and write the index file. Unknown ids are left out."""
        faiss, new = self._faiss, self._new
        known = np.isin(ids, new.ids)
        found = np.asarray(ids)[known]
        positions, given = new.positions(found.tolist()), np.ascontiguousarray(np.asarray(vectors)[known], np.float32)
        if new.ivf is not None and new.inner is new.index:
            asked = found.astype(np.int64)
            new.index.remove_ids(asked)
            new.index.add_with_ids(given, asked)
        elif isinstance(new.inner, faiss.IndexFlatCodes):
            codes = faiss.rev_swig_ptr(new.inner.codes.data(), new.inner.codes.size())
            codes.reshape(-1, new.inner.code_size)[positions] = new.inner.sa_encode(given)
        else:
            raise ValueError(
                f"{type(new.inner).__name__} cannot replace rows; upgrade into an index of another kind, e.g. "
                "factory='IVF1024,SQ8'"
            )
        self._save(new.index)


def search_mapped(index: Any, embedding_map: EmbeddingMap) -> Any:
    """Put a map of queries before a FAISS index.

    The result is an ``IndexPreTransform``: it maps queries and searches the index, which is not copied.
    ``faiss.write_index`` saves both in one file that needs no other code to search.

    It would map whatever is added to it, too, although documents belong into the old space. ``add``, ``add_with_ids``
    and ``train`` of the result therefore raise an error; a file that is read again has no such guard. Add documents,
    embedded by the *old* encoder, to the index itself.

    Args:
        index: Any FAISS index of old vectors (flat, HNSW, IVF, quantised).
        embedding_map: An affine map of direction ``query`` or ``adjoint``.

    Returns:
        The index that takes queries of the new encoder.

    Raises:
        ValueError: If the map applies to documents, is no sequence of linear layers, stands for the old model, or its
            width or metric is not that of the index.
        ImportError: If faiss is not installed.

    Example:
        >>> import faiss, torch
        >>> from hf_stitch.stitches import LinearStitch
        >>> index = faiss.IndexFlatIP(2)
        >>> index.add(np.eye(2, dtype=np.float32))
        >>> swapped = LinearStitch.of(weight=torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))
        >>> chain = search_mapped(index, EmbeddingMap.of(swapped, direction="query"))
        >>> chain.search(np.array([[3.0, 1.0, 9.0]], dtype=np.float32), 2)[1].tolist()
        [[1, 0]]
    """
    faiss = needed("faiss", "faiss")
    if embedding_map.direction == "index" or embedding_map.keeps_old:
        raise ValueError(
            f"{embedding_map!r} is no map of new queries: "
            + (
                "keep the old queries"
                if embedding_map.keeps_old
                else "rewrite the index with it, or take its adjoint()"
            )
        )
    if embedding_map.out_features != index.d:
        raise ValueError(
            f"{embedding_map!r} makes vectors of width {embedding_map.out_features}, the index has {index.d}"
        )
    inner = index.metric_type == faiss.METRIC_INNER_PRODUCT
    if inner == (embedding_map.metric == "l2"):
        has = "inner products" if inner else "Euclidean distances"
        raise ValueError(f"{embedding_map!r} is a map for {embedding_map.metric}, and the index has {has}")
    layers = dense_layers(embedding_map)
    if any(layer.activation.__name__ != "Identity" for layer in layers):
        raise ValueError(f"{embedding_map!r} is not linear, and FAISS has linear transforms only: map queries yourself")
    chain = faiss.IndexPreTransform(index)
    chain.own_fields = False
    # What is prepended last runs first.
    if embedding_map.normalized:
        chain.prepend_transform(faiss.NormalizationTransform(index.d))
    for layer in reversed(layers):
        transform = faiss.LinearTransform(layer.weight.shape[1], layer.weight.shape[0], layer.bias is not None)
        faiss.copy_array_to_vector(np.ascontiguousarray(layer.weight.numpy(), np.float32).ravel(), transform.A)
        if layer.bias is not None:
            faiss.copy_array_to_vector(np.ascontiguousarray(layer.bias.numpy(), np.float32), transform.b)
        transform.is_trained = True
        chain.prepend_transform(transform)

    def refuse(*arguments: Any, **options: Any) -> NoReturn:
        raise TypeError(
            "this index maps what it receives from the new space to the old one: add documents, embedded by the old "
            "encoder, to the index behind it"
        )

    for name in CHANGES:
        setattr(chain, name, refuse)
    return chain
