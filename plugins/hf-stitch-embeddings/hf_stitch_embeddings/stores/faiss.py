"""Store of vectors in FAISS indexes, and search of an unchanged index with mapped queries."""

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
from hf_stitch_embeddings.stores.arrays import UnfinishedRows, sample_batches
from hf_stitch_embeddings.stores.base import Description, Rows, VectorStore, import_package
from hf_stitch_embeddings.vectors import SAMPLED, Metric, are_normalized, batches, was_normalized

CHANGES = ("add", "add_with_ids", "train")
"""Methods of an index that :func:`search_mapped` replaces by an error."""
MAX_TRAINING_ROWS = 100_000
"""Maximum number of rows to train a new index on."""
ERROR_ROWS = 1000
"""Number of rows to measure the error of codes with."""
KINDS = {
    "IndexFlat": True, "IndexFlatIP": True, "IndexFlatL2": True, "IndexIVFFlat": True, "IndexHNSWFlat": True,
    "IndexScalarQuantizer": False, "IndexIVFScalarQuantizer": False, "IndexHNSWSQ": False,
    "IndexPQ": False, "IndexIVFPQ": False, "IndexHNSWPQ": False, "IndexPQFastScan": False,
    "IndexRaBitQ": False, "IndexIVFRaBitQ": False,
}  # fmt: skip
"""Supported kinds of indexes -> whether they return exact vectors. Ids, a refining index and transforms may wrap them.
Other kinds raise an error: some return vectors that differ from the searched ones, some crash the process on reading,
some never finish training."""
SCALARS = ("8bit", "4bit", "6bit", "fp16", "bf16", "8bit_uniform", "4bit_uniform", "8bit_direct", "8bit_direct_signed")
"""Readable codes of scalar quantizers."""
TRANSFORMS = ("PCAMatrix", "RandomRotationMatrix", "NormalizationTransform")
"""Transforms that can be built again; files store all remaining ones, such as OPQ, as plain ``LinearTransform``."""
FLOAT_CODES = {"SQ8u": "SQ8", "SQ4u": "SQ4", "SQ8_direct": "SQ8", "SQ8_direct_signed": "SQ8"}
"""Codes for integers or without a factory name -> equivalent codes for floats."""


def is_exact(faiss: Any, index: Any, *, is_new: bool = False) -> bool:
    """Return whether an index returns exact vectors; raise ``ValueError`` for unsupported kinds.

    ``is_new``: the index is not trained yet.
    """
    index = faiss.downcast_index(index)
    kind, exact = type(index).__name__, True
    if isinstance(index, faiss.IndexIDMap):
        return is_exact(faiss, index.index, is_new=is_new)
    if isinstance(index, faiss.IndexRefine):
        is_exact(faiss, index.base_index, is_new=is_new)  # raises for unsupported kinds
        return is_exact(faiss, index.refine_index, is_new=is_new)
    if isinstance(index, faiss.IndexPreTransform):
        chain = _chain(faiss, index)
        names = [type(transform).__name__ for transform in chain]
        exact = is_exact(faiss, index.index, is_new=is_new) and chain[0].d_in == chain[-1].d_out
        reduced = any(
            transform.d_out < transform.d_in and not isinstance(transform, faiss.PCAMatrix) for transform in chain
        )
        if not reduced and not set(names) - {*TRANSFORMS, *([] if is_new else ["LinearTransform"])}:
            return exact
        kind = ", ".join([*names, type(faiss.downcast_index(index.index)).__name__])
    elif kind in KINDS:
        coder = faiss.downcast_index(index.storage) if isinstance(index, faiss.IndexHNSW) else index
        scalar = getattr(coder, "sq", None)
        readable = {getattr(faiss.ScalarQuantizer, f"QT_{code}") for code in SCALARS}
        ivf = faiss.try_extract_index_ivf(index)
        if ivf is not None and not is_exact(faiss, ivf.quantizer, is_new=is_new):
            kind = f"{kind} with clusters by {type(faiss.downcast_index(ivf.quantizer)).__name__}"
        elif scalar is not None and scalar.qtype not in readable:
            kind = f"{kind} of codes {scalar.qtype}"
        else:
            return KINDS[kind]
    raise ValueError(
        f"FAISS indexes of kind {kind} are not supported "
        + (
            "as new indexes: pass a different factory, e.g. 'Flat' or 'IVF1024,SQ8'"
            if is_new
            else "as old indexes: upgrade the original vectors, e.g. in an .npy file"
        )
    )


