"""Statistics for metrics and matchers: collected batch by batch, merged, and reduced across processes."""

from hf_stitch.statistics.features import Features
from hf_stitch.statistics.moments import Moments
from hf_stitch.statistics.weights import Weights, load_weights, save_weights

__all__ = ["Features", "Moments", "Weights", "load_weights", "save_weights"]
