"""Public names, which are imported when they are first used."""

from .commands import check_command
from .data_sources import check_data_source
from .maps import check_matcher, check_stitch
from .methods import check_detector, check_selection, check_similarity
from .metrics import check_metric, check_weight_metric
from .networks import check_adapter, check_override, check_rewrite
from .parts import Part, conformance, parametrize_with_checks
from .tasks import check_task

__all__ = [
    "Part",
    "check_adapter",
    "check_command",
    "check_data_source",
    "check_detector",
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
]
