"""Vectors of documents and queries: reading them from any container, checking them, and encoding texts."""

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
"""How a store ranks documents: by cosine, by inner product, or by Euclidean distance."""
Quantization: TypeAlias = Literal["binary", "int8"]
"""What integers of 8 bits stand for: bits, 8 in a byte, or places in a range."""
Vectors: TypeAlias = npt.NDArray[Any]
"""Rows of vectors, ``(n, d)``; possibly memory-mapped."""

BATCH = 8192
"""Rows that are converted or mapped at once."""
UNIT = 1e-2
"""Largest deviation from 1 of the length of a vector that counts as normalised (float16 and int8 are not exact)."""
SAMPLED = 4096
"""Rows whose lengths decide whether vectors are normalised."""
ENOUGH = 20
"""Rows of length 1 that are no coincidence."""
SCALE = 2
"""How many times longer than all others, or shorter, vectors are that come from somewhere else."""


@checked
def read_vectors(
    given: Any, name: str = "vectors", *, quantization: Quantization | None = None, ranges: Any = None
) -> Vectors:
    """Read vectors from any container; memory-mapped arrays stay on the disk.

    Args:
        given: ``(n, d)``: a numpy array, also memory-mapped, of float16 or longer; a torch tensor; an Arrow array of
            lists; a column of a data frame or a dataset, also of an ``IterableDataset``; a sequence of rows, which may
            be vectors of a database such as ``pgvector.Vector``; the path of an ``.npy`` file, which is memory-mapped;
            or an iterator of rows or of batches of any of these, which are joined.
        name: What the vectors are, for messages.
        quantization: What integers of 8 bits stand for. ``"binary"``: bits, 8 in a byte, as ``precision="binary"`` and
            ``"ubinary"`` of sentence-transformers pack them (or single ones, of bool); they are read as 1 and -1.
            ``"int8"``: places in 255 steps of a range, as ``precision="int8"`` and ``"uint8"`` write them; the middle
            of each step is read. None: integers are refused, since nothing tells what they stand for.
        ranges: For ``"int8"``, smallest and greatest value: two numbers, ``(2, d)`` numbers, or the path of such an
            ``.npy`` file.

    Returns:
        The vectors as a numpy array in their own dtype; float32 if they were quantised.

    Raises:
        ValueError: If they are no matrix of real numbers, are integers without a ``quantization``, or there are none.

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
    found = _array(given, name)
    if found.ndim != 2 or found.dtype.kind not in "fiub":
        what = f"a {type(given).__name__}: pass rows" if found.ndim == 0 else f"{found.dtype} of shape {found.shape}"
        raise ValueError(f"{name} must be numbers of shape (n, d), got {what}")
    if 0 in found.shape:
        raise ValueError(f"{name} are empty: shape {found.shape}")
    return _named(found, name, quantization, ranges)


def _array(given: Any, name: str) -> Vectors:
    """Return what a container holds as an array."""
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu()
        return np.asarray((given.float() if given.dtype == torch.bfloat16 else given).numpy())
    if hasattr(given, "flatten") and hasattr(given, "type") and hasattr(given, "null_count"):
        return _from_arrow(given)
    if hasattr(given, "to_numpy"):
        given = given.to_numpy()
    if isinstance(given, np.ndarray) and given.dtype.kind != "O":
        return given
    if isinstance(given, Mapping):
        raise ValueError(f"{name} are columns, {', '.join(map(str, given))}: pass one of them")
    if isinstance(given, Iterable) and not hasattr(given, "__len__"):
        return _joined(iter(given), name)
    try:
        found = np.asarray(given)
    except ValueError:  # rows of several lengths, or objects
        found = np.empty(0, dtype=object)
    return _stacked(given, name) if found.ndim == 1 and found.dtype.kind in "OSU" else found


def _joined(items: Iterator[Any], name: str) -> Vectors:
    """Join a stream of batches, or of rows."""
    first = next(items, None)
    if first is None:
        raise ValueError(f"{name} are empty: the stream has no batch")
    items = itertools.chain([first], items)
    listed = isinstance(first, list | tuple)
    alone = bool(first) and isinstance(first[0], numbers.Real) if listed else _row(first, name).ndim == 1
    chunks = iter(lambda: list(itertools.islice(items, BATCH)), []) if alone else items
    found = [_array(chunk, f"a batch of {name}") for chunk in chunks]
    if wrong := [each.shape for each in found if each.ndim != 2]:
        raise ValueError(f"a batch of {name} must be numbers of shape (n, d), got shape {wrong[0]}")
    if len(widths := {each.shape[1] for each in found}) > 1:
        raise ValueError(f"{name} have batches of different widths: {sorted(widths)}")
    return np.concatenate(found)


def _stacked(rows: Any, name: str) -> Vectors:
    """Make a matrix of rows that are objects."""
    if empty := [place for place, row in enumerate(rows) if row is None]:
        raise ValueError(f"{name} have {len(empty)} empty rows, e.g. row {empty[0]}; remove them on both sides")
    found = [_row(row, name) for row in rows]
    if len(shapes := {each.shape for each in found}) > 1:
        raise ValueError(f"{name} are no matrix: rows have shapes {sorted(shapes)[:5]}")
    return np.stack(found)


def _row(row: Any, name: str) -> Vectors:
    if hasattr(row, "to_numpy") or isinstance(row, torch.Tensor):
        return _array(row, name)
    found = np.asarray(row) if isinstance(row, np.ndarray | Sequence) and not isinstance(row, str | bytes) else None
    if found is None or found.dtype.kind not in "fiub":
        remedy = (
            "parse each by json.loads, or register the type of the database (pgvector: register_vector)"
            if isinstance(row, str)
            else "read each by np.frombuffer(row, np.float32)"
            if isinstance(row, bytes)
            else f"take the vectors out of them, one of {', '.join(map(str, row))}"
            if isinstance(row, Mapping)
            else "make each a list of numbers or an array"
        )
        raise ValueError(f"{name} are no matrix: rows are {type(row).__name__}, e.g. {str(row)[:40]!r}; {remedy}")
    return found


def _from_arrow(given: Any) -> Vectors:
    """Read an Arrow array, whose items are lists."""
    if hasattr(given, "combine_chunks"):
        given = given.combine_chunks()
    if given.null_count:
        raise ValueError(f"the Arrow array has {given.null_count} empty rows; remove them on both sides")
    flat = np.asarray(given.flatten())
    if len(given) == 0 or flat.size % len(given):
        raise ValueError("the lists in the Arrow array have different lengths")
    return flat.reshape(len(given), -1)


def _named(found: Vectors, name: str, quantization: Quantization | None, ranges: Any) -> Vectors:
    """Read integers as what they stand for."""
    if (quantization == "int8") != (ranges is not None):
        raise ValueError(
            f"quantization='int8' takes ranges, the smallest and the greatest value of each column, and nothing else "
            f"does; got quantization={quantization!r} and {'no ' if ranges is None else ''}ranges"
        )
    if quantization is None:
        check_floats(found, name)
        return found
    if found.dtype not in ((np.int8, np.uint8, np.bool_) if quantization == "binary" else (np.int8, np.uint8)):
        raise ValueError(
            f"{name} are {found.dtype}, and quantization={quantization!r} reads int8 and uint8: convert them to the "
            "one that they were written as"
        )
    codes = found.astype(np.int16) + (128 if found.dtype == np.int8 else 0)
    if quantization == "binary":
        bits = found if found.dtype == np.bool_ else np.unpackbits(codes.astype(np.uint8), axis=1)
        return np.where(bits, np.float32(1), np.float32(-1))
    limits = read_ranges(ranges, found.shape[1])
    steps = (limits[1] - limits[0]) / np.float32(255)
    return np.asarray((codes + np.float32(0.5)) * steps + limits[0], dtype=np.float32)


def check_floats(vectors: Vectors, name: str = "vectors") -> None:
    """Refuse integers, which may be packed bits or codes: their sizes then mean nothing."""
    if vectors.dtype.kind in "iub":
        raise ValueError(
            f"{name} are integers ({vectors.dtype}), and nothing tells what they stand for. Pass quantization='binary' "
            "for bits, or quantization='int8' with ranges=(smallest, greatest) for codes of 8 bits, to read_vectors or "
            "to the store; or vectors.astype(np.float32) if they are plain numbers"
        )


def read_ranges(given: Any, width: int) -> npt.NDArray[np.float32]:
    """Read the smallest and the greatest value of each column."""
    found = np.asarray(np.load(given) if isinstance(given, str | Path) else given, dtype=np.float32)
    if found.shape == (2,):
        found = np.repeat(found[:, None], width, 1)
    if found.shape != (2, width) or not np.isfinite(found).all() or (found[0] > found[1]).any():
        raise ValueError(
            f"ranges must be the smallest and the greatest value, two numbers or (2, {width}) numbers, got shape "
            f"{found.shape}" + ("" if found.shape != (2, width) else " with values that are not finite, or reversed")
        )
    return found


def batches(vectors: Vectors, size: int = BATCH) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the rows in batches of float32."""
    for start in range(0, len(vectors), size):
        yield np.asarray(vectors[start : start + size], dtype=np.float32)


