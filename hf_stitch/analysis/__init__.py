"""What can be said of a stitched model and of the networks it joins."""

from .activations import Activations, record
from .atlas import SimilarityAtlas, compare
from .calibration import Interval, Null, bootstrap, permutation_null
from .evaluation import Evaluation, evaluate
from .identification import Identification, identify_layers
from .routes import Plan
from .scoring import Score

__all__ = [
    "Activations",
    "Evaluation",
    "Identification",
    "Interval",
    "Null",
    "Plan",
    "Score",
    "SimilarityAtlas",
    "bootstrap",
    "compare",
    "evaluate",
    "identify_layers",
    "permutation_null",
    "record",
]
