"""Vectors of documents and queries: read them from any container, check them, and encode texts."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import numbers
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hf_stitch.options import checked
from hf_stitch.storage.files import decoding, write_whole

Metric: TypeAlias = Literal["cosine", "dot", "l2"]
"""Ranking of documents: by cosine, inner product, or Euclidean distance."""
Quantization: TypeAlias = Literal["binary", "int8"]
"""Meaning of 8-bit integers: 8 packed bits, or steps of a range."""
Vectors: TypeAlias = npt.NDArray[Any]
"""Rows of vectors, ``(n, d)``, possibly memory-mapped."""

BATCH = 8192
"""Rows per conversion or map call."""
UNIT_TOLERANCE = 1e-2
"""Tolerance for length 1 of a normalised vector (float16 and int8 are not exact)."""
SAMPLED = 4096
"""Number of sampled rows to decide whether vectors are normalised."""
MIN_UNIT_ROWS = 20
"""Number of rows that are not all of length 1 by coincidence."""
LENGTH_FACTOR = 2
"""Vectors are refused if their median length lies this factor outside the range of lengths at the fit."""


@checked
def read_vectors(
    given: Any, name: str = "vectors", *, quantization: Quantization | None = None, ranges: Any = None
) -> Vectors:
    """Read vectors from any container; memory-mapped arrays stay on disk.

    Args:
        given: Vectors of shape ``(n, d)``: a numpy array (memory-mapped or not) of float16 or wider; a torch tensor; an
            Arrow array of lists; a column of a data frame or dataset (``IterableDataset`` included); a sequence of
            rows, such as ``pgvector.Vector``; the path of an ``.npy`` file, which is memory-mapped; or an iterator of
            rows or of batches of any of these, which are concatenated.
        name: Name of the vectors in messages.
        quantization: Meaning of 8-bit integers. ``"binary"``: 8 bits per byte, as packed by ``precision="binary"`` and
            ``"ubinary"`` of sentence-transformers (or unpacked bits of dtype bool), decoded to 1 and -1. ``"int8"``:
            one of 255 steps of a range, as written by ``precision="int8"`` and ``"uint8"``, decoded to the middle of
            the step. None: integers raise an error, because their meaning is unknown.
        ranges: Minimum and maximum for ``"int8"``: two numbers, ``(2, d)`` numbers, or the path of such an ``.npy``
            file.

    Returns:
        The vectors as a numpy array in their dtype; float32 if they were quantized.

    Raises:
        ValueError: If the input is not a matrix of real numbers, is empty, or has integers without ``quantization``.

    Example:
        >>> read_vectors(iter([[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]])).shape
        (3, 2)
        >>> read_vectors(np.array([[160]], dtype=np.uint8), quantization="binary").astype(int).tolist()
        [[1, -1, 1, -1, -1, -1, -1, -1]]
        >>> codes = np.array([[-128, 0, 127]], dtype=np.int8)
        >>> read_vectors(codes, quantization="int8", ranges=(-1, 1)).astype(float).round(3).tolist()
        [[-0.996, 0.008, 1.004]]
    """
    if isinstance(given, str | Path):
        with decoding(given):
            given = np.load(given, mmap_mode="r")
    rows = _array(given, name)
    if rows.ndim != 2 or rows.dtype.kind not in "fiub":
        actual = f"a {type(given).__name__}: pass rows" if rows.ndim == 0 else f"{rows.dtype} of shape {rows.shape}"
        raise ValueError(f"{name} must be numbers of shape (n, d), got {actual}")
    if 0 in rows.shape:
        raise ValueError(f"{name} must not be empty, got shape {rows.shape}")
    return _dequantize(rows, name, quantization, ranges)


def _array(container: Any, name: str) -> Vectors:
    """Convert a container to an array."""
    if isinstance(container, torch.Tensor):
        container = container.detach().cpu()
        return np.asarray((container.float() if container.dtype == torch.bfloat16 else container).numpy())
    if hasattr(container, "flatten") and hasattr(container, "type") and hasattr(container, "null_count"):
        return _from_arrow(container)
    if hasattr(container, "to_numpy"):
        container = container.to_numpy()
    if isinstance(container, np.ndarray) and container.dtype.kind != "O":
        return container
    if isinstance(container, Mapping):
        raise ValueError(f"{name} must be one column, got {', '.join(map(str, container))}; pass one of them")
    if isinstance(container, Iterable) and not hasattr(container, "__len__"):
        return _concatenate(iter(container), name)
    try:
        rows = np.asarray(container)
    except ValueError:  # rows of several lengths, or objects
        rows = np.empty(0, dtype=object)
    return _stack_rows(container, name) if rows.ndim == 1 and rows.dtype.kind in "OSU" else rows


def _concatenate(items: Iterator[Any], name: str) -> Vectors:
    """Concatenate a stream of batches or of rows."""
    first = next(items, None)
    if first is None:
        raise ValueError(f"{name} must not be empty, got an empty stream")
    items = itertools.chain([first], items)
    is_sequence = isinstance(first, list | tuple)
    items_are_rows = bool(first) and isinstance(first[0], numbers.Real) if is_sequence else _row(first, name).ndim == 1
    chunks = iter(lambda: list(itertools.islice(items, BATCH)), []) if items_are_rows else items
    arrays = [_array(chunk, f"a batch of {name}") for chunk in chunks]
    if wrong_shapes := [batch.shape for batch in arrays if batch.ndim != 2]:
        raise ValueError(f"batches of {name} must have shape (n, d), got {wrong_shapes[0]}")
    if len(widths := {batch.shape[1] for batch in arrays}) > 1:
        raise ValueError(f"batches of {name} must have the same width, got {sorted(widths)}")
    return np.concatenate(arrays)


def _stack_rows(rows: Any, name: str) -> Vectors:
    """Stack row objects into a matrix."""
    if empty := [index for index, row in enumerate(rows) if row is None]:
        raise ValueError(f"{name} have {len(empty)} empty rows, e.g. row {empty[0]}; remove them on both sides")
    arrays = [_row(row, name) for row in rows]
    if len(row_shapes := {row_array.shape for row_array in arrays}) > 1:
        raise ValueError(f"rows of {name} must have the same shape, got {sorted(row_shapes)[:5]}")
    return np.stack(arrays)


def _row(row: Any, name: str) -> Vectors:
    if hasattr(row, "to_numpy") or isinstance(row, torch.Tensor):
        return _array(row, name)
    row_array = np.asarray(row) if isinstance(row, np.ndarray | Sequence) and not isinstance(row, str | bytes) else None
    if row_array is None or row_array.dtype.kind not in "fiub":
        remedy = (
            "parse rows with json.loads, or register the database type (pgvector: register_vector)"
            if isinstance(row, str)
            else "decode rows with np.frombuffer(row, np.float32)"
            if isinstance(row, bytes)
            else f"select the vectors, one of {', '.join(map(str, row))}"
            if isinstance(row, Mapping)
            else "pass lists of numbers or arrays"
        )
        raise ValueError(f"rows of {name} must be numbers, got {type(row).__name__}, e.g. {str(row)[:40]!r}; {remedy}")
    return row_array


def _from_arrow(arrow: Any) -> Vectors:
    """Read an Arrow array of lists."""
    if hasattr(arrow, "combine_chunks"):
        arrow = arrow.combine_chunks()
    if arrow.null_count:
        raise ValueError(f"the Arrow array has {arrow.null_count} empty rows; remove them on both sides")
    flat = np.asarray(arrow.flatten())
    if len(arrow) == 0 or flat.size % len(arrow):
        raise ValueError("the lists in the Arrow array must have the same length")
    return flat.reshape(len(arrow), -1)


def _dequantize(rows: Vectors, name: str, quantization: Quantization | None, ranges: Any) -> Vectors:
    """Decode quantized vectors; check that vectors without quantization are floating point."""
    if (quantization == "int8") != (ranges is not None):
        raise ValueError(
            f"ranges (minimum and maximum of each column) must be passed with quantization='int8', and only then, got "
            f"quantization={quantization!r} {'without' if ranges is None else 'with'} ranges"
        )
    if quantization is None:
        check_floats(rows, name)
        return rows
    if rows.dtype not in ((np.int8, np.uint8, np.bool_) if quantization == "binary" else (np.int8, np.uint8)):
        raise ValueError(
            f"{name} must be int8 or uint8 for quantization={quantization!r}, got {rows.dtype}; convert them to the "
            "dtype that the encoder wrote"
        )
    codes = rows.astype(np.int16) + (128 if rows.dtype == np.int8 else 0)
    if quantization == "binary":
        bits = rows if rows.dtype == np.bool_ else np.unpackbits(codes.astype(np.uint8), axis=1)
        return np.where(bits, np.float32(1), np.float32(-1))
    limits = read_ranges(ranges, rows.shape[1])
    steps = (limits[1] - limits[0]) / np.float32(255)
    return np.asarray((codes + np.float32(0.5)) * steps + limits[0], dtype=np.float32)


def check_floats(vectors: Vectors, name: str = "vectors") -> None:
    """Raise an error if vectors are integers, which may be packed bits or codes."""
    if vectors.dtype.kind in "iub":
        raise ValueError(
            f"{name} must be floating point, got {vectors.dtype} without a quantization. Pass quantization='binary' "
            "for bits, or quantization='int8' with ranges=(minimum, maximum) for 8-bit codes, to read_vectors or to "
            "the store; pass vectors.astype(np.float32) for plain numbers"
        )


def read_ranges(ranges: Any, width: int) -> npt.NDArray[np.float32]:
    """Return the minimum and maximum of each column."""
    limits = np.asarray(np.load(ranges) if isinstance(ranges, str | Path) else ranges, dtype=np.float32)
    if limits.shape == (2,):
        limits = np.repeat(limits[:, None], width, 1)
    if limits.shape != (2, width) or not np.isfinite(limits).all() or (limits[0] > limits[1]).any():
        raise ValueError(
            f"ranges must be a minimum and a maximum, as two numbers or (2, {width}) numbers, got shape "
            f"{limits.shape}" + ("" if limits.shape != (2, width) else " with infinite, NaN or reversed limits")
        )
    return limits


def batches(vectors: Vectors, size: int = BATCH) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the rows in batches of float32."""
    for start in range(0, len(vectors), size):
        yield np.asarray(vectors[start : start + size], dtype=np.float32)


