"""Public names, which are imported when they are first used."""

from .deciding import Ageing, Calibration, Verdict, calibrate, monitor, query_scores, verdict
from .embedding_map import Direction, EmbeddingMap
from .few_pairs import SeededRefinement
from .fitting import PairsCurve, fit_embedding_map, pairs_curve, split_pairs
from .lazy import LazyUpgrade, rows_first
from .retrieval import RetrievalResult, evaluate_retrieval, exact_search
from .row_matchers import Piecewise, ResidualMLP, Retrieval
from .unsupervised import Unsupervised
from .upgrading import Upgraded, upgrade
from .vectors import (
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
    "Ageing",
    "Calibration",
    "CostLimitError",
    "Direction",
    "EmbeddingMap",
    "LazyUpgrade",
    "Metric",
    "NetworkEncoder",
    "PairsCurve",
    "Piecewise",
    "RemoteEncoder",
    "ResidualMLP",
    "Retrieval",
    "RetrievalResult",
    "SeededRefinement",
    "Unsupervised",
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
