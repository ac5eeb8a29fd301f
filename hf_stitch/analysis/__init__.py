"""Analyses of stitched models and of the networks they join: similarity, accuracy, intervals and audits."""

from hf_stitch.analysis.activations import Activations
from hf_stitch.analysis.auditing import Audit
from hf_stitch.analysis.bootstrapping import ConfidenceInterval, bootstrap
from hf_stitch.analysis.comparison.atlas import SimilarityAtlas
from hf_stitch.analysis.comparison.maximum import MaximumTest
from hf_stitch.analysis.comparison.networks import NetworkAtlas
from hf_stitch.analysis.comparison.routes import ComparisonPlan
from hf_stitch.analysis.detection.result import Detection
from hf_stitch.analysis.evaluation import Evaluation
from hf_stitch.analysis.extraction import extract_activations
from hf_stitch.analysis.grid.result import StitchGrid
from hf_stitch.analysis.identification import Identification, identify_layers
from hf_stitch.analysis.permutation import PermutationTestResult, permutation_test
from hf_stitch.analysis.planning import Plan
from hf_stitch.scoring.measured import Score

__all__ = [
    "Activations",
    "Audit",
    "ComparisonPlan",
    "ConfidenceInterval",
    "Detection",
    "Evaluation",
    "Identification",
    "MaximumTest",
    "NetworkAtlas",
    "PermutationTestResult",
    "Plan",
    "Score",
    "SimilarityAtlas",
    "StitchGrid",
    "bootstrap",
    "extract_activations",
    "identify_layers",
    "permutation_test",
]
