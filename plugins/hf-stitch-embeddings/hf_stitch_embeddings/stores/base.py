"""Interface of vector stores for upgrades."""

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
    """Description of the old vectors in a store.

    Attributes:
        name: Name of the store in messages, e.g. ``LanceDB table docs``.
        rows: Number of old vectors.
        width: Width of the old vectors.
        metrics: Metrics supported by the store: a subset of ``"cosine"``, ``"dot"`` and ``"l2"``. Inner products also
            support cosine, for vectors of length 1.
        error: Approximate error of the returned vectors, relative to their lengths.

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
    """Base class of stores with old vectors and a place for new vectors.

    :func:`~hf_stitch_embeddings.upgrade` calls :meth:`start`, then :meth:`write` for each batch of :meth:`pending`
    until :meth:`missing` returns 0, compares a :meth:`sample`, and calls :meth:`switch`. Search results change only at
    the switch. If the process is killed at any time, the next call continues.

    After the switch, a lazy upgrade uses :meth:`search`, :meth:`vectors` and :meth:`replace`. A store is a context
    manager that closes itself. Ids are ``str`` or ``int``. The first parameter of the constructor is the location of
    the old vectors, for :func:`~hf_stitch_embeddings.stores.open_store`.
    :func:`~hf_stitch_embeddings.testing.check_store` tests the whole contract.
    """

    quantization: Quantization | None = None
    ranges: Any = None
    """Meaning of 8-bit integers in the store; see :func:`~hf_stitch_embeddings.read_vectors`."""

    def floats(self, rows: Any, name: str) -> Rows:
        """Convert old vectors of the store to float32.

        Args:
            rows: The vectors, of any dtype.
            name: Name of the vectors in messages.

        Returns:
            The vectors as float32.

        Raises:
            ValueError: If the vectors are integers, and :attr:`quantization` does not define their meaning.
        """
        vectors = read_vectors(rows, name, quantization=self.quantization, ranges=self.ranges)
        return np.array(vectors, dtype=np.float32)

    @classmethod
    def holds(cls, path: Path) -> bool:
        """Return whether a file or folder contains such a store, without opening it.

        Args:
            path: An existing file or folder.
        """
        return False

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the store."""
        self.close()

    def close(self) -> None:  # noqa: B027  # most stores do not hold resources
        """Release locks and connections; an unfinished upgrade stays unchanged."""

    @abstractmethod
    def describe(self) -> Description:
        """Describe the old vectors.

        Raises:
            FileNotFoundError: If the store does not exist.
            ValueError: If the store is empty, a row lacks a vector, or the store is already upgraded. A store that
                still describes its old vectors after an upgrade checks in :meth:`start` instead.
        """

    @abstractmethod
    def start(self, key: str, width: int) -> None:
        """Create the place for new vectors, or reuse the place of an interrupted upgrade with the same key.

        Args:
            key: Short hash of the map. An upgrade must not continue with a different map.
            width: Width of new vectors.

        Raises:
            ValueError: If the old vectors have changed, or a different map has partly upgraded the same place.
            OSError: If another process is upgrading the store.
        """

    @abstractmethod
    def pending(self, batch_size: int) -> Iterator[tuple[Sequence[Any], Rows]]:
        """Yield rows without a new vector in batches: each row once, independent of writes of earlier batches.

        Args:
            batch_size: Rows per batch.

        Yields:
            Ids, and ``(batch, width)`` float32 old vectors.
        """

    @abstractmethod
    def write(self, ids: Sequence[Any], vectors: Rows) -> None:
        """Write new vectors durably: a killed process must not lose them.

        Args:
            ids: Ids of rows.
            vectors: ``(batch, width)`` float32.
        """

    @abstractmethod
    def missing(self) -> int:
        """Return the number of rows without a new vector."""

    @abstractmethod
    def sample(self, count: int, seed: int) -> Iterator[tuple[Sequence[Any], Rows, Rows]]:
        """Read rows back in batches for verification.

        Args:
            count: Number of rows. Read all rows if other writers may have changed old vectors during the upgrade.
            seed: Seed of the sample.

        Yields:
            Ids, old and new vectors, in non-empty batches.
        """

    @abstractmethod
    def switch(self) -> str:
        """Switch searches to the new vectors, if the store supports an atomic switch, and keep the old ones.

        Returns:
            A sentence with instructions to search the new vectors and to revert.

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
            Row ids for each query, nearest first.
        """

    @abstractmethod
    def vectors(self, ids: Sequence[Any]) -> Rows:
        """Read new vectors, after the switch.

        Args:
            ids: Ids of rows.

        Returns:
            ``(n, width)`` float32, in the order of the ids.

        Raises:
            ValueError: If an id is unknown.
        """

    @abstractmethod
    def replace(self, ids: Sequence[Any], vectors: Rows) -> None:
        """Replace mapped vectors by exact ones, after the switch.

        Args:
            ids: Ids of rows; ids of deleted rows are ignored.
            vectors: ``(n, width)`` float32.
        """


def warn_of_unfinished(store: str, prefix: str, key: str, names: Iterable[str]) -> None:
    """Warn of unfinished upgrades with different maps in a store."""
    for name in names:
        if re.fullmatch(re.escape(prefix) + "[0-9a-f]{12}", name) and name != f"{prefix}{key}":
            warnings.warn(
                f"{store} has new vectors of a different map in {name!r}, perhaps unfinished; they stay unchanged: "
                "delete them if you do not need them",
                stacklevel=4,
            )


@contextmanager
def write_errors(store: str) -> Iterator[None]:
    """Convert library errors during a write to an ``OSError`` with the name of the store.

    ``OSError``, ``ValueError``, ``TypeError`` and ``ImportError`` propagate unchanged.
    """
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError):
        raise
    except Exception as error:
        raise OSError(
            f"{store} could not be written ({type(error).__name__}: {error}); searches are unaffected: free disk space "
            "or stop other writers, and rerun to continue"
        ) from error


def import_package(package: str, extra: str) -> Any:
    """Import the package of a store."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f'{package} is required: pip install "hf-stitch-embeddings[{extra}]"') from error
