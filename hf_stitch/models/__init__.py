"""Stitched models and the small artefact that joins two networks."""

from hf_stitch.models.configuration import StitchConfig
from hf_stitch.models.head import Head, HeadConfig
from hf_stitch.models.modeling import (
    StitchedModel,
    StitchedModelForCausalLM,
    StitchedModelForImageClassification,
    StitchedModelForSequenceClassification,
)
from hf_stitch.models.relative import relative_model
from hf_stitch.models.stitcher import Stitcher
from hf_stitch.models.stitching import stitch
from hf_stitch.models.swapping import swap

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
