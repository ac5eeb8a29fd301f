"""Registry of vector stores, and a function to open a store by path or name."""

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
"""Stores by name. Distributions register stores with entry points ``hf_stitch.embedding_stores``."""


def open_store(place: str | Path, **options: Any) -> VectorStore:
    """Open a vector store by path or name.

    Args:
        place: A file or folder, to detect the store from its content; or ``name:place`` with a name from
            ``stores.registry``, such as ``qdrant:http://localhost:6333``.
        **options: Options of the store, e.g. ``target``.

    Returns:
        The store.

    Raises:
        UnknownNameError: If the name is not registered.
        FileNotFoundError: If a path without a name does not exist.
        ValueError: If not exactly one store recognises the file or folder.
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
    if colon and len(name) > 1 and not Path(place).exists():  # a single letter is a Windows drive
        registry.check(name)
    else:
        name, rest = _recognise_store(Path(place).expanduser()), str(place)
    location, *parameters = inspect.signature(registry.get(name)).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        check_names(f"{name!r} among {registry.kind}", options, [parameter.name for parameter in parameters])
    return registry.build(name, **{location.name: rest}, **options)


def _recognise_store(path: Path) -> str:
    """Return the name of the only store that recognises a file or folder."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; pass a file, a folder, or NAME:PLACE")
    matches, plugin_errors = [], []
    for name in registry:
        try:
            if registry.get(name).holds(path):
                matches.append(name)
        except PluginError as error:
            plugin_errors.append(f" {error}")
    if len(matches) != 1:
        problem = (
            f"several stores recognise {path}: {' and '.join(matches)}" if matches else f"no store recognises {path}"
        )
        raise ValueError(f"{problem}; pass NAME:{path} with one of: {', '.join(registry)}." + "".join(plugin_errors))
    return matches[0]
