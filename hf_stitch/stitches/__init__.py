"""Stitches: modules between two networks.

A stitch maps vectors of one width to vectors of another. A stitching layer maps complete representations.
"""

from hf_stitch.stitches.attention import AttentionStitch
from hf_stitch.stitches.base import Stitch
from hf_stitch.stitches.identity import IdentityStitch
from hf_stitch.stitches.layer import StitchingLayer
from hf_stitch.stitches.linear import LinearStitch, as_linear
from hf_stitch.stitches.low_rank import LowRankStitch
from hf_stitch.stitches.low_rank_residual import LowRankResidualStitch
from hf_stitch.stitches.masked import MaskedStitch
from hf_stitch.stitches.piecewise import PiecewiseStitch
from hf_stitch.stitches.residual_mlp import ResidualMLPStitch
from hf_stitch.stitches.sequence import SequenceStitch

__all__ = [
    "AttentionStitch",
    "IdentityStitch",
    "LinearStitch",
    "LowRankResidualStitch",
    "LowRankStitch",
    "MaskedStitch",
    "PiecewiseStitch",
    "ResidualMLPStitch",
    "SequenceStitch",
    "Stitch",
    "StitchingLayer",
    "as_linear",
]