def _chain(faiss: Any, index: Any) -> list[Any]:
    return [faiss.downcast_VectorTransform(index.chain.at(place)) for place in range(index.chain.size())]


def coding_error(faiss: Any, index: Any, rows: Rows) -> float:
    """Return the median error of the codes of a trained index, relative to the lengths of rows."""
    errors = np.linalg.norm(_encode_and_decode(faiss, index, np.ascontiguousarray(rows, np.float32)) - rows, axis=1)
    return float(np.median(errors / np.maximum(np.linalg.norm(rows, axis=1), 1e-30)))


def _encode_and_decode(faiss: Any, index: Any, rows: Rows) -> Rows:
    """Encode rows with the codes of an index, and decode them."""
    index = faiss.downcast_index(index)
    for kind, name in ((faiss.IndexIDMap, "index"), (faiss.IndexHNSW, "storage"), (faiss.IndexRefine, "refine_index")):
        if isinstance(index, kind):
            return _encode_and_decode(faiss, getattr(index, name), rows)
    if isinstance(index, faiss.IndexPreTransform):
        chain = _chain(faiss, index)
        for transform in chain:
            rows = transform.apply(rows)
        rows = _encode_and_decode(faiss, index.index, rows)
        for transform in reversed(chain):
            rows = transform.reverse_transform(rows)
        return rows
    decoded: Rows = index.sa_decode(index.sa_encode(rows))
    return decoded


class _Contents:
    """Reader of ids and vectors of an index."""

    def __init__(self, faiss: Any, index: Any) -> None:
        self.index = index
        self.inner = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexIDMap) else index
        self.ivf = faiss.try_extract_index_ivf(self.inner)
        internal_ids = np.arange(index.ntotal)
        if self.ivf is not None:
            lists = self.ivf.invlists
            list_ids = [
                faiss.rev_swig_ptr(lists.get_ids(list_number), size).copy()
                for list_number in range(lists.nlist)
                if (size := lists.list_size(list_number))
            ]
            internal_ids = np.sort(np.concatenate(list_ids)) if list_ids else internal_ids[:0]
            self.ivf.set_direct_map_type(faiss.DirectMap.Hashtable)
        self._internal_ids = internal_ids
        self.ids = internal_ids if self.inner is index else faiss.vector_to_array(index.id_map)
        if len(np.unique(self.ids)) < len(self.ids):
            raise ValueError("ids of the index must be unique; FAISS cannot distinguish rows with the same id")
        self._order = np.argsort(self.ids)

    @property
    def ids_are_rows(self) -> bool:
        """Whether ids equal the row numbers."""
        return self.inner is self.index and bool((self.ids == np.arange(len(self.ids))).all())

    def positions(self, ids: Sequence[Any]) -> npt.NDArray[np.int64]:
        """Return the row numbers of ids."""
        id_array = np.asarray(ids, np.int64)
        order_indices = np.searchsorted(self.ids, id_array, sorter=self._order).clip(max=len(self.ids) - 1)
        rows: npt.NDArray[np.int64] = self._order[order_indices]
        if (unknown := self.ids[rows] != id_array).any():
            raise ValueError(f"id {id_array[unknown][0]} does not exist in the index")
        return rows

    def rows(self, positions: npt.NDArray[np.int64]) -> Rows:
        """Return the vectors at positions."""
        vectors: Rows = self.inner.reconstruct_batch(np.ascontiguousarray(self._internal_ids[positions], np.int64))
        return vectors

    def error(self, faiss: Any) -> float:
        """Estimate the error of the returned vectors, relative to their lengths.

        The estimate encodes random vectors with the mean and the covariance of the index. It is conservative for
        clustered vectors, where product quantizers lose less. The eigenvalues of a principal component analysis
        determine the loss of the omitted components.
        """
        if is_exact(faiss, self.inner):
            return 0.0
        generator = np.random.default_rng(0)
        rows = self.rows(np.sort(generator.permutation(len(self.ids))[:ERROR_ROWS]))
        mean, count = rows.mean(0), len(rows)
        probes = mean + generator.normal(size=(ERROR_ROWS, count)) @ (rows - mean) / np.sqrt(count)
        squared_error = coding_error(faiss, self.inner, probes.astype(np.float32)) ** 2
        if isinstance(self.inner, faiss.IndexPreTransform):
            for transform in _chain(faiss, self.inner):
                if isinstance(transform, faiss.PCAMatrix):
                    eigenvalues = np.maximum(faiss.vector_to_array(transform.eigenvalues), 0)
                    variance_kept = max(float(eigenvalues[: transform.d_out].sum()), 1e-30)
                    share_lost = (
                        float(eigenvalues[transform.d_out :].sum())
                        / variance_kept
                        * float(np.square(rows - mean).sum(1).mean())
                    )
                    squared_error += share_lost / (share_lost + float(np.square(rows).sum(1).mean()))
        return float(np.sqrt(squared_error))


