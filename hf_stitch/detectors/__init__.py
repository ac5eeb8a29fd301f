"""Detectors of out-of-distribution activations: what a network has not seen at one of its layers."""

from hf_stitch.detectors.base import Detector, Scorer

__all__ = ["Detector", "Scorer"]
