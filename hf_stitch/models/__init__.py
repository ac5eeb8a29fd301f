"""Stitched models and the small artefact that joins two networks."""

from .configuration import StitchConfig
from .head import Head, HeadConfig
from .modeling import (
    StitchedModel,
    StitchedModelForCausalLM,
    StitchedModelForImageClassification,
    StitchedModelForSequenceClassification,
)
from .relative import relative_model
from .stitcher import Stitcher
from .stitching import stitch
from .swapping import swap

__all__ = [
    "Head",
    "HeadConfig",
    "StitchConfig",
    "StitchedModel",
    "StitchedModelForCausalLM",
    "StitchedModelForImageClassification",
    "StitchedModelForSequenceClassification",
    "Stitcher",
    "relative_model",
    "stitch",
    "swap",
]
