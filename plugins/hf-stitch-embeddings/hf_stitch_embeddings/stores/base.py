"""What an upgrade needs of a vector store."""

from __future__ import annotations

import importlib
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hf_stitch_embeddings.vectors import Metric, Quantization, read_vectors

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Description:
    """What a store contains.

    Attributes:
        name: The store in messages, e.g. ``LanceDB table docs``.
        rows: Number of old vectors.
        width: Their width.
        metrics: Metrics by which the store can rank: some of ``"cosine"``, ``"dot"`` and ``"l2"``. Inner
            products rank by cosine, too, if lengths are 1.
        error: About how much the vectors that the store returns differ from those that were put into it, as a share of
            their lengths.

    Example:
        >>> Description("index.faiss", rows=3, width=2, metrics=("cosine", "dot")).rows
        3
    """

    name: str
    rows: int
    width: int
    metrics: tuple[Metric, ...]
    error: float = 0.0


class VectorStore(ABC):
    """Old vectors in a store, and a place for new ones beside them.

    :func:`~hf_stitch_embeddings.upgrade` calls :meth:`start`, then :meth:`write` for each batch of :meth:`pending`
    until none is :meth:`missing`, compares a :meth:`sample`, and calls :meth:`switch`. Until then nothing that is
    searched changes; a process that is killed at any time continues with the next call.

    A lazy upgrade uses :meth:`search`, :meth:`vectors` and :meth:`replace` afterwards. As a context manager, a store
    closes itself. Ids are ``str`` or ``int``. The first parameter of its constructor is the place of the old vectors,
    for :func:`~hf_stitch_embeddings.stores.open_store`; :func:`~hf_stitch_embeddings.testing.check_store` tests all of
    it.
    """

    quantization: Quantization | None = None
    ranges: Any = None
    """What integers of 8 bits in the store stand for; see :func:`~hf_stitch_embeddings.read_vectors`."""

    def floats(self, rows: Any, name: str) -> Rows:
        """Read old vectors as they are in the store.

        Args:
            rows: The vectors, of any dtype.
            name: What they are, for messages.

        Returns:
            float32.

        Raises:
            ValueError: If they are integers, and :attr:`quantization` does not tell what they stand for.
        """
        found = read_vectors(rows, name, quantization=self.quantization, ranges=self.ranges)
        return np.array(found, dtype=np.float32)

    @classmethod
    def holds(cls, path: Path) -> bool:
        """Return whether a file or a folder that exists holds vectors of such a store, without opening it.

        Args:
            path: The file or folder.
        """
        return False

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the store."""
        self.close()

    def close(self) -> None:  # noqa: B027  # most stores hold nothing
        """Release what other processes wait for; an upgrade that is not finished stays as it is."""

    @abstractmethod
    def describe(self) -> Description:
        """Describe the old vectors.

        Raises:
            FileNotFoundError: If there is no such store.
            ValueError: If it has no vectors, not one for each row, or is already upgraded. A store that continues to
                describe its old vectors finds in :meth:`start` whether all is done.
        """

    @abstractmethod
    def start(self, key: str, width: int) -> None:
        """Make the place for new vectors, or find that of an interrupted upgrade with the same key.

        Args:
            key: Short hash of the map. What another map has half done is never continued.
            width: Width of new vectors.

        Raises:
            ValueError: If the old vectors have changed since, or another map has half upgraded the same place.
            OSError: If another process upgrades the store now.
        """

    @abstractmethod
    def pending(self, batch_size: int) -> Iterator[tuple[Sequence[Any], Rows]]:
        """Yield rows without a new vector, in batches: each once, whether earlier batches have been written or not.

        Args:
            batch_size: Rows of a batch.

        Yields:
            Ids, and ``(batch, width)`` float32 old vectors.
        """

    @abstractmethod
    def write(self, ids: Sequence[Any], vectors: Rows) -> None:
        """Write new vectors; afterwards a killed process does not lose them.

        Args:
            ids: Ids of rows.
            vectors: ``(batch, width)`` float32.
        """

    @abstractmethod
    def missing(self) -> int:
        """Return the number of rows without a new vector."""

    @abstractmethod
    def sample(self, count: int, seed: int) -> Iterator[tuple[Sequence[Any], Rows, Rows]]:
        """Read rows back, for verification, in batches.

        Args:
            count: Number of rows. All are read if others may have changed old vectors since they were mapped.
            seed: Seed of the choice.

        Yields:
            Ids, old and new vectors; no empty batch.
        """

    @abstractmethod
    def switch(self) -> str:
        """Let searches use the new vectors, if the store can do this at once; keep the old ones.

        Returns:
            A sentence: what to search now, and how to go back.

        Raises:
            ValueError: If the old vectors have changed since the start.
        """

    @abstractmethod
    def search(self, queries: Rows, k: int) -> list[list[Any]]:
        """Search the new vectors, after the switch.

        Args:
            queries: ``(n, width)``.
            k: Number of rows.

        Returns:
            For each query the ids of rows, nearest first.
        """

    @abstractmethod
    def vectors(self, ids: Sequence[Any]) -> Rows:
        """Read new vectors, after the switch.

        Args:
            ids: Ids of rows.

        Returns:
            ``(n, width)`` float32, in the order of the ids.

        Raises:
            ValueError: If there is no row with one of the ids.
        """

    @abstractmethod
    def replace(self, ids: Sequence[Any], vectors: Rows) -> None:
        """Put exact vectors in the place of mapped ones, after the switch.

        Args:
            ids: Ids of rows; those that the store no longer has are left out.
            vectors: ``(n, width)`` float32.
        """


def warn_of_unfinished(store: str, place: str, key: str, names: Iterable[str]) -> None:
    """Warn of new vectors that upgrades with other maps have left unfinished in a store."""
    for name in names:
        if re.fullmatch(re.escape(place) + "[0-9a-f]{12}", name) and name != f"{place}{key}":
            warnings.warn(
                f"{store} has new vectors of another map, in {name!r}, perhaps unfinished; they stay as they are: "
                "delete them if you do not need them",
                stacklevel=4,
            )


@contextmanager
def written(store: str) -> Iterator[None]:
    """Name a store in the errors that its library raises while it is written, as an ``OSError``.

    Errors of the operating system, of a value and of a missing package stay as they are.
    """
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError):
        raise
    except Exception as error:
        raise OSError(
            f"{store} could not be written ({type(error).__name__}: {error}); searches see what they saw before: make "
            "room on the disk, or stop other writers, and run again, which continues"
        ) from error


def needed(package: str, extra: str) -> Any:
    """Import the package of a store."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f'{package} is needed: pip install "hf-stitch-embeddings[{extra}]"') from error
