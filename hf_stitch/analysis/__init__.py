"""What can be said of a stitched model and of the networks it joins."""

from .calibration import Interval, Null, bootstrap, permutation_null
from .evaluation import Evaluation, Score, evaluate
from .identification import Identification, identify_layers

__all__ = [
    "Evaluation",
    "Identification",
    "Interval",
    "Null",
    "Score",
    "bootstrap",
    "evaluate",
    "identify_layers",
    "permutation_null",
]
