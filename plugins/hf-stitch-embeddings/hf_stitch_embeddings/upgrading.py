"""Upgrade of an index: map all old vectors of a store to the new space."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_stitch.results import Result
from hf_stitch_embeddings.embedding_map import EmbeddingMap
from hf_stitch_embeddings.stores.base import Description, Rows, VectorStore, write_errors
from hf_stitch_embeddings.vectors import BATCH, normalized, was_normalized

if TYPE_CHECKING:
    import pandas

TOLERANCE = 2e-2
"""Maximum difference between a stored and a mapped vector, relative to its length: stores may use float16 or 8 bits."""


@dataclass(frozen=True)
class Upgraded(Result):
    """Result of an upgrade.

    Attributes:
        store: Name of the store.
        rows: Number of rows in the store, all with a new vector.
        mapped: Number of rows mapped in this run; fewer than all if it continued an interrupted run.
        verified: Number of rows read back and compared.
        difference: Largest difference of verified rows, relative to the length of the vector.
        seconds: Duration of this run.
        sentence: Instructions to search the new vectors and to revert.

    Example:
        >>> Upgraded("index.npy", 10, 10, 10, 0.0, 1.0, "Search new.npy.").rows
        10
    """

    store: str
    rows: int
    mapped: int
    verified: int
    difference: float
    seconds: float
    sentence: str

    def __rich__(self) -> str:
        """Return the figures in sentences."""
        return (
            f"{self.rows:,} rows of {self.store} have new vectors; this run mapped {self.mapped:,} rows in "
            f"{self.seconds:.1f} s. {self.verified:,} rows were verified: largest difference {self.difference:.1e}. "
            f"{self.sentence}"
        )

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row."""
        import pandas

        return pandas.DataFrame([self.to_dict()])


def upgrade(
    store: VectorStore,
    embedding_map: EmbeddingMap,
    *,
    batch_size: int = BATCH,
    verify: int = 1000,
    seed: int = 0,
    progress: bool = True,
) -> Upgraded:
    """Map all old vectors of a store to the new space in batches, and keep the old vectors.

    The same call continues an interrupted run, also after ``kill -9``, and skips rows with a new vector. Searches use
    the new vectors only after all rows have one and a sample agrees with the map. Ids and metadata stay unchanged. Rows
    added during the upgrade are mapped, too.

    Args:
        store: The store, e.g. :class:`~hf_stitch_embeddings.stores.ArrayStore`.
        embedding_map: A map of direction ``index``.
        batch_size: Rows per read, map and write operation.
        verify: Number of rows to read back and compare.
        seed: Seed of the verified rows.
        progress: Whether to show a progress bar.

    Returns:
        Counts of rows, verification, and instructions to search the new vectors.

    Raises:
        ValueError: If the map is not of direction ``index`` or does not match the store, a vector cannot be mapped, the
            old vectors change during the upgrade, or the sample disagrees with the map.
        OSError: If another process is upgrading the store, or the store cannot be written.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from hf_stitch.stitches import LinearStitch
        >>> from hf_stitch_embeddings.stores import ArrayStore
        >>> swap = EmbeddingMap.of(LinearStitch.of(weight=torch.tensor([[0.0, 1.0], [1.0, 0.0]])))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     old, new = Path(folder, "old.npy"), Path(folder, "new.npy")
        ...     np.save(old, np.array([[1, 0], [3, 4]], dtype=np.float32))
        ...     _ = upgrade(ArrayStore(old, new), swap, progress=False)
        ...     np.load(new).round(2).tolist()
        [[0.0, 1.0], [0.800000011920929, 0.6000000238418579]]
    """
    from tqdm.auto import tqdm

    if batch_size < 1 or verify < 0:
        raise ValueError(f"batch_size must be 1 or more and verify 0 or more, got {batch_size} and {verify}")
    start_time = time.perf_counter()
    description = store.describe()
    _check_map(description, embedding_map)
    if description.error > TOLERANCE:
        warnings.warn(
            f"{description.name} returns vectors with an error of about {description.error:.2f} of their lengths: "
            "expect a lower recall than in the verdict, or upgrade the original vectors if you have them",
            stacklevel=2,
        )
    with write_errors(description.name):
        store.start(fingerprint(embedding_map), embedding_map.out_features)
        mapped, missing = 0, store.missing()
        already_mapped = description.rows - missing
        with tqdm(
            total=description.rows, initial=already_mapped, unit="row", desc="upgrade", disable=not progress
        ) as bar:
            while missing:
                for ids, rows in store.pending(batch_size):
                    store.write(ids, _map_rows(embedding_map, ids, rows, description))
                    mapped += len(ids)
                    bar.update(len(ids))
                previous_missing, missing = missing, store.missing()
                if missing >= previous_missing:
                    raise ValueError(
                        f"{description.name} still has {missing} rows without a new vector after a whole pass: stop "
                        "other writers and rerun to continue"
                    )
        difference, verified = _verify_sample(store, embedding_map, description, verify, seed)
        sentence = store.switch()
    seconds = time.perf_counter() - start_time
    return Upgraded(description.name, already_mapped + mapped, mapped, verified, difference, seconds, sentence)


