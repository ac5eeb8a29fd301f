"""What can be learned of a stitched model and of the networks it joins, from activations and scores."""

from hf_stitch.analysis.activations import Activations
from hf_stitch.analysis.auditing import Audit
from hf_stitch.analysis.bootstrapping import ConfidenceInterval, bootstrap
from hf_stitch.analysis.comparison.atlas import SimilarityAtlas
from hf_stitch.analysis.comparison.routes import ComparisonPlan
from hf_stitch.analysis.connectivity import ModeConnectivity, interpolate, mode_connectivity
from hf_stitch.analysis.curves import Curves, score_curves
from hf_stitch.analysis.distribution import Distribution
from hf_stitch.analysis.evaluation import Evaluation
from hf_stitch.analysis.extraction import extract_activations
from hf_stitch.analysis.identification import Identification, identify_layers
from hf_stitch.analysis.permutation import PermutationTestResult, permutation_test
from hf_stitch.analysis.ranks import rank_curve, reduced_ranks
from hf_stitch.analysis.scoring import Score
from hf_stitch.analysis.sparsity import sparsify, sparsity_curve, zero_share
from hf_stitch.analysis.trajectory import Trajectory, TrajectoryRecorder

__all__ = [
    "Activations",
    "Audit",
    "Curves",
    "Distribution",
    "Evaluation",
    "Identification",
    "ConfidenceInterval",
    "ModeConnectivity",
    "PermutationTestResult",
    "ComparisonPlan",
    "Score",
    "SimilarityAtlas",
    "Trajectory",
    "TrajectoryRecorder",
    "bootstrap",
    "identify_layers",
    "interpolate",
    "mode_connectivity",
    "permutation_test",
    "rank_curve",
    "extract_activations",
    "reduced_ranks",
    "score_curves",
    "sparsify",
    "sparsity_curve",
    "zero_share",
]
