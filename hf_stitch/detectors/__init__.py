"""Detectors of out-of-distribution activations: what a network has not seen at one of its layers."""

from hf_stitch.detectors.base import Detector, Scorer
from hf_stitch.detectors.knn import NearestNeighbours
from hf_stitch.detectors.mahalanobis import Mahalanobis

__all__ = ["Detector", "Mahalanobis", "NearestNeighbours", "Scorer"]