@checked
def check_vectors(vectors: Vectors, name: str = "vectors", *, metric: Metric = "cosine") -> None:
    """Check that all rows are finite, and non-zero with metric cosine.

    Args:
        vectors: ``(n, d)``.
        name: Name of the vectors in messages.
        metric: Metric of the index.

    Raises:
        ValueError: If the vectors are integers, or a row has NaN or infinite values, or is zero with metric cosine. The
            message lists the first such rows.
    """
    check_floats(vectors, name)
    start = 0
    for batch in batches(vectors):
        bad = ~np.isfinite(batch).all(1)
        problem = "NaN or infinite values"
        if not bad.any() and metric == "cosine":
            bad, problem = ~batch.any(1), "only zeros, so that their cosine is undefined"
        if bad.any():
            rows = (start + np.flatnonzero(bad)).tolist()
            raise ValueError(
                f"{name}: {len(rows)} of rows {start} to {start + len(batch) - 1} have {problem}, e.g. {rows[:5]}; "
                "remove these rows on both sides"
            )
        start += len(batch)


def normalized(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Divide each row by its length; zero rows stay unchanged.

    Args:
        vectors: ``(n, d)``.

    Returns:
        ``(n, d)`` float32.

    Example:
        >>> normalized(np.array([[3.0, 4.0]])).round(2).tolist()
        [[0.6000000238418579, 0.800000011920929]]
    """
    vectors = np.asarray(vectors, dtype=np.float32)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    extreme = ~((norms > 1e-18) & (norms < 1e18))[:, 0]  # float32 rounds their squares to 0 or infinity
    if extreme.any():
        vectors, largest = vectors.copy(), np.abs(vectors[extreme]).max(1, keepdims=True)
        vectors[extreme] /= np.where((largest > 0) & np.isfinite(largest), largest, 1)
        norms[extreme] = np.linalg.norm(vectors[extreme], axis=1, keepdims=True)
    return (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)


def are_normalized(vectors: Vectors) -> bool:
    """Return whether the rows have length 1, based on evenly spaced rows.

    Args:
        vectors: ``(n, d)``.

    Returns:
        Whether all sampled rows have length 1.

    Example:
        >>> are_normalized(np.eye(3)), are_normalized(2 * np.eye(3))
        (True, False)
    """
    return _all_unit(lengths(vectors))


def _all_unit(norms: npt.NDArray[np.float64]) -> bool:
    return norms.size > 0 and bool((np.abs(norms - 1) < UNIT_TOLERANCE).all())


def was_normalized(vectors: Vectors, error: float) -> bool:
    """Return whether vectors had length 1 before quantization with a relative error of about ``error``."""
    norms = lengths(vectors)
    return norms.size > 0 and abs(float(np.median(norms)) - 1) <= max(error, UNIT_TOLERANCE)


def lengths(vectors: Vectors) -> npt.NDArray[np.float64]:
    """Compute the lengths of evenly spaced non-zero rows."""
    norms: npt.NDArray[np.float64] = np.linalg.norm(
        np.asarray(vectors[:: max(1, len(vectors) // SAMPLED)], dtype=np.float64), axis=1
    )
    return norms[norms > 0]


def check_lengths(vectors: Vectors, fit_range: Sequence[float], name: str) -> None:
    """Raise an error if the lengths of vectors do not match the lengths (minimum, maximum) at the fit of a map.

    They do not match if only one set has length 1, or if the median length is outside the range by a factor of 2.
    """
    norms, (low, high) = lengths(vectors), fit_range
    if not norms.size:
        return
    actual = f"{name} have lengths from {norms.min():.3g} to {norms.max():.3g}"
    if _all_unit(np.array(fit_range)):
        if not _all_unit(norms):
            unit = f"vectors of length 1 ± {UNIT_TOLERANCE}"
            raise ValueError(f"the map was fitted to {unit}, but {actual}; normalise them first")
    elif _all_unit(norms) and (norms.size >= MIN_UNIT_ROWS or not low <= 1 <= high):
        raise ValueError(
            f"{name} have length 1, but the map was fitted to unnormalised vectors: normalise the pairs and refit, or "
            "pass vectors as the encoder returns them"
        )
    elif outside_range(norms, fit_range):
        raise ValueError(
            f"the map was fitted to vectors of lengths from {low:.3g} to {high:.3g}, but {actual}: pass vectors as the "
            "encoder returns them, or refit to pairs of such vectors"
        )


def outside_range(norms: npt.NDArray[np.float64], length_range: Sequence[float]) -> bool:
    """Return whether the median length is far outside a range (minimum, maximum)."""
    return not length_range[0] / LENGTH_FACTOR <= float(np.median(norms)) <= length_range[1] * LENGTH_FACTOR


@checked
def check_pairs(source: Vectors, target: Vectors, *, ids: Any = None, metric: Metric = "cosine") -> None:
    """Check that rows of two sides correspond and can be compared.

    Without ids, the check uses the vectors: similarities among old rows must correlate with similarities among new rows
    more than after shuffling.

    Args:
        source: ``(n, d)`` old vectors.
        target: ``(n, d')`` new vectors of the same texts.
        ids: None, one id for each row, or a pair of id sequences for old and new rows.
        metric: Metric of the index.

    Raises:
        ValueError: If the numbers of rows differ, ids differ or repeat, rows do not correspond, or only one side is
            normalised and the metric depends on lengths.

    Example:
        >>> old = np.random.default_rng(0).normal(size=(50, 4))
        >>> check_pairs(old, old[:40])
        Traceback (most recent call last):
            ...
        ValueError: old and new vectors must have the same number of rows, got 50 and 40
    """
    if len(source) != len(target):
        raise ValueError(f"old and new vectors must have the same number of rows, got {len(source)} and {len(target)}")
    for name, side in (("the old vectors", source), ("the new vectors", target)):
        check_vectors(side, name, metric=metric)
    if ids is not None:
        _check_ids(ids, len(source))
    else:
        _check_alignment(source, target)
    sides_normalized = are_normalized(source), are_normalized(target)
    if sides_normalized[0] != sides_normalized[1]:
        which = "old" if sides_normalized[0] else "new"
        if metric != "cosine":
            raise ValueError(
                f"only the {which} vectors have length 1, but metric {metric} depends on lengths: normalise both sides "
                "or neither, or use metric='cosine'"
            )
        warnings.warn(
            f"only the {which} vectors have length 1; with metric cosine this is valid, but the map will require "
            "vectors normalised in the same way",
            stacklevel=3,
        )


def _check_ids(ids: Any, rows: int) -> None:
    is_pair = isinstance(ids, tuple) and len(ids) == 2 and not isinstance(ids[0], str | int)
    sides = [list(side) for side in ids] if is_pair else [list(ids)]
    for side in sides:
        if len(side) != rows:
            raise ValueError(f"ids must have one id per row ({rows}), got {len(side)}")
        if len(set(side)) != len(side):
            raise ValueError(f"ids must be unique, got {len(side) - len(set(side))} repeated ids; pass each pair once")
    if len(sides) == 2 and sides[0] != sides[1]:
        first = next(row for row, (a, b) in enumerate(zip(*sides, strict=True)) if a != b)
        same_ids = set(sides[0]) == set(sides[1])
        remedy = "sort both sides by id" if same_ids else "keep the ids common to both sides, in the same order"
        raise ValueError(
            f"the rows do not correspond: row {first} has id {sides[0][first]!r} on the old side and "
            f"{sides[1][first]!r} on the new side; {remedy}"
        )


def _check_alignment(source: Vectors, target: Vectors, rows: int = 512, draws: int = 50) -> None:
    """Raise an error if the similarities of both sides correlate no more than after shuffling."""
    if len(source) < 10:
        return
    sample = np.unique(np.linspace(0, len(source) - 1, min(rows, len(source))).astype(int))
    grams = []
    for side in (source, target):
        block = normalized(np.asarray(side[sample], dtype=np.float32))
        gram = (block - block.mean(0)) @ (block - block.mean(0)).T
        np.fill_diagonal(gram, 0)
        grams.append(gram / max(float(np.linalg.norm(gram)), 1e-12))
    agreement = float((grams[0] * grams[1]).sum())
    generator = np.random.default_rng(0)
    orders = [generator.permutation(len(sample)) for _ in range(draws)]
    shuffled_agreements = [float((grams[0] * grams[1][np.ix_(order, order)]).sum()) for order in orders]
    if agreement < np.mean(shuffled_agreements) + 3 * np.std(shuffled_agreements):
        raise ValueError(
            f"the rows do not correspond: similarities of old and new vectors correlate ({agreement:.3f}) no more than "
            f"shuffled rows ({np.mean(shuffled_agreements):.3f}); sort both sides by id, or pass ids=(old_ids, new_ids)"
        )


# -- encoders ----------------------------------------------------------------------------------------------------------
class CostLimitError(RuntimeError):
    """Error of a remote encoder if the next batch would exceed the cost limit.

    Example:
        >>> issubclass(CostLimitError, RuntimeError)
        True
    """


@dataclass
class RemoteEncoder:
    """Encoder from a function of a list of texts, e.g. a remote API, with batches, retries and a cost limit.

    Attributes:
        function: Texts -> vectors, in the same order.
        batch_size: Texts per call.
        retries: Number of retries after a failed call.
        wait: Seconds before the first retry; doubled for each further retry.
        cost_per_character: Cost of one character of text, in any currency.
        cost_limit: Maximum total cost, checked before each call. None: no limit.
        cache: Folder to store each batch immediately, so that an interrupted run continues. None: no cache.
        name: Name of the model behind the function; required with a cache.
        spent: Cost so far.

    Example:
        >>> encoder = RemoteEncoder(lambda texts: [[len(text), 1.0] for text in texts], cost_per_character=0.1)
        >>> encoder.encode(["a", "bcd"]).tolist(), round(encoder.spent, 6)
        ([[1.0, 1.0], [3.0, 1.0]], 0.4)
    """

    function: Callable[[list[str]], Any]
    batch_size: int = 64
    retries: int = 3
    wait: float = 1.0
    cost_per_character: float = 0.0
    cost_limit: float | None = None
    cache: str | Path | None = None
    name: str = ""
    spent: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        """Check that an encoder with a cache has a name."""
        if self.cache is not None and not self.name:
            raise ValueError("`cache` requires `name`: pass the name of the model behind the function")

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Encode texts.

        Args:
            texts: The texts.

        Returns:
            ``(n, d)`` float32.

        Raises:
            CostLimitError: If the next call would exceed the cost limit.
            RuntimeError: If a call still fails after all retries. Cached batches stay.
            ValueError: If ``texts`` is empty, or the function returns a wrong number of vectors.
        """
        if not len(texts):
            raise ValueError("texts must not be empty")
        encoded = [
            self._batch(list(texts[start : start + self.batch_size]), start, len(texts))
            for start in range(0, len(texts), self.batch_size)
        ]
        return np.concatenate(encoded)

    def _batch(self, texts: list[str], start: int, total: int) -> npt.NDArray[np.float32]:
        key = hashlib.sha256(json.dumps([self.name, *texts]).encode()).hexdigest()[:32]
        cache_file = None if self.cache is None else Path(self.cache) / f"{key}.npy"
        if cache_file is not None and cache_file.is_file():
            cached: npt.NDArray[np.float32] = np.load(cache_file)
            return cached
        cost = self.cost_per_character * sum(map(len, texts))
        if self.cost_limit is not None and self.spent + cost > self.cost_limit:
            raise CostLimitError(
                f"texts {start} to {start + len(texts) - 1} of {total} would raise the cost from {self.spent:.4g} to "
                f"{self.spent + cost:.4g}, above the limit of {self.cost_limit:.4g}; raise cost_limit"
                + ("" if self.cache else ", and pass `cache` to keep finished batches")
            )
        vectors = read_vectors(self._call(texts, start, total), "the encoder's output").astype(np.float32)
        self.spent += cost
        if len(vectors) != len(texts):
            raise ValueError(f"the encoder must return one vector per text ({len(texts)}), got {len(vectors)}")
        if cache_file is not None:
            cache_file.parent.mkdir(parents=True, exist_ok=True)
            content = io.BytesIO()
            np.save(content, vectors)
            write_whole(cache_file, lambda path: path.write_bytes(content.getvalue()))
        return vectors

    def _call(self, texts: list[str], start: int, total: int) -> Any:
        for attempt in range(self.retries + 1):
            try:
                return self.function(texts)
            except Exception as error:  # a remote API may raise anything
                if attempt == self.retries:
                    remedy = f"finished batches are in {self.cache}: rerun" if self.cache else "pass `cache`"
                    raise RuntimeError(
                        f"encoding texts {start} to {start + len(texts) - 1} of {total} failed {attempt + 1} times, "
                        f"last: {error}; {remedy} to continue from here"
                    ) from error
                time.sleep(self.wait * 2**attempt)
        raise AssertionError("unreachable")


@dataclass(frozen=True)
class NetworkEncoder:
    """Encoder from a network of hf-stitch: the pooled activations of one layer.

    Attributes:
        adapter: The network, from ``hf_stitch.load``.
        layer: The layer.
        pooling: ``"mean"``, ``"cls"`` or ``"last"``.
        batch_size: Texts per forward pass.

    Example:
        >>> NetworkEncoder(None, "encoder.layer.5").pooling
        'mean'
    """

    adapter: Any
    layer: str
    pooling: Literal["mean", "cls", "last"] = "mean"
    batch_size: int = 64

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Encode texts.

        Args:
            texts: The texts.

        Returns:
            ``(n, d)`` float32.
        """
        from hf_stitch.analysis.extraction import extract_activations

        activations = extract_activations(
            self.adapter, list(texts), layers=[self.layer], pooling=self.pooling, batch_size=self.batch_size,
            progress=False,
        )  # fmt: skip
        return activations.values[self.layer].float().numpy()


def is_encoder(encoder: Any) -> bool:
    """Return whether an object encodes texts: it has an ``encode`` method, or is a function of a list of texts."""
    if hasattr(encoder, "encode"):
        return not isinstance(encoder, str)
    return callable(encoder) and not hasattr(encoder, "shape")


def encode(
    encoder: Any, texts: Iterable[str], *, queries: bool = False, progress: bool = False
) -> npt.NDArray[np.float32]:
    """Encode texts with a ``SentenceTransformer``, a :class:`NetworkEncoder`, a :class:`RemoteEncoder` or a function.

    Args:
        encoder: The encoder. A function receives batches of texts, as in :class:`RemoteEncoder`. If the encoder has the
            methods ``encode_document`` and ``encode_query``, as ``SentenceTransformer``, they encode with their prompts
            and routes; otherwise documents and queries are encoded alike.
        texts: The texts.
        queries: Whether the texts are queries. Default: documents.
        progress: Whether to show a progress bar (``SentenceTransformer`` only).

    Returns:
        ``(n, d)`` float32.

    Example:
        >>> encode(lambda texts: [[len(text), 1.0] for text in texts], ["ab"]).tolist()
        [[2.0, 1.0]]
    """
    texts = list(texts)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("texts must be a non-empty list of str")
    if not hasattr(encoder, "encode"):
        encoder = RemoteEncoder(encoder)
    has_progress_bar = any(kind.__module__.startswith("sentence_transformers") for kind in type(encoder).__mro__)
    encode_texts = getattr(encoder, "encode_query" if queries else "encode_document", encoder.encode)
    outputs = encode_texts(texts, show_progress_bar=progress) if has_progress_bar else encode_texts(texts)
    vectors = read_vectors(outputs, "the encoder's output").astype(np.float32)
    if len(vectors) != len(texts):
        raise ValueError(f"the encoder returned {len(vectors)} vectors for {len(texts)} texts")
    return vectors
