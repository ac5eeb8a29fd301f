"""Detectors of out-of-distribution activations at a layer of a network."""

from hf_stitch.detectors.base import Detector, Scorer

__all__ = ["Detector", "Scorer"]
