"""Public names, which are imported when they are first used."""

from .arrays import ArrayStore
from .base import Description, VectorStore
from .opening import open_store, registry

__all__ = ["ArrayStore", "Description", "VectorStore", "open_store", "registry"]
