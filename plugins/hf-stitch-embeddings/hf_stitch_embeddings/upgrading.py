"""Rewriting of an index: all old vectors of a store are mapped to the new space."""

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
from hf_stitch_embeddings.stores.base import Description, Rows, VectorStore, written
from hf_stitch_embeddings.vectors import BATCH, is_unit, normalized

if TYPE_CHECKING:
    import pandas

TOLERANCE = 2e-2
"""Largest difference between a stored vector and the mapped one, as a share of its length: stores may keep float16 or
eight bits."""


@dataclass(frozen=True)
class Upgraded(Result):
    """What an upgrade has done.

    Attributes:
        store: Name of the store.
        rows: Rows of the store, all with a new vector.
        mapped: Rows that were mapped in this run; fewer than all if an interrupted run was continued.
        verified: Rows that were read back and compared.
        difference: Largest difference of these, as a share of the length of the vector.
        seconds: Seconds of this run.
        sentence: What to search now, and how to go back.

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
            f"{self.rows:,} rows of {self.store} have new vectors; {self.mapped:,} were mapped in this run, in "
            f"{self.seconds:.1f} s. {self.verified:,} were read back: largest difference {self.difference:.1e}. "
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
    """Map all old vectors of a store to the new space, in batches; the old vectors stay.

    A run that was interrupted, also by ``kill -9``, is continued by the same call: rows that have their new vector are
    not mapped again. Searches use the new vectors only when all rows have one and a sample agrees with the map. Ids and
    metadata are not touched. Rows that were added meanwhile are mapped, too.

    Args:
        store: The store, e.g. :class:`~hf_stitch_embeddings.stores.ArrayStore`.
        embedding_map: A map of direction ``index``.
        batch_size: Rows that are read, mapped and written at once.
        verify: Rows that are read back and compared.
        seed: Seed of their choice.
        progress: Whether to show a progress bar.

    Returns:
        What was done, and how to search now.

    Raises:
        ValueError: If the map is not of direction ``index`` or does not fit the store, a vector cannot be mapped, the
            old vectors change meanwhile, or the sample disagrees with the map.
        OSError: If another process upgrades the store now, or it cannot be written.

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
    begun = time.perf_counter()
    description = store.describe()
    _check(description, embedding_map)
    if description.error > TOLERANCE:
        warnings.warn(
            f"the vectors that {description.name} returns differ from those that were put into it by about "
            f"{description.error:.2f} of their lengths, which no map repairs: expect a lower recall than that of the "
            "verdict, or upgrade the vectors themselves if you have them",
            stacklevel=2,
        )
    with written(description.name):
        store.start(fingerprint(embedding_map), embedding_map.out_features)
        mapped, left = 0, store.missing()
        found = description.rows - left
        with tqdm(total=description.rows, initial=found, unit="row", desc="upgrade", disable=not progress) as bar:
            while left:
                for ids, rows in store.pending(batch_size):
                    store.write(ids, _mapped(embedding_map, ids, rows, description))
                    mapped += len(ids)
                    bar.update(len(ids))
                before, left = left, store.missing()
                if left >= before:
                    raise ValueError(
                        f"{description.name} keeps getting rows without a new vector: {left} are missing after a whole "
                        "pass; stop other writers and run again, which continues"
                    )
        difference, verified = _compared(store, embedding_map, description, verify, seed)
        sentence = store.switch()
    seconds = time.perf_counter() - begun
    return Upgraded(description.name, found + mapped, mapped, verified, difference, seconds, sentence)


def fingerprint(embedding_map: EmbeddingMap) -> str:
    """Compute a short hash of a map: what it computes, not how it was fitted."""
    found = hashlib.sha256(f"{embedding_map.stitch.name} {embedding_map.metric} {embedding_map.normalized}".encode())
    for name, tensor in sorted(embedding_map.stitch.state_dict().items()):
        found.update(f"{name} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:12]


def _check(description: Description, embedding_map: EmbeddingMap) -> None:
    if embedding_map.direction != "index":
        remedy = (
            "no map found more than the old model: keep it, or pass direction='index' to fit_embedding_map"
            if embedding_map.keeps_old
            else "it is applied to queries, and the index stays; see search_mapped, or fit one with direction='index'"
        )
        raise ValueError(f"{embedding_map!r} does not rewrite an index: {remedy}")
    if description.width != embedding_map.in_features:
        raise ValueError(
            f"{embedding_map!r} takes vectors of width {embedding_map.in_features}, and {description.name} has vectors "
            f"of width {description.width}"
        )
    if embedding_map.metric not in description.metrics:
        raise ValueError(
            f"{embedding_map!r} is a map for {embedding_map.metric}, and {description.name} ranks by "
            f"{' or '.join(description.metrics)}; fit one with metric={description.metrics[0]!r}"
        )


def _mapped(embedding_map: EmbeddingMap, ids: Sequence[Any], rows: Rows, description: Description) -> Rows:
    bad = ~np.isfinite(rows).all(1)
    if embedding_map.metric == "cosine":
        bad |= ~rows.any(1)
    if bad.any():
        some = [ids[row] for row in np.flatnonzero(bad)[:5]]
        raise ValueError(
            f"{int(bad.sum())} vectors of {description.name} are zero or not finite, e.g. those with ids {some}; "
            "remove or repair them and run again, which continues from here"
        )
    unit = embedding_map.record.get("input_normalized")
    if unit and description.error and is_unit(rows, description.error):
        rows = normalized(rows)
    embedding_map.check_lengths(rows, f"the vectors of {description.name}")
    return embedding_map(rows)


def _compared(
    store: VectorStore, embedding_map: EmbeddingMap, description: Description, count: int, seed: int
) -> tuple[float, int]:
    """Return the largest relative difference between stored and mapped vectors, and the number of compared rows."""
    worst, verified, stale = 0.0, 0, []
    for ids, old, new in store.sample(count, seed):
        expected = _mapped(embedding_map, ids, old, description)
        lengths = np.maximum(np.linalg.norm(expected, axis=1), 1e-12)
        differences = np.linalg.norm(expected - new, axis=1) / lengths
        stale += [ids[int(row)] for row in np.flatnonzero(~(differences <= TOLERANCE))]
        worst, verified = max(worst, float(differences.max())), verified + len(ids)
    if stale:
        raise ValueError(
            f"{len(stale)} of {verified} rows of {description.name} that were read back differ from the mapped "
            f"vectors, e.g. the row with id {stale[0]!r}: its old vector has changed since it was mapped. Nothing was "
            "switched; delete the new vectors and run again"
        )
    return worst, verified
