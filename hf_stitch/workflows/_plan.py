"""What a job will cost: :func:`plan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec

from hf_stitch.analysis.extraction import extract_activations
from hf_stitch.analysis.planning import Plan
from hf_stitch.running import PLANNING
from hf_stitch.workflows._audit import audit
from hf_stitch.workflows._compare import compare
from hf_stitch.workflows._compare_all import compare_all
from hf_stitch.workflows._evaluate import evaluate
from hf_stitch.workflows._grid import stitch_grid
from hf_stitch.workflows._relative_model import relative_model
from hf_stitch.workflows._stitch import stitch
from hf_stitch.workflows._swap import swap

P = ParamSpec("P")
PLANNED = (audit, compare, compare_all, evaluate, extract_activations, relative_model, stitch, stitch_grid, swap)
"""Jobs that can be planned."""


def plan(job: Callable[P, Any], *args: P.args, **options: P.kwargs) -> Plan:
    """Estimate what a job will cost, without doing it: run a few batches, and extrapolate.

    Args:
        job: The function that does it, such as ``hf_stitch.stitch``.
        *args: Its arguments.
        **options: Its options.

    Returns:
        Seconds of each stage, memory and temporary files. ``"auto"`` layers of :func:`hf_stitch.stitch` are then the
        last cut of the source and the first of the target, which take most time. A comparison returns its routes, too
        (:class:`hf_stitch.analysis.ComparisonPlan`).

    Raises:
        TypeError: If the function is no job with a plan.
        ValueError: If the job would refuse its arguments.

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> net = hf_stitch.load(Sequential(Linear(4, 8), ReLU(), Linear(8, 2)), example_inputs=torch.randn(2, 4))
        >>> found = hf_stitch.plan(hf_stitch.compare, net, net, torch.randn(100, 4), metrics=["linear_cka"])
        >>> found.fits
        True
    """
    if job not in PLANNED:
        names = ", ".join(f"hf_stitch.{each.__name__}" for each in PLANNED)
        raise TypeError(f"job must be a function with a plan, got {job!r}; these have one: {names}")
    planned: Any = job
    found: Plan = planned(*args, **options, **{PLANNING: True})
    return found
