"""Detectors of out-of-distribution activations: what a network has not seen at one of its layers."""

from hf_stitch.detectors.base import Detector, Scorer
from hf_stitch.detectors.classifier import Classifier
from hf_stitch.detectors.knn import NearestNeighbours
from hf_stitch.detectors.likelihood_ratio import LikelihoodRatio
from hf_stitch.detectors.mahalanobis import Mahalanobis

__all__ = ["Classifier", "Detector", "LikelihoodRatio", "Mahalanobis", "NearestNeighbours", "Scorer"]
