"""The registry of vector stores, and opening one by its path or its name."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_stitch.options import check_names
from hf_stitch.registry import PluginError, Registry

if TYPE_CHECKING:
    from hf_stitch_embeddings.stores.base import VectorStore

registry: Registry[VectorStore] = Registry(
    "embedding_stores",
    {
        "arrays": "hf_stitch_embeddings.stores.arrays:ArrayStore",
        "faiss": "hf_stitch_embeddings.stores.faiss:FaissStore",
        "lancedb": "hf_stitch_embeddings.stores.lancedb:LanceStore",
        "qdrant": "hf_stitch_embeddings.stores.qdrant:QdrantStore",
    },
    "hf_stitch_embeddings.stores.base:VectorStore",
)
"""Stores by name. Other distributions add theirs with entry points ``hf_stitch.embedding_stores``."""


def open_store(place: str | Path, **options: Any) -> VectorStore:
    """Open a vector store by its path or its name.

    Args:
        place: A file or a folder, whose store is found by what it holds; or ``name:place``, for what no path tells,
            such as ``qdrant:http://localhost:6333``. The names are those of ``stores.registry``.
        **options: Options of the store, e.g. ``target`` of a file.

    Returns:
        The store.

    Raises:
        UnknownNameError: If no store has the name.
        FileNotFoundError: If a path without a name does not exist.
        ValueError: If no store, or more than one, holds its vectors in such a file or folder.
        TypeError: If an option is unknown or missing.
        ImportError: If the package of the store is not installed.

    Example:
        >>> import numpy as np, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.save(f"{folder}/old.npy", np.eye(3))
        ...     store = open_store(f"{folder}/old.npy", target=f"{folder}/new.npy")
        ...     same = open_store(f"arrays:{folder}/old.npy", target=f"{folder}/new.npy")
        ...     type(store).__name__, same.describe().width
        ('ArrayStore', 3)
    """
    name, colon, rest = str(place).partition(":")
    if colon and len(name) > 1 and not Path(place).exists():  # one letter is a drive of Windows
        registry.check(name)
    else:
        name, rest = _holder(Path(place).expanduser()), str(place)
    first, *known = inspect.signature(registry.get(name)).parameters.values()
    if not any(each.kind is each.VAR_KEYWORD for each in known):
        check_names(f"{name!r} among {registry.kind}", options, [each.name for each in known])
    return registry.build(name, **{first.name: rest}, **options)


def _holder(path: Path) -> str:
    """Return the name of the only store that holds its vectors in a file or folder."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; pass a file, a folder, or NAME:PLACE")
    found, broken = [], []
    for name in registry:
        try:
            if registry.get(name).holds(path):
                found.append(name)
        except PluginError as error:
            broken.append(f" {error}")
    if len(found) != 1:
        several = f"{' and '.join(found)} all hold" if found else "no store holds"
        raise ValueError(
            f"{several} vectors as in {path}; name the store, as NAME:{path}, one of: {', '.join(registry)}."
            + "".join(broken)
        )
    return found[0]
