"""Conformance check for metrics of weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from hf_stitch.metrics.base import NotComparable, WeightMetric
from hf_stitch.registry import registries
from hf_stitch.statistics import Weights, load_weights, save_weights
from hf_stitch.testing._require import require, require_error, skip_unless
from hf_stitch.testing.conformance import conformance


@conformance
def check_weight_metric(
    metric: str | type[WeightMetric] | WeightMetric, a: nn.Module, b: nn.Module, **options: Any
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Check that a metric of weights satisfies the contract of ``WeightMetric``.

    The parts:

    - ``declarations``: range and direction are valid, and an unknown option raises a ``TypeError``.
    - ``reading``: it reads layers by their names without changing the network and without drawing random numbers; what
      it reads is floating point, on the CPU, without gradients, and no view of the weights.
    - ``saved``: readings that were saved and loaded keep their order and give the same values.
    - ``comparable``: a layer of ``a`` is comparable with the layer of the same name of ``b``, the values are combined
      to a finite number, and ``NotComparable`` names a layer and a reason.
    - ``range``: values lie within the range.
    - ``symmetric``: exchanged layers give the same value to 1e-9, if declared.
    - ``identity``: a layer has the best value with itself: 0 for a distance, no less than with any other layer for a
      similarity.
    - ``triangle``: the triangle inequality holds, if declared.
    - ``without_weights``: a network without weights raises a ``ValueError``.
    - ``not_finite``: weights that are not finite raise ``NotComparable``.

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

    @cache
    def built() -> WeightMetric:
        found = metric(**options) if isinstance(metric, type) else registries.metrics.build(metric, **options)
        assert isinstance(found, WeightMetric), f"{found!r} must be a WeightMetric"
        return found

    def sides() -> tuple[dict[str, Weights], dict[str, Weights]]:
        return built().read(a), built().read(b)

    yield "declarations", lambda: _check_declared(built())
    yield "reading", lambda: _check_reading(built(), a, b)
    yield "saved", lambda: _check_saved(built(), *sides())
    yield "comparable", lambda: _check_comparable(built(), *sides())
    yield "range", lambda: _check_range(built(), *sides())
    yield "symmetric", lambda: _check_symmetric(built(), *sides())
    yield "identity", lambda: _check_identity(built(), *sides())
    yield "triangle", lambda: _check_triangle(built(), *sides())
    yield "without_weights", lambda: _check_without_weights(built())
    yield "not_finite", lambda: _check_not_finite(built(), built().read(a))


def _check_declared(metric: WeightMetric) -> None:
    low, high = metric.range
    require(low < high, f"range must be (smallest, largest), got {metric.range}")
    require(
        not metric.higher_is_better or not metric.triangle_inequality,
        "triangle_inequality needs higher_is_better=False",
    )
    require_error(TypeError, lambda: type(metric)(no_such_option=1), "an unknown option")


def _check_reading(metric: WeightMetric, *models: nn.Module) -> None:
    for model in (*models, copy.deepcopy(models[0]).double()):  # whose conversion to float64 is no copy
        _check_read(metric, copy.deepcopy(model))


def _check_read(metric: WeightMetric, model: nn.Module) -> None:
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


def _check_saved(metric: WeightMetric, a: Mapping[str, Weights], b: Mapping[str, Weights]) -> None:
    with TemporaryDirectory() as folder:
        save_weights(a, Path(folder) / "a.safetensors", metric.name)
        loaded = load_weights(Path(folder) / "a.safetensors", metric.name)
    require(list(loaded) == list(a), "layers must keep their order when readings are saved")
    for layer, other, value in _values(metric, a, b):
        require(value == _value(metric, loaded[layer], b[other]), "saved readings change the value")


def _check_comparable(metric: WeightMetric, a: Mapping[str, Weights], b: Mapping[str, Weights]) -> None:
    compared = {layer: value for layer, other, value in _values(metric, a, b) if layer == other}
    require(bool(compared), "no layer of a is comparable with the layer of the same name of b")
    require(math.isfinite(metric.combine(compared)), "combine must return a finite number")


def _check_range(metric: WeightMetric, a: Mapping[str, Weights], b: Mapping[str, Weights]) -> None:
    low, high = metric.range
    for layer, other, value in _values(metric, a, b):
        require(low - 1e-12 <= value <= high + 1e-12, f"{layer} and {other}: {value} is outside of {metric.range}")


def _check_symmetric(metric: WeightMetric, a: Mapping[str, Weights], b: Mapping[str, Weights]) -> None:
    skip_unless(metric.symmetric, f"{metric.name} does not declare symmetry")
    for layer, other, value in _values(metric, a, b):
        back = _value(metric, b[other], a[layer])
        require(abs(value - back) <= 1e-9 * max(1, abs(value)), f"{layer} and {other}: {value} v. {back}")


def _check_identity(metric: WeightMetric, a: Mapping[str, Weights], b: Mapping[str, Weights]) -> None:
    layers = [*a.values(), *b.values()]
    for i, row in enumerate(_table(metric, a, b)):
        known = [value for value in row if not math.isnan(value)]
        require(not math.isnan(row[i]), f"layer {layers[i].layer!r} must be comparable with itself")
        best = max(known) if metric.higher_is_better else min(known)
        require(abs(row[i] - best) <= 1e-6, f"layer {layers[i].layer!r} has a better value with another: {best}")
        if not metric.higher_is_better:
            require(abs(row[i]) <= 1e-6 * max(1, *known), f"the distance of a layer from itself is {row[i]}")


def _check_triangle(metric: WeightMetric, a: Mapping[str, Weights], b: Mapping[str, Weights]) -> None:
    skip_unless(metric.triangle_inequality, f"{metric.name} does not declare the triangle inequality")
    values = _table(metric, a, b)
    for row in values:
        for j, direct in enumerate(row):
            around = (first + values[k][j] for k, first in enumerate(row))
            require(all(not direct > other + 1e-9 for other in around), "the triangle inequality does not hold")


def _check_without_weights(metric: WeightMetric) -> None:
    require_error(ValueError, lambda: metric.read(nn.Sequential(nn.Identity())), "a network without weights")


def _check_not_finite(metric: WeightMetric, a: Mapping[str, Weights]) -> None:
    first = next(iter(a.values()))
    broken = copy.deepcopy(first)
    for tensor in broken.tensors.values():
        tensor.fill_(math.nan)
    require_error(NotComparable, lambda: metric.value(first, broken), "weights that are not finite")


def _table(metric: WeightMetric, a: Mapping[str, Weights], b: Mapping[str, Weights]) -> list[list[float]]:
    """Return the values of all pairs of layers of both sides, NaN for those that are not comparable."""
    layers = [*a.values(), *b.values()]
    return [[_value(metric, x, y) for y in layers] for x in layers]


def _values(
    metric: WeightMetric, a: Mapping[str, Weights], b: Mapping[str, Weights]
) -> Iterator[tuple[str, str, float]]:
    """Iterate over the names and values of comparable pairs of layers."""
    for layer, x in a.items():
        for other, y in b.items():
            if not math.isnan(value := _value(metric, x, y)):
                yield layer, other, value


def _value(metric: WeightMetric, x: Weights, y: Weights) -> float:
    """Return the value of a pair of layers, NaN if they are not comparable."""
    try:
        return metric.value(x, y)
    except NotComparable as error:
        require(bool(error.layer) and bool(error.why), "NotComparable needs a layer and a reason")
        return math.nan
