"""Statistics that metrics and matchers need: collected batch by batch, merged, and reduced across processes."""

from hf_stitch.statistics.base import Statistic
from hf_stitch.statistics.features import Features
from hf_stitch.statistics.grams import Gram, Grams
from hf_stitch.statistics.hsic import HSIC
from hf_stitch.statistics.interpolated_moments import InterpolatedMoments
from hf_stitch.statistics.layer_moments import LayerMoments
from hf_stitch.statistics.layer_rows import LayerRows
from hf_stitch.statistics.minibatch_grams import MinibatchGrams
from hf_stitch.statistics.moments import Moments
from hf_stitch.statistics.weights import Weights, load_weights, save_weights

__all__ = [
    "HSIC",
    "Features",
    "Gram",
    "Grams",
    "InterpolatedMoments",
    "LayerMoments",
    "LayerRows",
    "MinibatchGrams",
    "Moments",
    "Statistic",
    "Weights",
    "load_weights",
    "save_weights",
]