@checked
def check_vectors(vectors: Vectors, name: str = "vectors", *, metric: Metric = "cosine") -> None:
    """Check all rows, in batches: finite, and with cosine not zero.

    Args:
        vectors: ``(n, d)``.
        name: What they are, for messages.
        metric: Metric of the index.

    Raises:
        ValueError: If they are integers, or a row has NaN or infinite values, or is zero where lengths are divided by;
            the message has the numbers of the first rows.
    """
    check_floats(vectors, name)
    start = 0
    for batch in batches(vectors):
        bad = ~np.isfinite(batch).all(1)
        what = "NaN or infinite values"
        if not bad.any() and metric == "cosine":
            bad, what = ~batch.any(1), "only zeros, so that their cosine is undefined"
        if bad.any():
            rows = (start + np.flatnonzero(bad)).tolist()
            raise ValueError(
                f"{name}: {len(rows)} of rows {start} to {start + len(batch) - 1} have {what}, e.g. {rows[:5]}; "
                "remove these rows on both sides"
            )
        start += len(batch)


def normalized(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Divide each row by its length; zero rows stay.

    Args:
        vectors: ``(n, d)``.

    Returns:
        ``(n, d)`` float32.

    Example:
        >>> normalized(np.array([[3.0, 4.0]])).round(2).tolist()
        [[0.6000000238418579, 0.800000011920929]]
    """
    vectors = np.asarray(vectors, dtype=np.float32)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    wild = ~((lengths > 1e-18) & (lengths < 1e18))[:, 0]  # float32 rounds their squares to 0 or infinity
    if wild.any():
        vectors, largest = vectors.copy(), np.abs(vectors[wild]).max(1, keepdims=True)
        vectors[wild] /= np.where((largest > 0) & np.isfinite(largest), largest, 1)
        lengths[wild] = np.linalg.norm(vectors[wild], axis=1, keepdims=True)
    return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)


def are_normalized(vectors: Vectors) -> bool:
    """Return whether the rows have length 1, by a sample of evenly spaced rows.

    Args:
        vectors: ``(n, d)``.

    Returns:
        Whether all sampled rows have.

    Example:
        >>> are_normalized(np.eye(3)), are_normalized(2 * np.eye(3))
        (True, False)
    """
    return _unit(lengths(vectors))


def _unit(found: npt.NDArray[np.float64]) -> bool:
    return found.size > 0 and bool((np.abs(found - 1) < UNIT).all())


def is_unit(vectors: Vectors, error: float) -> bool:
    """Return whether vectors had length 1 before they were changed by about ``error``."""
    found = lengths(vectors)
    return found.size > 0 and abs(float(np.median(found)) - 1) <= max(error, UNIT)


def lengths(vectors: Vectors) -> npt.NDArray[np.float64]:
    """Compute the lengths of a sample of evenly spaced rows; those of zero rows are left out."""
    found: npt.NDArray[np.float64] = np.linalg.norm(
        np.asarray(vectors[:: max(1, len(vectors) // SAMPLED)], dtype=np.float64), axis=1
    )
    return found[found > 0]


def check_lengths(vectors: Vectors, fitted: Sequence[float], name: str) -> None:
    """Refuse vectors of other lengths than those (smallest, greatest) that a map was fitted to: it would take them.

    Only the one or the other have length 1, or most are more than twice as long, or as short, as any of the fit.
    """
    found, (low, high) = lengths(vectors), fitted
    if not found.size:
        return
    shown = f"{name} have lengths from {found.min():.3g} to {found.max():.3g}"
    if _unit(np.array(fitted)):
        if not _unit(found):
            raise ValueError(f"the map was fitted to vectors of length 1 ± {UNIT}, and {shown}; normalise them first")
    elif _unit(found) and (found.size >= ENOUGH or not low <= 1 <= high):
        raise ValueError(
            f"{name} have length 1, and the map was fitted to vectors of other lengths: normalise the vectors of the "
            "pairs and fit again, or pass vectors as the encoder makes them"
        )
    elif differ(found, fitted):
        raise ValueError(
            f"the map was fitted to vectors of lengths from {low:.3g} to {high:.3g}, and {shown}: pass vectors as the "
            "encoder makes them, or fit again to pairs of such vectors"
        )


def differ(found: npt.NDArray[np.float64], fitted: Sequence[float]) -> bool:
    """Return whether most lengths are far outside a range."""
    return not fitted[0] / SCALE <= float(np.median(found)) <= fitted[1] * SCALE


@checked
def check_pairs(source: Vectors, target: Vectors, *, ids: Any = None, metric: Metric = "cosine") -> None:
    """Check that rows of two sides correspond and can be compared.

    Without ids, the vectors themselves must tell: similarities among rows of one side must go with those among the same
    rows of the other, more than after shuffling.

    Args:
        source: ``(n, d)``: old vectors.
        target: ``(n, d')``: new vectors of the same texts.
        ids: None, one id for each row, or a pair of such sequences, of the old rows and of the new ones.
        metric: Metric of the index.

    Raises:
        ValueError: If the numbers of rows differ, ids differ or repeat, rows do not correspond, or only one side is
            normalised while the metric depends on lengths.

    Example:
        >>> old = np.random.default_rng(0).normal(size=(50, 4))
        >>> check_pairs(old, old[:40])
        Traceback (most recent call last):
            ...
        ValueError: the rows do not correspond: 50 old vectors and 40 new ones
    """
    if len(source) != len(target):
        raise ValueError(f"the rows do not correspond: {len(source)} old vectors and {len(target)} new ones")
    for name, side in (("the old vectors", source), ("the new vectors", target)):
        check_vectors(side, name, metric=metric)
    if ids is not None:
        _check_ids(ids, len(source))
    else:
        _check_alignment(source, target)
    sides = are_normalized(source), are_normalized(target)
    if sides[0] != sides[1]:
        which = "old" if sides[0] else "new"
        if metric != "cosine":
            raise ValueError(
                f"only the {which} vectors have length 1, and ranking by {metric} depends on lengths: normalise both "
                "sides, or neither, or use metric='cosine'"
            )
        warnings.warn(
            f"only the {which} vectors have length 1; for cosine this is no error, but the map then expects vectors "
            "like those it was fitted to, normalised or not",
            stacklevel=3,
        )


def _check_ids(ids: Any, rows: int) -> None:
    pair = isinstance(ids, tuple) and len(ids) == 2 and not isinstance(ids[0], str | int)
    sides = [list(side) for side in ids] if pair else [list(ids)]
    for side in sides:
        if len(side) != rows:
            raise ValueError(f"there are {len(side)} ids for {rows} rows")
        if len(set(side)) != len(side):
            raise ValueError(f"{len(side) - len(set(side))} ids occur more than once; give each pair once")
    if len(sides) == 2 and sides[0] != sides[1]:
        first = next(row for row, (a, b) in enumerate(zip(*sides, strict=True)) if a != b)
        same = set(sides[0]) == set(sides[1])
        remedy = "sort both sides by id" if same else "keep the ids that both sides have, in the same order"
        raise ValueError(
            f"the rows do not correspond: row {first} has id {sides[0][first]!r} on the old side and "
            f"{sides[1][first]!r} on the new side; {remedy}"
        )


def _check_alignment(source: Vectors, target: Vectors, rows: int = 512, draws: int = 50) -> None:
    """Compare the correlation of the similarities of both sides with that of shuffled rows."""
    if len(source) < 10:
        return
    some = np.unique(np.linspace(0, len(source) - 1, min(rows, len(source))).astype(int))
    grams = []
    for side in (source, target):
        block = normalized(np.asarray(side[some], dtype=np.float32))
        gram = (block - block.mean(0)) @ (block - block.mean(0)).T
        np.fill_diagonal(gram, 0)
        grams.append(gram / max(float(np.linalg.norm(gram)), 1e-12))
    found = float((grams[0] * grams[1]).sum())
    generator = np.random.default_rng(0)
    orders = [generator.permutation(len(some)) for _ in range(draws)]
    shuffled = [float((grams[0] * grams[1][np.ix_(order, order)]).sum()) for order in orders]
    if found < np.mean(shuffled) + 3 * np.std(shuffled):
        raise ValueError(
            f"the rows do not correspond: similarities of old and new vectors agree no more ({found:.3f}) than those "
            f"of shuffled rows ({np.mean(shuffled):.3f}); sort both sides by id, or pass ids=(old_ids, new_ids)"
        )


# -- encoders ----------------------------------------------------------------------------------------------------------
class CostLimitError(RuntimeError):
    """The next batch of a remote encoder would exceed the cost limit.

    Example:
        >>> issubclass(CostLimitError, RuntimeError)
        True
    """


@dataclass
class RemoteEncoder:
    """A function that encodes a list of texts, for example of a remote API, with batches, retries and a cost limit.

    Attributes:
        function: Texts -> vectors, in the same order.
        batch_size: Texts of one call.
        retries: How often a failed call is repeated.
        wait: Seconds before the first repetition; doubled for each further one.
        cost_per_character: Cost of one character of text, in any currency.
        cost_limit: Largest total cost, checked before each call. None: no limit.
        cache: Folder in which each batch is kept as soon as it is there, so that an interrupted run continues. None:
            no cache.
        name: Name of the model behind the function; needed with a cache, whose batches belong to it.
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
        """Check that a cache is not shared by encoders without names."""
        if self.cache is not None and not self.name:
            raise ValueError("with a cache, pass name: the model behind the function, whose vectors are kept there")

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Encode texts.

        Args:
            texts: The texts.

        Returns:
            ``(n, d)`` float32.

        Raises:
            CostLimitError: If the next call would exceed the cost limit.
            RuntimeError: If a call still fails after all retries. Batches in the cache are kept.
            ValueError: If there are no texts, or the function returns another number of vectors than of texts.
        """
        if not len(texts):
            raise ValueError("there are no texts to encode")
        found = [
            self._batch(list(texts[start : start + self.batch_size]), start, len(texts))
            for start in range(0, len(texts), self.batch_size)
        ]
        return np.concatenate(found)

    def _batch(self, texts: list[str], start: int, total: int) -> npt.NDArray[np.float32]:
        key = hashlib.sha256(json.dumps([self.name, *texts]).encode()).hexdigest()[:32]
        place = None if self.cache is None else Path(self.cache) / f"{key}.npy"
        if place is not None and place.is_file():
            kept: npt.NDArray[np.float32] = np.load(place)
            return kept
        cost = self.cost_per_character * sum(map(len, texts))
        if self.cost_limit is not None and self.spent + cost > self.cost_limit:
            raise CostLimitError(
                f"texts {start} to {start + len(texts) - 1} of {total} would raise the cost from {self.spent:.4g} to "
                f"{self.spent + cost:.4g}, above the limit of {self.cost_limit:.4g}; raise cost_limit"
                + ("" if self.cache else ", and give a cache so that finished batches are kept")
            )
        vectors = read_vectors(self._call(texts, start, total), "the encoder's output").astype(np.float32)
        self.spent += cost
        if len(vectors) != len(texts):
            raise ValueError(f"the encoder returned {len(vectors)} vectors for {len(texts)} texts")
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            content = io.BytesIO()
            np.save(content, vectors)
            write_whole(place, lambda path: path.write_bytes(content.getvalue()))
        return vectors

    def _call(self, texts: list[str], start: int, total: int) -> Any:
        for attempt in range(self.retries + 1):
            try:
                return self.function(texts)
            except Exception as error:  # a remote API may raise anything
                if attempt == self.retries:
                    kept = f"finished batches are in {self.cache}: run again" if self.cache else "give a cache"
                    raise RuntimeError(
                        f"encoding texts {start} to {start + len(texts) - 1} of {total} failed {attempt + 1} times, "
                        f"last: {error}; nothing was written, {kept} to continue from here"
                    ) from error
                time.sleep(self.wait * 2**attempt)
        raise AssertionError("unreachable")


@dataclass(frozen=True)
class NetworkEncoder:
    """A network of hf-stitch as an encoder: the activations of one layer, one vector for each text.

    Attributes:
        adapter: The network, from ``hf_stitch.load``.
        layer: The layer.
        pooling: ``"mean"``, ``"cls"`` or ``"last"``.
        batch_size: Texts of one forward.

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

        found = extract_activations(
            self.adapter, list(texts), layers=[self.layer], pooling=self.pooling, batch_size=self.batch_size,
            progress=False,
        )  # fmt: skip
        return found.values[self.layer].float().numpy()


def is_encoder(given: Any) -> bool:
    """Return whether an object encodes texts: it has ``encode``, or is a function of a list of texts."""
    if hasattr(given, "encode"):
        return not isinstance(given, str)
    return callable(given) and not hasattr(given, "shape")


def encode(
    encoder: Any, texts: Iterable[str], *, queries: bool = False, progress: bool = False
) -> npt.NDArray[np.float32]:
    """Encode texts with a ``SentenceTransformer``, a :class:`NetworkEncoder`, a :class:`RemoteEncoder` or a function.

    Args:
        encoder: The encoder. A function gets batches of texts, as by a :class:`RemoteEncoder`. If it has
            ``encode_document`` and ``encode_query``, as a ``SentenceTransformer`` has, these encode, with their prompts
            and routes; otherwise documents and queries are encoded alike.
        texts: The texts.
        queries: Whether the texts are queries. By default they are documents.
        progress: Whether to show a progress bar (``SentenceTransformer`` only).

    Returns:
        ``(n, d)`` float32.

    Example:
        >>> encode(lambda texts: [[len(text), 1.0] for text in texts], ["ab"]).tolist()
        [[2.0, 1.0]]
    """
    texts = list(texts)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("texts must be a list of one str or more")
    if not hasattr(encoder, "encode"):
        encoder = RemoteEncoder(encoder)
    known = any(kind.__module__.startswith("sentence_transformers") for kind in type(encoder).__mro__)
    run = getattr(encoder, "encode_query" if queries else "encode_document", encoder.encode)
    found = run(texts, show_progress_bar=progress) if known else run(texts)
    vectors = read_vectors(found, "the encoder's output").astype(np.float32)
    if len(vectors) != len(texts):
        raise ValueError(f"the encoder returned {len(vectors)} vectors for {len(texts)} texts")
    return vectors
