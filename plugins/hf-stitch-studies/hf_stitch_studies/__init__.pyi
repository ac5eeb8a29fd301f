"""Public names, imported on first use."""

from .accuracy import accuracy_difference, bootstrap_accuracy_difference
from .benching.correlation import BenchGroup, BenchScore
from .benching.probing import linear_probe
from .benching.result import Bench
from .benching.workflow import bench
from .connectivity import ModeConnectivity, interpolate, mode_connectivity
from .curves import Curves, score_curves
from .energy import Energy
from .neighbours import RankSimilarity, SecondOrderCosine, rank_similarity, second_order_cosine
from .ranks import rank_curve, reduced_ranks
from .sparsity import sparsify, sparsity_curve, zero_share
from .trajectory import Trajectory, TrajectoryRecorder

__all__ = [
    "Bench",
    "BenchGroup",
    "BenchScore",
    "Curves",
    "Energy",
    "ModeConnectivity",
    "RankSimilarity",
    "SecondOrderCosine",
    "Trajectory",
    "TrajectoryRecorder",
    "accuracy_difference",
    "bench",
    "bootstrap_accuracy_difference",
    "interpolate",
    "linear_probe",
    "mode_connectivity",
    "rank_curve",
    "rank_similarity",
    "reduced_ranks",
    "score_curves",
    "second_order_cosine",
    "sparsify",
    "sparsity_curve",
    "zero_share",
]
