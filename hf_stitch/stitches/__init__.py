"""Stitches: modules between two networks.

A stitch maps vectors of one width to vectors of another. A stitching layer maps complete representations.
"""

from hf_stitch.stitches.base import Stitch
from hf_stitch.stitches.layer import StitchingLayer
from hf_stitch.stitches.linear import IdentityStitch, LinearStitch, LowRankStitch, MaskedStitch, as_linear
from hf_stitch.stitches.nonlinear import PiecewiseStitch, ResidualMLPStitch
from hf_stitch.stitches.sequence import SequenceStitch

__all__ = [
    "IdentityStitch",
    "LinearStitch",
    "LowRankStitch",
    "MaskedStitch",
    "PiecewiseStitch",
    "ResidualMLPStitch",
    "SequenceStitch",
    "Stitch",
    "StitchingLayer",
    "as_linear",
]
