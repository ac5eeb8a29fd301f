"""Stitched models and the small artefact that joins two networks."""

from .configuration import StitchConfig
from .modeling import (
    StitchedModel,
    StitchedModelForCausalLM,
    StitchedModelForImageClassification,
    StitchedModelForSequenceClassification,
)
from .stitcher import Stitcher
from .stitching import stitch

__all__ = [
    "StitchConfig",
    "StitchedModel",
    "StitchedModelForCausalLM",
    "StitchedModelForImageClassification",
    "StitchedModelForSequenceClassification",
    "Stitcher",
    "stitch",
]
