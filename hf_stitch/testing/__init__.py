"""Conformance checks for the entries of registries (adapters, matchers, metrics, …), built-in or of a plugin.

Calling a check runs all of its parts, ``check_metric("linear_cka")``, and raises an ``AssertionError`` that names what
is violated; :func:`parametrize_with_checks` makes one test of pytest for each part. Networks have no check:
``check_adapter`` tests networks of any class.
"""

from hf_stitch.testing.commands import check_command
from hf_stitch.testing.conformance import Part, conformance, parametrize_with_checks
from hf_stitch.testing.data_sources import check_data_source
from hf_stitch.testing.maps import check_matcher, check_stitch
from hf_stitch.testing.methods import check_detector, check_selection, check_similarity
from hf_stitch.testing.metrics import check_metric, check_weight_metric
from hf_stitch.testing.networks import check_adapter, check_override, check_rewrite
from hf_stitch.testing.selftest import SelfTest, check_installation, self_test
from hf_stitch.testing.tasks import check_task

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
