"""Stitched models and the small artefact that joins two networks."""

from hf_stitch.artefacts.configuration import StitchConfig
from hf_stitch.artefacts.head import Head, HeadConfig
from hf_stitch.artefacts.modeling import (
    StitchedModel,
    StitchedModelForCausalLM,
    StitchedModelForImageClassification,
    StitchedModelForSequenceClassification,
)
from hf_stitch.artefacts.stitcher import Stitcher

__all__ = [
    "Head",
    "HeadConfig",
    "StitchConfig",
    "StitchedModel",
    "StitchedModelForCausalLM",
    "StitchedModelForImageClassification",
    "StitchedModelForSequenceClassification",
    "Stitcher",
]
