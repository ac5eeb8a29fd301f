"""The stores that the tests upgrade; a new store adds a row."""

from __future__ import annotations

from embedding_store_cases import Arrays, Case, Faiss
from embedding_store_lancedb import Lance
from embedding_store_qdrant import Qdrant

STORES: dict[str, Case] = {
    "arrays": Arrays(),
    "faiss flat": Faiss("Flat"),
    "faiss with ids": Faiss("IDMap2,Flat"),
    "faiss IVF": Faiss("IVF4,Flat"),
    "lancedb": Lance(),
    "qdrant": Qdrant(),
    "qdrant, unnamed": Qdrant(named=False),
}
