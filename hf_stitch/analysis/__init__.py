"""What can be said of a stitched model and of the networks it joins."""

from .activations import Activations, record
from .atlas import SimilarityAtlas, compare
from .auditing import Audit, audit
from .calibration import Interval, Null, bootstrap, permutation_null
from .connectivity import ModeConnectivity, interpolate, mode_connectivity
from .curves import Curves, score_curves
from .distribution import Distribution
from .evaluation import Evaluation, evaluate
from .identification import Identification, identify_layers
from .ranks import rank_curve, reduced_ranks
from .routes import Plan
from .scoring import Score
from .sparsity import sparsify, sparsity_curve, zero_share
from .trajectory import Trajectory, TrajectoryRecorder

__all__ = [
    "Activations",
    "Audit",
    "Curves",
    "Distribution",
    "Evaluation",
    "Identification",
    "Interval",
    "ModeConnectivity",
    "Null",
    "Plan",
    "Score",
    "SimilarityAtlas",
    "Trajectory",
    "TrajectoryRecorder",
    "audit",
    "bootstrap",
    "compare",
    "evaluate",
    "identify_layers",
    "interpolate",
    "mode_connectivity",
    "permutation_null",
    "rank_curve",
    "record",
    "reduced_ranks",
    "score_curves",
    "sparsify",
    "sparsity_curve",
    "zero_share",
]
