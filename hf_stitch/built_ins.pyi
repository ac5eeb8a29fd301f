"""Types of the registries: here, so that no room below imports one above, not even for its types."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # mypy then resolves these rooms before this one
    from hf_stitch.adapters import Library as Library, Override as Override
    from hf_stitch.adapters.rewriting import Rewrite as Rewrite
    from hf_stitch.data import DataSource as DataSource
    from hf_stitch.detectors import Detector as Detector
    from hf_stitch.matchers import Matcher as Matcher
    from hf_stitch.metrics import Metric as Metric
    from hf_stitch.relative import Selection as Selection, Similarity as Similarity
    from hf_stitch.results import Result as Result
    from hf_stitch.stitches import Stitch as Stitch
    from hf_stitch.tasks.base import Task as Task

BUILT_INS: dict[str, dict[str, str]]
BASES: dict[str, str]
