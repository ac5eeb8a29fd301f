"""Vector stores whose vectors are rewritten, or whose queries are mapped."""

from __future__ import annotations

from hf_stitch_embeddings.stores.arrays import ArrayStore
from hf_stitch_embeddings.stores.base import Description, VectorStore

__all__ = ["ArrayStore", "Description", "VectorStore"]
