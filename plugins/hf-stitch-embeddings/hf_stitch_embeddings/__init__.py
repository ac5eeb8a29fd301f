"""Embedding upgrade with hf-stitch: a new encoder on an old index, without embedding everything again."""

from __future__ import annotations

from hf_stitch_embeddings.embedding_map import Direction, EmbeddingMap
from hf_stitch_embeddings.fitting import PairsCurve, fit_embedding_map, pairs_curve, split_pairs
from hf_stitch_embeddings.lazy import LazyUpgrade, rows_first
from hf_stitch_embeddings.retrieval import RetrievalResult, evaluate_retrieval, exact_search
from hf_stitch_embeddings.upgrading import Upgraded, upgrade
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
from hf_stitch_embeddings.verdict import Ageing, Calibration, Verdict, calibrate, monitor, query_scores, verdict

__all__ = [
    "Ageing",
    "Calibration",
    "CostLimitError",
    "Direction",
    "EmbeddingMap",
    "LazyUpgrade",
    "Metric",
    "NetworkEncoder",
    "PairsCurve",
    "RemoteEncoder",
    "RetrievalResult",
    "Upgraded",
    "Verdict",
    "are_normalized",
    "calibrate",
    "check_pairs",
    "check_vectors",
    "encode",
    "evaluate_retrieval",
    "exact_search",
    "fit_embedding_map",
    "monitor",
    "normalized",
    "pairs_curve",
    "query_scores",
    "read_vectors",
    "rows_first",
    "split_pairs",
    "upgrade",
    "verdict",
]
