"""Conformance checks for the entries of registries (adapters, matchers, metrics, …), built-in or of a plugin.

Calling a check runs all of its parts, ``check_metric("linear_cka")``; :func:`parametrize_with_checks` makes one test of
pytest for each part. Networks have no check: ``check_adapter`` tests networks of any class.
"""

from hf_stitch.testing.adapters import check_adapter
from hf_stitch.testing.commands import check_command
from hf_stitch.testing.conformance import Part, conformance, parametrize_with_checks
from hf_stitch.testing.data_sources import check_data_source
from hf_stitch.testing.detectors import check_detector
from hf_stitch.testing.matchers import check_matcher
from hf_stitch.testing.metrics import check_metric
from hf_stitch.testing.overrides import check_override
from hf_stitch.testing.rewrites import check_rewrite
from hf_stitch.testing.selections import check_selection
from hf_stitch.testing.selftest import SelfTest, check_installation, self_test
from hf_stitch.testing.similarities import check_similarity
from hf_stitch.testing.stitches import check_stitch
from hf_stitch.testing.tasks import check_task
from hf_stitch.testing.weight_metrics import check_weight_metric

__all__ = [
    "Part",
    "SelfTest",
    "check_adapter",
    "check_command",
    "check_data_source",
    "check_detector",
    "check_installation",
    "check_matcher",
    "check_metric",
    "check_override",
    "check_rewrite",
    "check_selection",
    "check_similarity",
    "check_stitch",
    "check_task",
    "check_weight_metric",
    "conformance",
    "parametrize_with_checks",
    "self_test",
]
