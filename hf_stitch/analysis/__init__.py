"""Analyses of stitched models and of the networks they join: similarity, accuracy, intervals and audits."""

from hf_stitch.analysis.activations import Activations
from hf_stitch.analysis.auditing import Audit
from hf_stitch.analysis.bench.correlation import BenchGroup, BenchScore
from hf_stitch.analysis.bench.probing import linear_probe
from hf_stitch.analysis.bench.result import Bench
from hf_stitch.analysis.bootstrapping import ConfidenceInterval, bootstrap
from hf_stitch.analysis.comparison.atlas import SimilarityAtlas
from hf_stitch.analysis.comparison.maximum import MaximumTest
from hf_stitch.analysis.comparison.networks import NetworkAtlas
from hf_stitch.analysis.comparison.routes import ComparisonPlan
from hf_stitch.analysis.connectivity import ModeConnectivity, interpolate, mode_connectivity
from hf_stitch.analysis.curves import Curves, score_curves
from hf_stitch.analysis.detection.result import Detection
from hf_stitch.analysis.evaluation import Evaluation
from hf_stitch.analysis.extraction import extract_activations
from hf_stitch.analysis.grid.result import StitchGrid
from hf_stitch.analysis.identification import Identification, identify_layers
from hf_stitch.analysis.permutation import PermutationTestResult, permutation_test
from hf_stitch.analysis.planning import Plan
from hf_stitch.analysis.ranks import rank_curve, reduced_ranks
from hf_stitch.analysis.scoring import Score
from hf_stitch.analysis.sparsity import sparsify, sparsity_curve, zero_share
from hf_stitch.analysis.trajectory import Trajectory, TrajectoryRecorder

__all__ = [
    "Activations",
    "Audit",
    "Bench",
    "BenchGroup",
    "BenchScore",
    "ComparisonPlan",
    "ConfidenceInterval",
    "Curves",
    "Detection",
    "Evaluation",
    "Identification",
    "MaximumTest",
    "ModeConnectivity",
    "NetworkAtlas",
    "PermutationTestResult",
    "Plan",
    "Score",
    "SimilarityAtlas",
    "StitchGrid",
    "Trajectory",
    "TrajectoryRecorder",
    "bootstrap",
    "extract_activations",
    "identify_layers",
    "interpolate",
    "linear_probe",
    "mode_connectivity",
    "permutation_test",
    "rank_curve",
    "reduced_ranks",
    "score_curves",
    "sparsify",
    "sparsity_curve",
    "zero_share",
]
