"""Conformance check for metrics of weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from hf_stitch.metrics.base import NotComparable, WeightMetric
from hf_stitch.registry import registries
from hf_stitch.statistics import Weights, load_weights, save_weights
from hf_stitch.testing._require import require, require_error


def check_weight_metric(
    metric: str | type[WeightMetric] | WeightMetric, a: nn.Module, b: nn.Module, **options: Any
) -> None:
    """Check that a metric of weights satisfies the contract of ``WeightMetric``.

    The metric has all declarations. It reads networks without changing them and without drawing random numbers, and
    what it reads is floating point, on the CPU, without gradients, and no view of the weights. Readings that were saved
    and loaded give the same values. Values are finite and within the range, and symmetric if declared. A layer has the
    best value with itself: 0 for a distance, no less than with any other layer for a similarity. Declared triangle
    inequality holds. A network without weights raises a ``ValueError``.

    Args:
        metric: Name in the registry of metrics, a class, or a metric.
        a: A network that the metric reads.
        b: Another one, at least one layer of which is comparable with the layer of the same name of ``a``.
        **options: Options of the metric, if given by name or class.

    Raises:
        AssertionError: The contract is violated; the message names the violation.

    Example:
        >>> from hf_stitch.metrics import WeightMetric
        >>> class Cosine(WeightMetric):
        ...     name, title, range = "cosine", "cosine of weights", (-1.0, 1.0)
        ...     function = staticmethod(lambda x, y: torch.cosine_similarity(x.tensors["w"], y.tensors["w"], 0).item())
        ...
        ...     def read(self, model):
        ...         layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        ...         if not layers:
        ...             raise ValueError("no linear layers")
        ...         return {n: Weights(n, {"w": m.weight.detach().flatten().clone()}) for n, m in layers.items()}
        >>> check_weight_metric(Cosine, nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(3, 2)))
    """
    built = metric(**options) if isinstance(metric, type) else registries.metrics.build(metric, **options)
    assert isinstance(built, WeightMetric), f"{built!r} must be a WeightMetric"
    _check_declared(built)
    read = [_check_read(built, model) for model in (a, b)]
    _check_read(built, copy.deepcopy(a).double())  # whose conversion to float64 is no copy
    compared = _check_values(built, *read)
    require(compared > 0, "no layer of a is comparable with the layer of the same name of b")
    _check_distance(built, read)
    require_error(ValueError, lambda: built.read(nn.Sequential(nn.Identity())), "a network without weights")
    first, broken = next(iter(read[0].values())), copy.deepcopy(next(iter(read[0].values())))
    for tensor in broken.tensors.values():
        tensor.fill_(math.nan)
    require_error(NotComparable, lambda: built.value(first, broken), "weights that are not finite")


def _check_declared(metric: WeightMetric) -> None:
    low, high = metric.range
    require(low < high, f"range must be (smallest, largest), got {metric.range}")
    require(
        not metric.higher_is_better or not metric.triangle_inequality,
        "triangle_inequality needs higher_is_better=False",
    )
    require_error(TypeError, lambda: type(metric)(no_such_option=1), "an unknown option")


def _check_read(metric: WeightMetric, model: nn.Module) -> dict[str, Weights]:
    before, state = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    read = metric.read(model)
    require(bool(torch.equal(state, torch.random.get_rng_state())), "read must not draw random numbers")
    require(bool(read), "read must return at least one layer, or raise a ValueError")
    for layer, each in read.items():
        require(each.layer == layer, f"what is read of layer {layer!r} has the name {each.layer!r}")
        for name, tensor in each.tensors.items():
            what = f"tensor {name!r} of layer {layer!r}"
            require(tensor.is_floating_point(), f"{what} must be floating point, got {tensor.dtype}")
            require(tensor.device.type == "cpu" and not tensor.requires_grad, f"{what} must be detached, on the CPU")
            tensor.add_(1)  # a view would change the network
    same = all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    require(same, "what is read must be copies: changing it changed the network")
    return metric.read(model)


def _check_values(metric: WeightMetric, a: Mapping[str, Weights], b: Mapping[str, Weights]) -> int:
    """Check all pairs of layers, and return the number of layers that are comparable with those of the same name."""
    low, high = metric.range
    with TemporaryDirectory() as folder:
        save_weights(a, Path(folder) / "a.safetensors", metric.name)
        loaded = load_weights(Path(folder) / "a.safetensors", metric.name)
    require(list(loaded) == list(a), "layers must keep their order when readings are saved")
    compared: dict[str, float] = {}
    for layer, x in a.items():
        for other, y in b.items():
            value = _value(metric, x, y)
            require(value == _value(metric, loaded[layer], y) or math.isnan(value), "saved readings change the value")
            if math.isnan(value):
                continue
            require(low - 1e-12 <= value <= high + 1e-12, f"{layer} and {other}: {value} is outside of {metric.range}")
            if metric.symmetric:
                back = _value(metric, y, x)
                require(abs(value - back) <= 1e-9 * max(1, abs(value)), f"{layer} and {other}: {value} v. {back}")
            if layer == other:
                compared[layer] = value
    if compared:
        require(math.isfinite(metric.combine(compared)), "combine must return a finite number")
    return len(compared)


def _check_distance(metric: WeightMetric, read: list[dict[str, Weights]]) -> None:
    layers = [each for side in read for each in side.values()]
    values = [[_value(metric, x, y) for y in layers] for x in layers]
    for i, row in enumerate(values):
        known = [value for value in row if not math.isnan(value)]
        require(not math.isnan(row[i]), f"layer {layers[i].layer!r} must be comparable with itself")
        best = max(known) if metric.higher_is_better else min(known)
        require(abs(row[i] - best) <= 1e-6, f"layer {layers[i].layer!r} has a better value with another: {best}")
        if not metric.higher_is_better:
            require(abs(row[i]) <= 1e-6 * max(1, *known), f"the distance of a layer from itself is {row[i]}")
    if metric.triangle_inequality:
        for row in values:
            for j, direct in enumerate(row):
                around = (first + values[k][j] for k, first in enumerate(row))
                require(all(not direct > other + 1e-9 for other in around), "the triangle inequality does not hold")


def _value(metric: WeightMetric, x: Weights, y: Weights) -> float:
    """Return the value of a pair of layers, NaN if they are not comparable."""
    try:
        return metric.value(x, y)
    except NotComparable as error:
        require(bool(error.layer) and bool(error.why), "NotComparable needs a layer and a reason")
        return math.nan
