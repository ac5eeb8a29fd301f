"""Cost estimates of jobs: :func:`plan`."""

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
"""Arguments of jobs for networks, which can be described without weights."""
SAMPLES, TOKENS, SMALL = 1000, 512, 2**16
"""Number of samples of a computed plan, maximal number of tokens of a text, and size of small tensors."""


def plan(job: Callable[P, Any], *args: P.args, **options: P.kwargs) -> Plan:
    """Estimate the cost of a job without doing it: run a few batches, and extrapolate.

    Without data (pass ``None``), nothing runs and weights are not read: networks can then also be configs of
    transformers, or names, which load only the config. The plan is computed from the operations of a forward pass
    (``torch.utils.flop_counter``) for 1,000 samples of 512 tokens (or the maximum of the network), at the speed of a
    matrix product on this CPU, and from the bytes of weights, of the statistics of all blocks (for a stitch, of the
    widest) and of the largest output of a module. Equal blocks run once. ``on`` plans for other devices, which need not
    be available.

    Args:
        job: The function to plan, such as ``hf_stitch.stitch``.
        *args: Its arguments.
        **options: Its options.

    Returns:
        Seconds of each stage, memory and temporary files. ``"auto"`` layers of :func:`hf_stitch.stitch` are then the
        last cut of the source and the first cut of the target, the slowest pair. The plan of a comparison also contains
        its routes (:class:`hf_stitch.analysis.ComparisonPlan`).

    Example:
        >>> import torch, hf_stitch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> net = hf_stitch.load(Sequential(Linear(4, 8), ReLU(), Linear(8, 2)), example_inputs=torch.randn(2, 4))
        >>> cost = hf_stitch.plan(hf_stitch.compare, net, net, torch.randn(100, 4), metrics=["linear_cka"])
        >>> cost.fits
        True
    """
    if job not in PLANNED:
        names = ", ".join(f"hf_stitch.{function.__name__}" for function in PLANNED)
        raise TypeError(f"job must be one of {names}, got {job!r}")
    planned: Any = job
    arguments = inspect.signature(job).bind_partial(*args, **options).arguments
    if "data" in arguments and arguments["data"] is None:
        with Run.of(job, dict(arguments.get("options", {})), rest=job is stitch) as run:
            return _compute(job.__name__, {name: arguments[name] for name in OF_NETWORKS if name in arguments}, run)
    estimate: Plan = planned(*args, **options, **{PLANNING: True})
    return estimate


def _compute(job: str, arguments: dict[str, Any], run: Run) -> Plan:
    listed = arguments.pop("networks", {})
    networks = {**arguments, **(listed if isinstance(listed, dict) else {str(i): n for i, n in enumerate(listed)})}
    if not networks:
        raise ValueError(f"{job} without data requires networks to compute a plan; pass its data")
    stages, largest, rate = dict[str, float](), 0, speed(torch.float32)
    loaded: dict[Any, Adapter | Described] = {}  # a network that is passed twice is in memory once
    widths: list[list[int]] = []
    for name, network in networks.items():
        key = network if isinstance(network, (str, os.PathLike)) else id(network)
        try:
            if key not in loaded:
                loaded[key] = network if isinstance(network, (Adapter, Described)) else described(network)
            flops, size, layers = _cost(loaded[key])
        except RuntimeError as error:
            raise ValueError(f"{name} cannot be run without weights ({error}): plan {job} with its data") from error
        stages[f"{SAMPLES} samples through {name}"] = SAMPLES * flops / rate / run.processes.count
        largest = max(largest, size)
        widths.append(layers)
    moments, grams = 8 * sum(map(sum, widths)) ** 2, 8 * SAMPLES**2 * (1 + sum(map(len, widths)))
    widest = 8 * sum(max(layers, default=0) for layers in widths) ** 2
    statistics = {"stitch": widest, "stitch_grid": moments, "compare": min(moments, grams), "compare_all": grams}
    weights = bytes_of_weights(*(network.model for network in loaded.values()), meta=True)
    memory = {NETWORKS: weights, "statistics": statistics.get(job, 0), LARGEST: run.batch_size * largest}
    note = "computed from the configs, not measured; fitting and scoring are not included"
    return Plan.of(f"{job} without data", stages, memory, {}, torch.device("cpu"), run, note, computed=True, speed=rate)


def _cost(network: Adapter | Described) -> tuple[float, int, list[int]]:
    """Return the operations per sample of a forward pass, the bytes of the largest output, and the widths of blocks."""
    inputs, outputs, costs, widths, cached = (dict(network.example), [0], dict[Any, tuple[int, Any]](), list[int](), 0)
    count = len(inputs[network.interface.content[0]])
    inputs.pop(MASK, None)  # a forward pass reads the values of a mask, but tensors here have no values
    if network.interface.modality == "text":
        length = min(network.interface.max_tokens or TOKENS, TOKENS)
        inputs = {name: ids[:, :1].expand(-1, length) for name, ids in inputs.items()}

    def shapes(tree: Any) -> list[torch.Size]:
        return [leaf.shape for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

    def note_size(module: nn.Module, args: Any, output: Any) -> None:
        outputs.extend(leaf.nbytes for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))

    def once(kind: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal cached
        flops_before, key = counter.get_total_flops() + cached, (kind, *shapes((args, kwargs)))
        output = costs[key][1] if key in costs else forward(*args, **kwargs)
        cached += costs[key][0] if key in costs else 0
        costs.setdefault(key, (counter.get_total_flops() + cached - flops_before, output))
        widths.extend(shape[1 if len(shape) == 4 else -1] for shape in shapes(output)[:1] if shape)
        return output

    # A forward pass may change buffers and read small tensors; large tensors stay on the meta device.
    copies = {
        name: tensor.detach().clone() if tensor.numel() <= SMALL else tensor.detach().to("meta")
        for name, tensor in chain(network.model.named_parameters(), network.model.named_buffers())
    }
    lists = [group for group in network.model.modules() if isinstance(group, nn.ModuleList | nn.Sequential)]
    blocks = {child for group in lists for child in group if [*map(type, group)].count(type(child)) > 1}
    with ExitStack() as stack:
        for module in network.model.modules():
            stack.callback(module.register_forward_hook(note_size).remove)
        for block in blocks:
            kind = f"{block} {[*map(shapes, block.parameters())]}"
            stack.enter_context(patch.object(block, "forward", partial(once, kind, block.forward)))
        with torch.no_grad(), evaluating(network.model), weightless(), FlopCounterMode(display=False) as counter:
            functional_call(network.model, copies, (), inputs)
    return (counter.get_total_flops() + cached) / count, max(outputs) // count, widths
