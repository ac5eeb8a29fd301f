"""Workflows: one function per job, from networks (or their names) and raw samples to a result."""

from hf_stitch.workflows._audit import audit
from hf_stitch.workflows._compare import compare
from hf_stitch.workflows._compare_all import compare_all
from hf_stitch.workflows._evaluate import evaluate
from hf_stitch.workflows._grid import stitch_grid
from hf_stitch.workflows._plan import plan
from hf_stitch.workflows._relative_model import relative_model
from hf_stitch.workflows._stitch import stitch
from hf_stitch.workflows._swap import swap

__all__ = ["audit", "compare", "compare_all", "evaluate", "plan", "relative_model", "stitch", "stitch_grid", "swap"]
