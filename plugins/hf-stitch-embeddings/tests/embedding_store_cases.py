"""The stores that the tests upgrade: how each is made, opened and read."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hf_stitch_embeddings.stores import ArrayStore, VectorStore


class Case(ABC):
    """How a store is made, opened and read.

    Attributes:
        needs: Packages of the store.
    """

    needs: tuple[str, ...] = ()

    @abstractmethod
    def make(self, folder: Path, ids: Sequence[str], vectors: np.ndarray, texts: Sequence[str]) -> None:
        """Make the store with old vectors in an empty folder."""

    @abstractmethod
    def open(self, folder: Path) -> VectorStore:
        """Open it."""

    @abstractmethod
    def read(self, folder: Path) -> dict[Any, tuple[np.ndarray, str | None]]:
        """Read the upgraded store without hf-stitch: id -> new vector and text."""

    @abstractmethod
    def finished(self, folder: Path) -> bool:
        """Return whether the new vectors are those that are searched."""

    def ids(self, ids: Sequence[str]) -> list[Any]:
        """Return the ids that the store has for rows."""
        return list(ids)

    def texts(self, texts: Sequence[str]) -> list[str | None]:
        """Return the texts that the store has for rows."""
        return list(texts)

    def remove(self, folder: Path) -> None:
        """Empty the folder."""
        for each in folder.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()


class Arrays(Case):
    """Files of numpy, which have neither ids nor texts."""

    def make(self, folder: Path, ids: Sequence[str], vectors: np.ndarray, texts: Sequence[str]) -> None:
        np.save(folder / "old.npy", vectors)

    def open(self, folder: Path) -> VectorStore:
        return ArrayStore(folder / "old.npy", folder / "new.npy")

    def read(self, folder: Path) -> dict[Any, tuple[np.ndarray, str | None]]:
        return {number: (vector, None) for number, vector in enumerate(np.load(folder / "new.npy"))}

    def finished(self, folder: Path) -> bool:
        return (folder / "new.npy").exists()

    def ids(self, ids: Sequence[str]) -> list[Any]:
        return list(range(len(ids)))

    def texts(self, texts: Sequence[str]) -> list[str | None]:
        return [None] * len(texts)


class Faiss(Case):
    """A FAISS index with ids.

    Args:
        factory: Its kind.
    """

    needs = ("faiss",)

    def __init__(self, factory: str) -> None:
        self.factory = factory

    def make(self, folder: Path, ids: Sequence[str], vectors: np.ndarray, texts: Sequence[str]) -> None:
        import faiss

        index = faiss.index_factory(vectors.shape[1], self.factory, faiss.METRIC_INNER_PRODUCT)
        index.train(vectors)
        index.add_with_ids(vectors, np.array(self.ids(ids))) if self.given else index.add(vectors)
        faiss.write_index(index, str(folder / "old.faiss"))

    @property
    def given(self) -> bool:
        return "IVF" in self.factory or "IDMap" in self.factory

    def open(self, folder: Path) -> VectorStore:
        from hf_stitch_embeddings.stores.faiss import FaissStore

        return FaissStore(folder / "old.faiss", folder / "new.faiss")

    def read(self, folder: Path) -> dict[Any, tuple[np.ndarray, str | None]]:
        import faiss

        index = faiss.read_index(str(folder / "new.faiss"))
        if isinstance(index, faiss.IndexIVF):
            index.set_direct_map_type(faiss.DirectMap.Hashtable)
        numbers = self.ids([""] * index.ntotal)
        return {number: (index.reconstruct(number), None) for number in numbers}

    def finished(self, folder: Path) -> bool:
        return (folder / "new.faiss").exists()

    def ids(self, ids: Sequence[str]) -> list[Any]:
        return [7 * (len(ids) - number) for number in range(len(ids))] if self.given else list(range(len(ids)))

    def texts(self, texts: Sequence[str]) -> list[str | None]:
        return [None] * len(texts)
