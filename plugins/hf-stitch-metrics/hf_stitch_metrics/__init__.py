"""Additional metrics for hf-stitch: matched features, means and covariances, and distances of samples."""

from hf_stitch_metrics.distances import DistanceCorrelation, distance_correlation
from hf_stitch_metrics.gaussians import Frechet, frechet
from hf_stitch_metrics.matching import CorrelationMatching, SoftMatching, correlation_matching, soft_matching

__all__ = [
    "CorrelationMatching",
    "DistanceCorrelation",
    "Frechet",
    "SoftMatching",
    "correlation_matching",
    "distance_correlation",
    "frechet",
    "soft_matching",
]
