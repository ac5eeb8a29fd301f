"""Artefacts that can be saved, shared and loaded: whole stitched models, and stitchers that name their networks."""

from hf_stitch.artefacts.classification import (
    StitchedModelForImageClassification,
    StitchedModelForSequenceClassification,
)
from hf_stitch.artefacts.configuration import StitchConfig
from hf_stitch.artefacts.description import Description
from hf_stitch.artefacts.head import Head, HeadConfig
from hf_stitch.artefacts.language import StitchedModelForCausalLM
from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.artefacts.stitcher import Stitcher

__all__ = [
    "Description",
    "Head",
    "HeadConfig",
    "StitchConfig",
    "StitchedModel",
    "StitchedModelForCausalLM",
    "StitchedModelForImageClassification",
    "StitchedModelForSequenceClassification",
    "Stitcher",
]
