"""FAISS indexes: rewriting one for a new encoder, or mapping the queries of a new encoder over one that stays."""

from __future__ import annotations

import re
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
from hf_stitch_embeddings.vectors import SAMPLED, Metric, are_normalized, batches, is_unit

CHANGES = ("add", "add_with_ids", "train")
TRAINING = 100_000
"""Most rows to which the clusters and codes of a new index are fitted."""
MEASURED = 1000
"""Rows by which the error of codes is measured."""
KINDS = {
    "IndexFlat": True, "IndexFlatIP": True, "IndexFlatL2": True, "IndexIVFFlat": True, "IndexHNSWFlat": True,
    "IndexScalarQuantizer": False, "IndexIVFScalarQuantizer": False, "IndexHNSWSQ": False,
    "IndexPQ": False, "IndexIVFPQ": False, "IndexHNSWPQ": False, "IndexPQFastScan": False,
    "IndexRaBitQ": False, "IndexIVFRaBitQ": False,
}  # fmt: skip
"""Kinds of indexes whose vectors can be read and that can be built again -> whether they return vectors exactly. Around
them may be ids, a second index that refines, and transforms. Others are refused: some return other vectors than they
search, some end the process when they are read, some do not return from their training."""
SCALARS = ("8bit", "4bit", "6bit", "fp16", "bf16", "8bit_uniform", "4bit_uniform", "8bit_direct", "8bit_direct_signed")
"""Codes of scalar quantisers that can be read."""
TRANSFORMS = ("PCAMatrix", "RandomRotationMatrix", "NormalizationTransform")
"""Transforms that can be built again; a file has the others, such as OPQ, as plain ``LinearTransform``."""
SAME = {"SQ8u": "SQ8", "SQ4u": "SQ4", "SQ8_direct": "SQ8", "SQ8_direct_signed": "SQ8"}
"""Codes for integers or without a name -> those that hold floats."""


def is_exact(faiss: Any, index: Any, *, built: bool = False) -> bool:
    """Return whether an index gives its vectors back exactly; kinds that are not known raise a ``ValueError``.

    ``built``: the index is yet to be trained.
    """
    index = faiss.downcast_index(index)
    kind, exact = type(index).__name__, True
    if isinstance(index, faiss.IndexIDMap):
        return is_exact(faiss, index.index, built=built)
    if isinstance(index, faiss.IndexRefine):
        is_exact(faiss, index.base_index, built=built)
        return is_exact(faiss, index.refine_index, built=built)
    if isinstance(index, faiss.IndexPreTransform):
        chain = _chain(faiss, index)
        names = [type(each).__name__ for each in chain]
        exact = is_exact(faiss, index.index, built=built) and chain[0].d_in == chain[-1].d_out
        reduced = any(each.d_out < each.d_in and not isinstance(each, faiss.PCAMatrix) for each in chain)
        if not reduced and not set(names) - {*TRANSFORMS, *([] if built else ["LinearTransform"])}:
            return exact
        kind = ", ".join([*names, type(faiss.downcast_index(index.index)).__name__])
    elif kind in KINDS:
        coder = faiss.downcast_index(index.storage) if isinstance(index, faiss.IndexHNSW) else index
        scalar = getattr(coder, "sq", None)
        known = {getattr(faiss.ScalarQuantizer, f"QT_{each}") for each in SCALARS}
        ivf = faiss.try_extract_index_ivf(index)
        if ivf is not None and not is_exact(faiss, ivf.quantizer, built=built):
            kind = f"{kind} with clusters by {type(faiss.downcast_index(ivf.quantizer)).__name__}"
        elif scalar is not None and scalar.qtype not in known:
            kind = f"{kind} of codes {scalar.qtype}"
        else:
            return KINDS[kind]
    raise ValueError(
        f"the kind {kind} of FAISS indexes is not known to "
        + ("be built: pass another factory" if built else "return its vectors: upgrade the vectors themselves")
        + ", e.g. "
        + ("'Flat' or 'IVF1024,SQ8'" if built else "in an .npy file")
    )


def _chain(faiss: Any, index: Any) -> list[Any]:
    return [faiss.downcast_VectorTransform(index.chain.at(place)) for place in range(index.chain.size())]