def fingerprint(embedding_map: EmbeddingMap) -> str:
    """Compute a short hash of the function of a map, independent of its recipe."""
    digest = hashlib.sha256(f"{embedding_map.stitch.name} {embedding_map.metric} {embedding_map.normalized}".encode())
    for name, tensor in sorted(embedding_map.stitch.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def _check_map(description: Description, embedding_map: EmbeddingMap) -> None:
    if embedding_map.direction != "index":
        remedy = (
            "keep the old model, or pass direction='index' to fit_embedding_map"
            if embedding_map.keeps_old
            else "use search_mapped for a map of queries, or fit a map with direction='index'"
        )
        raise ValueError(f"upgrade requires a map of direction 'index', got {embedding_map!r}; {remedy}")
    if description.width != embedding_map.in_features:
        raise ValueError(
            f"{embedding_map!r} requires vectors of width {embedding_map.in_features}, got width {description.width} "
            f"from {description.name}"
        )
    if embedding_map.metric not in description.metrics:
        raise ValueError(
            f"metric of {embedding_map!r} must be {' or '.join(description.metrics)} as in {description.name}, got "
            f"{embedding_map.metric}; fit a map with metric={description.metrics[0]!r}"
        )


def _map_rows(embedding_map: EmbeddingMap, ids: Sequence[Any], rows: Rows, description: Description) -> Rows:
    bad = ~np.isfinite(rows).all(1)
    if embedding_map.metric == "cosine":
        bad |= ~rows.any(1)
    if bad.any():
        bad_ids = [ids[row] for row in np.flatnonzero(bad)[:5]]
        raise ValueError(
            f"{int(bad.sum())} vectors of {description.name} are zero or not finite, e.g. ids {bad_ids}; "
            "remove or repair them and rerun to continue from here"
        )
    requires_unit = embedding_map.record.get("input_normalized")
    if requires_unit and description.error and was_normalized(rows, description.error):
        rows = normalized(rows)
    embedding_map.check_lengths(rows, f"the vectors of {description.name}")
    return embedding_map(rows)


def _verify_sample(
    store: VectorStore, embedding_map: EmbeddingMap, description: Description, count: int, seed: int
) -> tuple[float, int]:
    """Return the largest relative difference between stored and mapped vectors, and the number of compared rows."""
    largest, verified, bad_ids = 0.0, 0, []
    for ids, old, new in store.sample(count, seed):
        expected = _map_rows(embedding_map, ids, old, description)
        lengths = np.maximum(np.linalg.norm(expected, axis=1), 1e-12)
        differences = np.linalg.norm(expected - new, axis=1) / lengths
        bad_ids += [ids[int(row)] for row in np.flatnonzero(~(differences <= TOLERANCE))]
        largest, verified = max(largest, float(differences.max())), verified + len(ids)
    if bad_ids:
        raise ValueError(
            f"{len(bad_ids)} of {verified} verified rows of {description.name} differ from the mapped vectors, e.g. id "
            f"{bad_ids[0]!r}: old vectors have changed during the upgrade. Searches still use the old vectors; delete "
            "the new vectors and rerun"
        )
    return largest, verified
