"""Conformance checks for the entries of registries (adapters, matchers, metrics, …), built-in or of a plugin."""

from hf_stitch.testing.adapters import check_adapter
from hf_stitch.testing.detectors import check_detector
from hf_stitch.testing.matchers import check_matcher
from hf_stitch.testing.metrics import check_metric
from hf_stitch.testing.rewrites import check_rewrite
from hf_stitch.testing.selections import check_selection
from hf_stitch.testing.similarities import check_similarity
from hf_stitch.testing.stitches import check_stitch
from hf_stitch.testing.weight_metrics import check_weight_metric

__all__ = [
    "check_adapter",
    "check_detector",
    "check_matcher",
    "check_metric",
    "check_rewrite",
    "check_selection",
    "check_similarity",
    "check_stitch",
    "check_weight_metric",
]
