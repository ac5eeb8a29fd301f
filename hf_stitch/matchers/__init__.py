"""Matchers: configs that fit a stitch between two representations."""

from hf_stitch.matchers.attention import Attention
from hf_stitch.matchers.base import (
    ClosedFormMatcher,
    Matched,
    Matcher,
    NoAlignmentError,
    RowsMatcher,
    TrainedMatcher,
    UnpairedMatcher,
    match_each,
)
from hf_stitch.matchers.identity import Identity
from hf_stitch.matchers.inverse_relative import InverseRelative
from hf_stitch.matchers.lasso import Lasso
from hf_stitch.matchers.low_rank import LowRank
from hf_stitch.matchers.low_rank_residual import LowRankResidual
from hf_stitch.matchers.lstsq import Lstsq
from hf_stitch.matchers.permutation import Permutation
from hf_stitch.matchers.piecewise import Piecewise
from hf_stitch.matchers.procrustes import Procrustes
from hf_stitch.matchers.random import Random
from hf_stitch.matchers.recoloured import Recoloured
from hf_stitch.matchers.residual_mlp import ResidualMLP
from hf_stitch.matchers.retrieval import Retrieval
from hf_stitch.matchers.ridge import Ridge
from hf_stitch.matchers.ridge_to_identity import RidgeToIdentity
from hf_stitch.matchers.seeded_refinement import SeededRefinement

__all__ = [
    "Attention",
    "ClosedFormMatcher",
    "Identity",
    "InverseRelative",
    "Lasso",
    "LowRank",
    "LowRankResidual",
    "Lstsq",
    "Matched",
    "Matcher",
    "NoAlignmentError",
    "Permutation",
    "Piecewise",
    "Procrustes",
    "Random",
    "Recoloured",
    "ResidualMLP",
    "Retrieval",
    "Ridge",
    "RidgeToIdentity",
    "RowsMatcher",
    "SeededRefinement",
    "TrainedMatcher",
    "UnpairedMatcher",
    "match_each",
]