def coding_error(faiss: Any, index: Any, rows: Rows) -> float:
    """Return by how much the codes of a trained index change rows, as a share of their lengths (median)."""
    changed = np.linalg.norm(_coded(faiss, index, np.ascontiguousarray(rows, np.float32)) - rows, axis=1)
    return float(np.median(changed / np.maximum(np.linalg.norm(rows, axis=1), 1e-30)))


def _coded(faiss: Any, index: Any, rows: Rows) -> Rows:
    """Encode rows as an index does, and decode them."""
    index = faiss.downcast_index(index)
    for kind, part in ((faiss.IndexIDMap, "index"), (faiss.IndexHNSW, "storage"), (faiss.IndexRefine, "refine_index")):
        if isinstance(index, kind):
            return _coded(faiss, getattr(index, part), rows)
    if isinstance(index, faiss.IndexPreTransform):
        chain = _chain(faiss, index)
        for each in chain:
            rows = each.apply(rows)
        rows = _coded(faiss, index.index, rows)
        for each in reversed(chain):
            rows = each.reverse_transform(rows)
        return rows
    found: Rows = index.sa_decode(index.sa_encode(rows))
    return found


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

    def error(self, faiss: Any) -> float:
        """Estimate how far the vectors are from those that were put into the index, as a share of their lengths.

        The codes of the index encode random vectors with the mean and the covariance of its own, of which product
        quantisers lose more than of vectors in clusters; what a principal component analysis has left out is known by
        its eigenvalues.
        """
        if is_exact(faiss, self.inner):
            return 0.0
        generator = np.random.default_rng(0)
        rows = self.rows(np.sort(generator.permutation(len(self.ids))[:MEASURED]))
        mean, count = rows.mean(0), len(rows)
        drawn = mean + generator.normal(size=(MEASURED, count)) @ (rows - mean) / np.sqrt(count)
        square = coding_error(faiss, self.inner, drawn.astype(np.float32)) ** 2
        if isinstance(self.inner, faiss.IndexPreTransform):
            for each in _chain(faiss, self.inner):
                if isinstance(each, faiss.PCAMatrix):
                    values = np.maximum(faiss.vector_to_array(each.eigenvalues), 0)
                    kept = max(float(values[: each.d_out].sum()), 1e-30)
                    lost = float(values[each.d_out :].sum()) / kept * float(np.square(rows - mean).sum(1).mean())
                    square += lost / (lost + float(np.square(rows).sum(1).mean()))
        return float(np.sqrt(square))


