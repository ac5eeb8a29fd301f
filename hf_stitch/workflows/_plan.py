"""What a job will cost: :func:`plan`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, ParamSpec
from unittest.mock import patch

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from hf_stitch.adapters import Adapter
from hf_stitch.adapters.cutting.forwards import evaluating
from hf_stitch.adapters.cutting.interface import MASK
from hf_stitch.adapters.libraries.base import Described
from hf_stitch.adapters.loading import described
from hf_stitch.adapters.untrusted import weightless
from hf_stitch.analysis.extraction import extract_activations
from hf_stitch.analysis.planning import LARGEST, NETWORKS, Plan, bytes_of_weights, speed
from hf_stitch.running import PLANNING, Run
from hf_stitch.workflows._audit import audit
from hf_stitch.workflows._compare import compare, compare_all
from hf_stitch.workflows._evaluate import evaluate
from hf_stitch.workflows._grid import stitch_grid
from hf_stitch.workflows._relative_model import relative_model
from hf_stitch.workflows._stitch import stitch
from hf_stitch.workflows._swap import swap

P = ParamSpec("P")
PLANNED = (audit, compare, compare_all, evaluate, extract_activations, relative_model, stitch, stitch_grid, swap)
"""Jobs that can be planned."""
OF_NETWORKS = ("source", "target", "a", "b", "networks", "model")
"""Arguments of jobs that are networks, which can be described without weights."""
SAMPLES, TOKENS, SMALL = 1000, 512, 2**16
"""Number of samples of a computed plan, tokens of a text unless the network reads fewer, and size of small tensors."""


def plan(job: Callable[P, Any], *args: P.args, **options: P.kwargs) -> Plan:
    """Estimate what a job will cost, without doing it: run a few batches, and extrapolate.

    Without data (``None`` in their place) nothing runs and no weights are read: networks may then also be configs of
    transformers or names of networks whose config alone is loaded. The plan is computed: operations of a forward
    (``torch.utils.flop_counter``) for 1,000 samples, of 512 tokens or as many as the network reads, at the speed of a
    matrix product on this CPU, and the bytes of weights, of the statistics of all blocks (for a stitch of the widest)
    and of the largest output of a module. Equal blocks run once. ``on`` plans for devices that need not be here.

    Args:
        job: The function that does it, such as ``hf_stitch.stitch``.
        *args: Its arguments.
        **options: Its options.

    Returns:
        Seconds of each stage, memory and temporary files. ``"auto"`` layers of :func:`hf_stitch.stitch` are then the
        last cut of the source and the first of the target, which take most time. A comparison returns its routes, too
        (:class:`hf_stitch.analysis.ComparisonPlan`).

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
    given = inspect.signature(job).bind_partial(*args, **options).arguments
    if "data" in given and given["data"] is None:
        with Run.of(job, dict(given.get("options", {})), rest=job is stitch) as run:
            return _computed(job.__name__, {name: given[name] for name in OF_NETWORKS if name in given}, run)
    found: Plan = planned(*args, **options, **{PLANNING: True})
    return found


def _computed(job: str, given: dict[str, Any], run: Run) -> Plan:
    several = given.pop("networks", {})
    networks = {**given, **(several if isinstance(several, dict) else {str(i): each for i, each in enumerate(several)})}
    if not networks:
        raise ValueError(f"{job} without data has no networks to compute a plan of: pass its data")
    stages, largest, rate = dict[str, float](), 0, speed(torch.float32)
    known: dict[Any, Adapter | Described] = {}  # a network that is given twice is in memory once
    widths: list[list[int]] = []
    for name, network in networks.items():
        key = network if isinstance(network, (str, os.PathLike)) else id(network)
        try:
            if key not in known:
                known[key] = network if isinstance(network, (Adapter, Described)) else described(network)
            flops, size, layers = _cost(known[key])
        except RuntimeError as error:
            raise ValueError(f"{name} cannot be run without weights ({error}): plan {job} with its data") from error
        stages[f"{SAMPLES} samples through {name}"] = SAMPLES * flops / rate / run.processes.count
        largest = max(largest, size)
        widths.append(layers)
    moments, grams = 8 * sum(map(sum, widths)) ** 2, 8 * SAMPLES**2 * (1 + sum(map(len, widths)))
    widest = 8 * sum(max(layers, default=0) for layers in widths) ** 2
    kept = {"stitch": widest, "stitch_grid": moments, "compare": min(moments, grams), "compare_all": grams}
    weights = bytes_of_weights(*(each.model for each in known.values()), meta=True)
    memory = {NETWORKS: weights, "statistics": kept.get(job, 0), LARGEST: run.batch_size * largest}
    told = "computed from the configs, not measured; fitting and scoring are not included"
    return Plan.of(f"{job} without data", stages, memory, {}, torch.device("cpu"), run, told, computed=True, speed=rate)


def _cost(found: Adapter | Described) -> tuple[float, int, list[int]]:
    """Return the operations of a forward of one sample, the bytes of the largest output, and the widths of blocks."""
    inputs, outputs, known, widths, again = dict(found.example), [0], dict[Any, tuple[int, Any]](), list[int](), 0
    count = len(inputs[found.interface.content[0]])
    inputs.pop(MASK, None)  # a forward asks for the values of a mask, and here no tensor has any
    if found.interface.modality == "text":
        length = min(found.interface.max_tokens or TOKENS, TOKENS)
        inputs = {name: ids[:, :1].expand(-1, length) for name, ids in inputs.items()}

    def shapes(tree: Any) -> list[torch.Size]:
        return [each.shape for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]

    def note(module: nn.Module, given: Any, output: Any) -> None:
        outputs.extend(each.nbytes for each in tree_leaves(output) if isinstance(each, torch.Tensor))

    def once(kind: str, forward: Callable[..., Any], *args: Any, **given: Any) -> Any:
        nonlocal again
        before, key = counter.get_total_flops() + again, (kind, *shapes((args, given)))
        output = known[key][1] if key in known else forward(*args, **given)
        again += known[key][0] if key in known else 0
        known.setdefault(key, (counter.get_total_flops() + again - before, output))
        widths.extend(shape[1 if len(shape) == 4 else -1] for shape in shapes(output)[:1] if shape)
        return output

    # A forward may change buffers, and ask for the values of small tensors; large ones take no memory.
    copies = {
        name: tensor.detach().clone() if tensor.numel() <= SMALL else tensor.detach().to("meta")
        for name, tensor in chain(found.model.named_parameters(), found.model.named_buffers())
    }
    lists = [group for group in found.model.modules() if isinstance(group, nn.ModuleList | nn.Sequential)]
    blocks = {each for group in lists for each in group if [*map(type, group)].count(type(each)) > 1}
    with ExitStack() as stack:
        for module in found.model.modules():
            stack.callback(module.register_forward_hook(note).remove)
        for block in blocks:
            kind = f"{block} {[*map(shapes, block.parameters())]}"
            stack.enter_context(patch.object(block, "forward", partial(once, kind, block.forward)))
        with torch.no_grad(), evaluating(found.model), weightless(), FlopCounterMode(display=False) as counter:
            functional_call(found.model, copies, (), inputs)
    return (counter.get_total_flops() + again) / count, max(outputs) // count, widths