class FaissStore(VectorStore):
    """Store of vectors in a FAISS index file. New vectors go to a second file, with the same kind of index and ids.

    Old vectors are read back from the index. Compressed indexes return approximate vectors, and the upgrade reports the
    error; vectors that had length 1 are normalised again. Unsupported kinds (see :data:`KINDS`) raise an error: upgrade
    the original vectors with an :class:`~hf_stitch_embeddings.stores.ArrayStore`. Mapped vectors are first collected in
    a folder next to the target. If the process is killed during the build of the new index, only the build is repeated.

    Args:
        source: File with the index of old vectors.
        target: File for the index of new vectors.
        factory: Kind of the new index, as for ``faiss.index_factory``. Default: the kind of the old index.

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
        self._faiss = import_package("faiss", "faiss")
        self.source, self.target = Path(source).expanduser(), Path(target).expanduser()
        self._factory = factory
        self._unfinished = UnfinishedRows(self.target)

    @classmethod
    def holds(cls, path: Path) -> bool:
        """Return whether the file is a ``.faiss`` or ``.index`` file."""
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
                        "binary indexes are not supported; upgrade the bits with ArrayStore(quantization='binary'): "
                        "np.save('old.npy', faiss.vector_to_array(index.xb).reshape(index.ntotal, -1)) with index from "
                        "faiss.read_index_binary"
                    )
            index = self._faiss.read_index(str(file))
            if not index.ntotal:
                raise ValueError(f"the FAISS index {file} is empty")
        is_exact(self._faiss, index)  # raises for unsupported kinds
        with decoding(file):
            return _Contents(self._faiss, index)

    def describe(self) -> Description:
        """Describe the old index."""
        index = self._old.index
        inner = index.metric_type == self._faiss.METRIC_INNER_PRODUCT
        if not inner and index.metric_type != self._faiss.METRIC_L2:
            raise ValueError(
                f"metric of the FAISS index {self.source} must be inner product or Euclidean distance, got "
                f"{index.metric_type}"
            )
        error = self._old.error(self._faiss)
        sample = self._old.rows(next(sample_batches(index.ntotal, SAMPLED, 0)))
        # Among vectors of length 1, the cosine and the Euclidean distance rank alike.
        unit = not inner and (was_normalized(sample, error) if error else are_normalized(sample))
        metrics: tuple[Metric, ...] = ("cosine", "dot") if inner else ("cosine", "l2") if unit else ("l2",)
        return Description(f"FAISS index {self.source}", index.ntotal, index.d, metrics, error)

    def start(self, key: str, width: int) -> None:
        """Create a folder for new vectors next to the target, or reuse it."""
        self._empty_index(width)  # raises errors of the factory before rows are mapped
        self._unfinished.open(key, self.source, len(self._old.ids), width)

    def _empty_index(self, width: int) -> Any:
        """Return an empty index of the same kind."""
        faiss, old = self._faiss, self._old
        factory = self._factory
        if factory is None:
            from faiss.contrib.factory_tools import reverse_index_factory

            try:
                factory = reverse_index_factory(old.inner).replace(",Refine(Flat)", ",RFlat")
                factory = re.sub(r"SQ\w+", lambda match: FLOAT_CODES.get(match[0], match[0]), factory)
            except (NotImplementedError, KeyError, AssertionError) as error:
                raise ValueError(
                    f"the factory string of the FAISS index {self.source} ({type(old.inner).__name__}) is unknown; "
                    "pass factory, e.g. 'Flat'"
                ) from error
        try:
            index = faiss.index_factory(width, factory, old.index.metric_type)
        except RuntimeError as error:
            raise ValueError(
                f"FAISS cannot build an index {factory!r} of width {width}: {error}; pass a different factory"
            ) from error
        if index.metric_type != old.index.metric_type:
            raise ValueError(
                f"factory {factory!r} must have the metric of {self.source}, {old.index.metric_type}, got "
                f"{index.metric_type}; pass a different factory"
            )
        is_exact(faiss, index, is_new=True)  # raises for unsupported kinds
        min_rows = _min_training_rows(faiss, index)
        if len(old.ids) < min_rows:
            raise ValueError(
                f"a FAISS index {factory!r} requires at least {min_rows} rows for training, got {len(old.ids)} from "
                f"{self.source}; pass a different factory, e.g. 'Flat'"
            )
        ivf = faiss.try_extract_index_ivf(index)
        if old.ivf is not None and ivf is not None:
            ivf.nprobe = old.ivf.nprobe
        if hasattr(old.inner, "hnsw") and hasattr(index, "hnsw"):
            index.hnsw.efSearch = old.inner.hnsw.efSearch
            index.hnsw.efConstruction = old.inner.hnsw.efConstruction
        if isinstance(old.index, faiss.IndexIDMap):
            return type(old.index)(index)
        return index if old.ids_are_rows or ivf is not None else faiss.IndexIDMap2(index)

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
        """Read a sample of rows before quantization; :meth:`switch` checks that the file has not changed."""
        new = self._unfinished.rows()
        for positions in sample_batches(len(self._old.ids), count, seed):
            yield self._old.ids[positions].tolist(), self._old.rows(positions), np.array(new[positions], np.float32)

    def switch(self) -> str:
        """Build the new index and write its file."""
        self._unfinished.check_source(self.source)
        rows = self._unfinished.rows()
        index = self._empty_index(rows.shape[1])
        if not index.is_trained:
            training_rows = np.unique(np.linspace(0, len(rows) - 1, min(MAX_TRAINING_ROWS, len(rows))).astype(int))
            index.train(np.array(rows[training_rows], np.float32))
        start = 0
        for batch in batches(rows):
            if self._old.ids_are_rows:
                index.add(batch)
            else:
                index.add_with_ids(batch, self._old.ids[start : start + len(batch)])
            start += len(batch)
        self._save(index)
        sentence = f"Search {self.target} with the new model; {self.source} is unchanged."
        if not is_exact(self._faiss, index):
            sample = np.array(rows[next(sample_batches(len(rows), ERROR_ROWS, 0))], np.float32)
            error = coding_error(self._faiss, index, sample)
            sentence += f" Its codes change vectors by {error:.3f} of their lengths (median)."
        self._unfinished.close(remove=True)
        return sentence

    def _save(self, index: Any) -> None:
        def write(path: Path) -> None:
            with path.open("wb") as file:  # FAISS ignores errors on closing a file
                self._faiss.write_index(index, self._faiss.PyCallbackIOWriter(file.write))

        write_whole(self.target, write, sync=True)

    def close(self) -> None:
        """Release the lock of an upgrade."""
        self._unfinished.close()

    def search(self, queries: Rows, k: int) -> list[list[Any]]:
        """Search the new index."""
        nearest = self._new.index.search(np.ascontiguousarray(queries, np.float32), k)[1]
        return [[id_ for id_ in row if id_ >= 0] for row in nearest.tolist()]

    def vectors(self, ids: Sequence[Any]) -> Rows:
        """Read new vectors back from the index."""
        return self._new.rows(self._new.positions(ids))

    def replace(self, ids: Sequence[Any], vectors: Rows) -> None:
        """Replace mapped vectors by exact ones, and write the index file. Unknown ids are ignored."""
        faiss, new = self._faiss, self._new
        is_known = np.isin(ids, new.ids)
        known_ids = np.asarray(ids)[is_known]
        positions, new_rows = (
            new.positions(known_ids.tolist()),
            np.ascontiguousarray(np.asarray(vectors)[is_known], np.float32),
        )
        if new.ivf is not None and new.inner is new.index:
            id_array = known_ids.astype(np.int64)
            new.index.remove_ids(id_array)
            new.index.add_with_ids(new_rows, id_array)
        elif isinstance(new.inner, faiss.IndexFlatCodes):
            codes = faiss.rev_swig_ptr(new.inner.codes.data(), new.inner.codes.size())
            codes.reshape(-1, new.inner.code_size)[positions] = new.inner.sa_encode(new_rows)
        else:
            raise ValueError(
                f"{type(new.inner).__name__} does not support replacing rows; upgrade with a different factory, e.g. "
                "factory='IVF1024,SQ8'"
            )
        self._save(new.index)


def _check_documents(faiss: Any, index: Any, embedding_map: EmbeddingMap) -> None:
    """Check the lengths of documents, if they can be read without changing the index."""
    inner = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexIDMap) else faiss.downcast_index(index)
    if not isinstance(inner, faiss.IndexFlat | faiss.IndexHNSWFlat | faiss.IndexIVFFlat) or not inner.ntotal:
        return
    if isinstance(inner, faiss.IndexIVFFlat):
        sample = _sample_lists(faiss, inner)
    else:
        sample = inner.reconstruct_batch(next(sample_batches(inner.ntotal, SAMPLED, 0)))
    if embedding_map.metric != "cosine":
        embedding_map.check_lengths(sample, "the documents of the index", "old")
    elif not are_normalized(sample):
        raise ValueError(
            f"{embedding_map!r} has metric cosine, but the index ranks unnormalised documents by inner product: "
            "normalise them, or fit a map with metric='dot'"
        )


def _sample_lists(faiss: Any, index: Any) -> Rows:
    """Return up to ``SAMPLED`` rows of random inverted lists; ``reconstruct`` would build a direct map of all ids."""
    lists, rows = index.invlists, list[Rows]()
    for number in np.random.default_rng(0).permutation(lists.nlist).tolist():
        if (size := lists.list_size(number)) and sum(map(len, rows)) < SAMPLED:
            codes = faiss.rev_swig_ptr(lists.get_codes(number), size * index.code_size)
            rows.append(codes.view(np.float32).reshape(size, index.d).copy())
    return np.concatenate(rows)[:SAMPLED]


def _min_training_rows(faiss: Any, index: Any) -> int:
    """Return the minimum number of rows to train an index."""
    index = faiss.downcast_index(index)
    inner = [getattr(index, name, None) for name in ("index", "base_index", "refine_index", "quantizer", "storage")]
    min_rows = [_min_training_rows(faiss, part) for part in inner if isinstance(part, faiss.Index)]
    if isinstance(index, faiss.IndexPreTransform):
        min_rows += [transform.d_out for transform in _chain(faiss, index) if isinstance(transform, faiss.PCAMatrix)]
    return max(getattr(index, "nlist", 1), getattr(getattr(index, "pq", None), "ksub", 1), *min_rows, 1)


def search_mapped(index: Any, embedding_map: EmbeddingMap) -> Any:
    """Prepend a map of queries to a FAISS index.

    The result is an ``IndexPreTransform``: it maps queries and searches the index, which is not copied.
    ``faiss.write_index`` saves both in one file that searches without hf-stitch.

    An ``IndexPreTransform`` would also map added documents, but documents belong to the old space. Therefore ``add``,
    ``add_with_ids`` and ``train`` of the result raise an error; an index loaded from a file lacks this guard. Add
    documents, embedded by the *old* encoder, to the original index.

    Args:
        index: Any FAISS index of old vectors (flat, HNSW, IVF, quantized).
        embedding_map: An affine map of direction ``query`` or ``adjoint``.

    Returns:
        An index for queries of the new encoder.

    Raises:
        ValueError: If the map applies to documents, is not a sequence of linear layers, stands for the old model, or
            its width or metric does not match the index.
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
    faiss = import_package("faiss", "faiss")
    if embedding_map.direction == "index" or embedding_map.keeps_old:
        raise ValueError(
            f"search_mapped requires a map of new queries, got {embedding_map!r}; "
            + ("use old queries" if embedding_map.keeps_old else "upgrade the index with it, or use its adjoint()")
        )
    if embedding_map.out_features != index.d:
        raise ValueError(
            f"{embedding_map!r} must return vectors of width {index.d} as in the index, got "
            f"{embedding_map.out_features}"
        )
    by_inner_product = index.metric_type == faiss.METRIC_INNER_PRODUCT
    if by_inner_product == (embedding_map.metric == "l2"):
        ranking = "inner products" if by_inner_product else "Euclidean distances"
        raise ValueError(f"{embedding_map!r} has metric {embedding_map.metric}, but the index ranks by {ranking}")
    _check_documents(faiss, index, embedding_map)
    layers = dense_layers(embedding_map)
    if any(layer.activation.__name__ != "Identity" for layer in layers):
        raise ValueError(f"search_mapped requires a linear map, got {embedding_map!r}; map queries before the search")
    chain = faiss.IndexPreTransform(index)
    chain.own_fields = False
    # The last prepended transform runs first.
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
            "this index maps its inputs from the new space to the old one: add documents, embedded by the old encoder, "
            "to the original index"
        )

    for name in CHANGES:
        setattr(chain, name, refuse)
    return chain