class FaissStore(VectorStore):
    """Vectors in a FAISS index file. New vectors go to another file, an index of the same kind with the same ids.

    Old vectors are those that the index returns. Of compressed indexes they are approximate, and the error is told; of
    those that had length 1, they are normalised again. Kinds that are not known (:data:`KINDS`) are refused: upgrade
    their vectors by an :class:`~hf_stitch_embeddings.stores.ArrayStore`. Mapped vectors are first collected in a folder
    beside the target. If the process is killed later, while the new index is built, only building is repeated.

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
            with file.open("rb") as opened:
                if opened.read(2) == b"IB":
                    raise ValueError(
                        "it is a binary index; upgrade its bits: np.save('old.npy', faiss.vector_to_array(index.xb)"
                        ".reshape(index.ntotal, -1)) of faiss.read_index_binary, and ArrayStore(quantization='binary')"
                    )
            index = self._faiss.read_index(str(file))
            if not index.ntotal:
                raise ValueError(f"the FAISS index {file} is empty")
        is_exact(self._faiss, index)
        with decoding(file):
            return _Contents(self._faiss, index)

    def describe(self) -> Description:
        """Describe the old index."""
        index = self._old.index
        inner = index.metric_type == self._faiss.METRIC_INNER_PRODUCT
        if not inner and index.metric_type != self._faiss.METRIC_L2:
            raise ValueError(
                f"the FAISS index {self.source} ranks by metric {index.metric_type}; a map serves inner products and "
                "Euclidean distances"
            )
        error = self._old.error(self._faiss)
        some = self._old.rows(next(drawn(index.ntotal, SAMPLED, 0)))
        unit = not inner and (is_unit(some, error) if error else are_normalized(some))  # then both rank alike
        metrics: tuple[Metric, ...] = ("cosine", "dot") if inner else ("cosine", "l2") if unit else ("l2",)
        return Description(f"FAISS index {self.source}", index.ntotal, index.d, metrics, error)

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
                factory = reverse_index_factory(old.inner).replace(",Refine(Flat)", ",RFlat")
                factory = re.sub(r"SQ\w+", lambda each: SAME.get(each[0], each[0]), factory)
            except (NotImplementedError, KeyError, AssertionError) as error:
                raise ValueError(
                    f"how to build the kind of the FAISS index {self.source}, {type(old.inner).__name__}, is not "
                    "known; pass factory, e.g. 'Flat'"
                ) from error
        try:
            index = faiss.index_factory(width, factory, old.index.metric_type)
        except RuntimeError as error:
            raise ValueError(
                f"FAISS makes no index {factory!r} of width {width}: {error}; pass another factory"
            ) from error
        if index.metric_type != old.index.metric_type:
            raise ValueError(
                f"FAISS makes {factory!r} without the metric of {self.source}: {index.metric_type} instead of "
                f"{old.index.metric_type}; pass another factory"
            )
        is_exact(faiss, index, built=True)
        least = _least(faiss, index)
        if len(old.ids) < least:
            raise ValueError(
                f"a FAISS index {factory!r} learns its clusters and codes from {least} rows or more, and {self.source} "
                f"has {len(old.ids)}; pass another factory, e.g. 'Flat'"
            )
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
        said = f"Search {self.target} with the new model; {self.source} is unchanged."
        if not is_exact(self._faiss, index):
            some = np.array(rows[next(drawn(len(rows), MEASURED, 0))], np.float32)
            said += (
                f" Its codes change vectors by {coding_error(self._faiss, index, some):.3f} of their lengths (median)."
            )
        self._unfinished.close(remove=True)
        return said

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


def _check_documents(faiss: Any, index: Any, embedding_map: EmbeddingMap) -> None:
    """Check the lengths of documents, of indexes from which they can be read without a change of the index."""
    inner = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexIDMap) else faiss.downcast_index(index)
    if not isinstance(inner, faiss.IndexFlat | faiss.IndexHNSWFlat | faiss.IndexIVFFlat) or not inner.ntotal:
        return
    if isinstance(inner, faiss.IndexIVFFlat):
        some = _listed(faiss, inner)
    else:
        some = inner.reconstruct_batch(next(drawn(inner.ntotal, SAMPLED, 0)))
    if embedding_map.metric != "cosine":
        embedding_map.check_lengths(some, "the documents of the index", "old")
    elif not are_normalized(some):
        raise ValueError(
            f"{embedding_map!r} is a map for cosine, and the index ranks by inner product documents whose lengths are "
            "not 1: normalise them, or fit a map with metric='dot'"
        )


def _listed(faiss: Any, index: Any) -> Rows:
    """Return up to ``SAMPLED`` rows of random inverted lists: ``reconstruct`` would need a direct map of all ids."""
    lists, rows = index.invlists, list[Rows]()
    for number in np.random.default_rng(0).permutation(lists.nlist).tolist():
        if (size := lists.list_size(number)) and sum(map(len, rows)) < SAMPLED:
            codes = faiss.rev_swig_ptr(lists.get_codes(number), size * index.code_size)
            rows.append(codes.view(np.float32).reshape(size, index.d).copy())
    return np.concatenate(rows)[:SAMPLED]


def _least(faiss: Any, index: Any) -> int:
    """Return how many rows an index needs to be trained."""
    index = faiss.downcast_index(index)
    parts = [getattr(index, name, None) for name in ("index", "base_index", "refine_index", "quantizer", "storage")]
    inner = [_least(faiss, each) for each in parts if isinstance(each, faiss.Index)]
    if isinstance(index, faiss.IndexPreTransform):
        inner += [each.d_out for each in _chain(faiss, index) if isinstance(each, faiss.PCAMatrix)]
    return max(getattr(index, "nlist", 1), getattr(getattr(index, "pq", None), "ksub", 1), *inner, 1)


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
    _check_documents(faiss, index, embedding_map)
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
