"""Embedding upgrade with hf-stitch: a new encoder on an old index, without embedding everything again."""

from __future__ import annotations

from hf_stitch_embeddings.embedding_map import Direction, EmbeddingMap
from hf_stitch_embeddings.retrieval import RetrievalResult, evaluate_retrieval, exact_search
from hf_stitch_embeddings.vectors import (
    CostLimitError,
    Metric,
    NetworkEncoder,
    RemoteEncoder,
    are_normalized,
    check_pairs,
    check_vectors,
    encode,
    normalized,
    read_vectors,
)

__all__ = [
    "CostLimitError",
    "Direction",
    "EmbeddingMap",
    "Metric",
    "NetworkEncoder",
    "RemoteEncoder",
    "RetrievalResult",
    "are_normalized",
    "check_pairs",
    "check_vectors",
    "encode",
    "evaluate_retrieval",
    "exact_search",
    "normalized",
    "read_vectors",
]
