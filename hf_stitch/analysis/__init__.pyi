from .activations import Activations as Activations
from .auditing import Audit as Audit
from .comparison.atlas import SimilarityAtlas as SimilarityAtlas
from .comparison.comparing import ComparisonPlan as ComparisonPlan
from .comparison.networks import NetworkAtlas as NetworkAtlas
from .detection.result import Detection as Detection
from .evaluation import Evaluation as Evaluation, Score as Score
from .extraction import extract_activations as extract_activations
from .grid import StitchGrid as StitchGrid
from .identification import Identification as Identification, identify_layers as identify_layers
from .permutation import (
    MaximumTest as MaximumTest,
    PermutationTestResult as PermutationTestResult,
    permutation_test as permutation_test,
)
from .planning import Plan as Plan
from .resampling import ConfidenceInterval as ConfidenceInterval, bootstrap as bootstrap
