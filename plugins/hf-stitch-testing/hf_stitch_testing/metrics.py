"""Conformance checks for activation metrics and weight metrics."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from hf_stitch.metrics.base import (
    ActivationMetric,
    Metric,
    MomentsMetric,
    NotComparable,
    WeightMetric,
    activation_metric,
)
from hf_stitch.registry import registries
from hf_stitch.statistics import Moments, Weights, load_weights, save_weights
from hf_stitch_testing.kit import (
    Kit,
    random,
    require,
    require_error,
    skip_unless,
    transform,
    unchanged,
    unknown_invariances,
)
from hf_stitch_testing.parts import conformance

_ROWS = 61
_STATISTICS = ("moments", "debiased", "grams", "features", "outputs")


@conformance
def check_metric(metric: str | type[Metric] | Metric, **options: Any) -> _MetricKit:
    """Check that a metric satisfies the laws of :class:`~hf_stitch.metrics.ActivationMetric`, one part per law.

    The rows have equal widths and, if the metric supports them, unequal widths. Further parts:

    - ``declarations``: metric and function have the same name; statistic, range and invariances are valid; an unknown
      option raises a ``TypeError``.
    - ``types``: arrays return a float, tensors a 0-d float64 tensor of the same value; bfloat16 is converted first.
    - ``degenerate``: NaN, a single row, sides of different lengths, integers, complex numbers and vectors raise an
      error that names the metric.
    - ``too_few_rows``, ``unequal_widths``: fewer rows than declared, and unsupported widths, raise an error.

    Args:
        metric: Name in the registry of metrics, a class, or a metric with options, which is not modified.
        **options: Options of the metric, if passed by name or class.

    Example:
        >>> from hf_stitch.metrics._shapes import Procrustes
        >>> check_metric(Procrustes, unit_norm=False)
    """
    return _MetricKit(metric, options)


class _Values(Kit):
    """Parts on values of pairs ``x`` and ``y`` of activations or weights; NaN for pairs that are not comparable."""

    metric: Any
    table: Any  # values of all pairs of a few sides
    _value: Callable[..., float]
    _tolerance: float  # for exchanged sides

    def declarations(self) -> None:
        low, high = self.metric.range
        require(low < high, f"range must be (minimum, maximum), got {self.metric.range}")
        distance = not self.metric.higher_is_better or not self.metric.triangle_inequality
        require(distance, "triangle_inequality requires higher_is_better=False")
        require_error(TypeError, lambda: type(self.metric)(no_such_option=1), "an unknown option")

    def range(self, x: Any, y: Any, value: float) -> None:
        low, high = self.metric.range
        inside = low - 1e-12 <= value <= high + 1e-12
        require(inside, f"the value of {_label(x, y)} must lie in the range {self.metric.range}, got {value}")

    def symmetric(self, x: Any, y: Any, value: float) -> None:
        skip_unless(self.metric.symmetric, f"{self.metric.name} does not declare symmetry")
        _require_close(self._value(y, x), value, self._tolerance, f"of {_label(x, y)} with swapped sides")

    def triangle(self) -> None:
        skip_unless(self.metric.triangle_inequality, f"{self.metric.name} does not declare the triangle inequality")
        for row in self.table:
            for (j, direct), (k, first) in product(enumerate(row), repeat=2):
                is_violated = direct > first + self.table[k][j] + 1e-9
                require(
                    not is_violated, f"the triangle inequality must hold, got {direct} > {first} + {self.table[k][j]}"
                )


def _label(x: Any, y: Any) -> str:
    return f"{x.layer!r} and {y.layer!r}" if isinstance(x, Weights) else f"{x.dtype} rows"


class _MetricKit(_Values):
    _tolerance = 1e-7

    def __init__(self, entry: Any, options: dict[str, Any]) -> None:
        self._entry, self._options = entry, options

    @cached_property
    def metric(self) -> ActivationMetric:
        if isinstance(self._entry, type):
            return activation_metric(self._entry(**self._options))
        return activation_metric(self._entry, **self._options)

    def _cases(self) -> Iterator[tuple[Tensor, Tensor, float]]:
        for dx, dy in ((5, 5),) if self.metric.equal_widths else ((5, 5), (6, 4), (4, 6)):
            x, y = self._rows(dx, 1), self._rows(dy, 2)
            yield x, y, self._value(x, y)

    def _rows(self, width: int, seed: int) -> Tensor:
        """Return float64 rows with a common part for all seeds, and means several standard deviations from 0.

        Metrics of outputs receive probabilities, which are also valid logits.
        """
        mixing, noise, mean = random(3 + _ROWS + 1, width, seed=seed).split([3, _ROWS, 1])
        rows = random(_ROWS, 3) @ mixing + 0.7 * noise + 3 * mean
        return (rows / 5).softmax(1) if self.metric.statistic == "outputs" else rows

    def _sides(self, count: int = 2) -> list[Tensor]:
        return [self._rows(5, 1 + seed) for seed in range(count)]

    def _call(self, x: Any, y: Any) -> Any:
        return type(self.metric).function(x, y, **self.metric.options)

    def _value(self, x: Tensor, y: Tensor) -> float:
        return float(self._call(x.clone(), y.clone()))

    @cached_property
    def table(self) -> list[list[float]]:
        sides = self._sides(3)
        return [[self._value(x, y) for y in sides] for x in sides]

    def _empty(self) -> ActivationMetric:
        return type(self.metric)(**self.metric.options)

    def declarations(self) -> None:
        metric = self.metric
        require(metric.function.__name__ == metric.name, f"function must have the name of the metric, {metric.name!r}")
        require(metric.statistic in _STATISTICS, f"statistic must be one of {_STATISTICS}, got {metric.statistic!r}")
        unknown_invariances(metric.invariances)
        super().declarations()

    def pure(self, x: Tensor, y: Tensor, value: float) -> None:
        unmodified = unchanged("a metric must not modify the rows", lambda: (x, y))
        with unchanged("a metric must not draw random numbers"), unmodified:
            self._call(x, y)

    def types(self, x: Tensor, y: Tensor, value: float) -> None:
        from_tensors, from_arrays = self._call(x.clone(), y.clone()), self._call(x.numpy(), y.numpy())
        is_scalar = from_tensors.shape == () and from_tensors.dtype == torch.float64
        require(is_scalar, f"tensors must return a 0-d float64 tensor, got {from_tensors!r}")
        require(type(from_arrays) is float, f"arrays must return a float, got {type(from_arrays).__name__}")
        _require_close(from_arrays, value, 1e-12, "of arrays")
        in_bfloat16 = x.bfloat16(), y.bfloat16()
        from_float64 = self._value(in_bfloat16[0].double(), in_bfloat16[1].double())
        _require_close(self._value(*in_bfloat16), from_float64, 1e-12, "of bfloat16")

    def range(self, x: Tensor, y: Tensor, value: float) -> None:
        super().range(x, y, value)
        in_bfloat16 = x.bfloat16(), y.bfloat16()
        super().range(*in_bfloat16, self._value(*in_bfloat16))

    def streamed(self, x: Tensor, y: Tensor, value: float) -> None:
        for sizes in ([7] * 8 + [5], [60, 1], [1, 30, 30]):
            metric = self._empty()
            for rows in torch.arange(len(x)).split(sizes):
                metric.update(x[rows], y[rows])
            _require_close(metric.compute(), value, 1e-8, f"streamed in batches of {sizes}")
        require_error(ValueError, self._empty().compute, "compute() without rows", self.metric.name)

    def moments(self, x: Tensor, y: Tensor, value: float) -> None:
        metric: Any = self.metric
        supported = isinstance(metric, MomentsMetric) and metric.statistic == "moments"
        skip_unless(supported, f"{metric.name} is not computed from Moments")
        from_moments = metric.from_moments(Moments(x.shape[1], y.shape[1]).update(x, y))
        _require_close(from_moments, value, 1e-8, "from Moments")

    def invariances(self, x: Tensor, y: Tensor, value: float) -> None:
        skip_unless(bool(self.metric.invariances), f"{self.metric.name} does not declare invariances")
        for invariance, seed in product(self.metric.invariances, (0, 1)):
            new_x, new_y = transform(x, invariance, seed), transform(y, invariance, seed)
            for side, sides in (("x", (new_x, y)), ("y", (x, new_y))):
                _require_close(self._value(*sides), value, 1e-7, f"with {side} transformed by {invariance}")

    def order(self) -> None:
        skip_unless(not self.metric.minibatched, f"{self.metric.name} depends on the order of minibatches")
        (x, y), numbers = self._sides(), torch.arange(_ROWS)
        shuffled = torch.randperm(_ROWS, generator=torch.Generator().manual_seed(2))
        some_x, some_y = x[numbers % 7], y[numbers * 3 % 11]  # few rows, repeated many times
        for sides in ((x, y), (some_x, y), (x, some_y), (some_x, some_y), (some_x, 2 * some_x)):
            original, reordered = (self._value_or_nan(*(side[rows] for side in sides)) for rows in (numbers, shuffled))
            zero = 1e-9 if self.metric.higher_is_better else 1e-7  # a distance is often the root of a difference
            _require_close(reordered, original, 1e-9, "of shuffled samples", zero)

    def repeated(self, x: Tensor, y: Tensor, value: float) -> None:
        skip_unless(not self.metric.counts_rows, f"{self.metric.name} declares that it depends on the number of rows")
        repeated_value = self._value(torch.cat([x, x]), torch.cat([y, y]))
        _require_close(repeated_value, value, 1e-8, "of each row twice (otherwise set counts_rows = True)")

    def dead(self) -> None:
        invariant = {"scaling", "translation"} <= {*self.metric.invariances}
        name = self.metric.name
        skip_unless(invariant, f"{name} depends on the mean or scale of rows, so that equal rows may be valid")
        x, y = self._sides()
        self._require_error("equal rows of x", x[:1].expand_as(x), y)
        self._require_error("equal rows of y", x, y[:1].expand_as(y))

    def _value_or_nan(self, x: Tensor, y: Tensor) -> float:
        """Return the value, or NaN if the metric raises a ``ValueError``."""
        try:
            return self._value(x, y)
        except ValueError:
            return math.nan

    def degenerate(self) -> None:
        x, y = self._sides()
        with_nan = x.clone()
        with_nan[3, 1] = math.nan
        self._require_error("fewer rows of y than of x", x, y[:-1])
        self._require_error("one row", x[:1], y[:1])
        self._require_error("NaN in x", with_nan, y)
        self._require_error("NaN in y", y, with_nan)
        self._require_error("integers", x.long(), y)
        self._require_error("complex numbers", x, y + 0j)
        self._require_error("a vector", x[:, 0], y)

    def _require_error(self, case: str, x: Tensor, y: Tensor) -> None:
        require_error(ValueError, lambda: self._call(x, y), case, self.metric.name)

    def too_few_rows(self) -> None:
        x, y = self._sides()
        min_rows = max(self.metric.min_rows("x", x.shape[1]), self.metric.min_rows("y", y.shape[1]))
        self._require_error(f"fewer rows than the {min_rows} declared", x[: min_rows - 1], y[: min_rows - 1])

    def unequal_widths(self) -> None:
        x, y = self._sides()
        skip_unless(self.metric.equal_widths, f"{self.metric.name} supports unequal widths")
        require_error(ValueError, lambda: self._call(x, y[:, :-1]), "unequal widths")

    def identity(self) -> None:
        x, y = self._sides()
        xx, xy = self._value(x, x), self._value(x, y)
        if self.metric.higher_is_better:
            require(xx >= xy, f"a similarity must be largest for equal sides, got {xx}, and {xy} for different sides")
        else:
            require(
                abs(xx) <= 1e-6 * xy, f"a distance must be 0 for equal sides, got {xx}, and {xy} for different sides"
            )

    def gradient(self) -> None:
        skip_unless(self.metric.differentiable, f"{self.metric.name} is not declared differentiable")
        for side in (0, 1):
            pair = [rows[:24].requires_grad_(position == side) for position, rows in enumerate(self._sides())]
            with torch.enable_grad():
                agrees = torch.autograd.gradcheck(self._call, pair, atol=1e-6, raise_exception=False)
            require(agrees, f"the gradient on {'xy'[side]} must agree with finite differences")


def _require_close(got: float, expected: float, tolerance: float, case: str, zero: float | None = None) -> None:
    undefined = math.isnan(got) and math.isnan(expected)
    close = undefined or math.isclose(got, expected, rel_tol=tolerance, abs_tol=zero or tolerance)
    require(close, f"the value {case} must be {expected!r} to {tolerance:g}, got {got!r}")


@conformance
def check_weight_metric(
    metric: str | type[WeightMetric] | WeightMetric, a: nn.Module, b: nn.Module, **options: Any
) -> _WeightMetricKit:
    """Check that a metric of weights satisfies the contract of ``WeightMetric``.

    The parts:

    - ``declarations``: range and direction are valid, and an unknown option raises a ``TypeError``.
    - ``reading``: ``read`` returns layers by name, without changing the network and without drawing random numbers. Its
      tensors are floating point, on the CPU, without gradients, and copies of the weights.
    - ``saved``: saved and loaded readings keep their order and give the same values.
    - ``comparable``: a layer of ``a`` is comparable with the layer of the same name in ``b``, ``combine`` returns a
      finite number, and ``NotComparable`` names a layer and a reason.
    - ``range``: values lie within the range.
    - ``symmetric``: swapped layers give the same value to 1e-9, if declared.
    - ``identity``: equal layers have the best value: 0 for a distance, the maximum over all layers for a similarity.
    - ``triangle``: the triangle inequality holds, if declared.
    - ``without_weights``: a network without weights raises a ``ValueError``.
    - ``not_finite``: NaN and infinite weights raise ``NotComparable``.

    Args:
        metric: Name in the registry of metrics, a class, or a metric.
        a: A network that the metric supports.
        b: A second network with at least one layer that is comparable with the layer of the same name in ``a``.
        **options: Options of the metric, if passed by name or class.

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
    return _WeightMetricKit(metric, options, a, b)


class _WeightMetricKit(_Values):
    _tolerance = 1e-9

    def __init__(self, entry: Any, options: dict[str, Any], *networks: nn.Module) -> None:
        self._entry, self._options, self.networks = entry, options, networks

    @cached_property
    def metric(self) -> WeightMetric:
        entry, options = self._entry, self._options
        metric: Any = entry(**options) if isinstance(entry, type) else registries.metrics.build(entry, **options)
        require(isinstance(metric, WeightMetric), f"{metric!r} must be a WeightMetric")
        return metric

    @cached_property
    def readings(self) -> list[dict[str, Weights]]:
        return list(map(self.metric.read, self.networks))

    @cached_property
    def layers(self) -> list[Weights]:
        """The layers of both networks."""
        return [weights for side in self.readings for weights in side.values()]

    @cached_property
    def table(self) -> list[list[float]]:
        return [[self._value(x, y) for y in self.layers] for x in self.layers]

    def _cases(self) -> Iterator[tuple[Weights, Weights, float]]:
        for x, y in product(*(side.values() for side in self.readings)):
            if not math.isnan(value := self._value(x, y)):
                yield x, y, value

    def _value(self, x: Weights, y: Weights) -> float:
        """Return the value of a pair of layers, or NaN if they are not comparable."""
        try:
            return self.metric.value(x, y)
        except NotComparable as error:
            require(bool(error.layer) and bool(error.why), "NotComparable must have a layer and a reason")
            return math.nan

    def reading(self) -> None:
        for network in (*self.networks, copy.deepcopy(self.networks[0]).double()):  # float64 is not converted
            self._require_copies(copy.deepcopy(network))

    def _require_copies(self, model: nn.Module) -> None:
        message = "read must return copies: changing them changed the network"
        with unchanged(message, lambda: model.state_dict().values()):
            with unchanged("read must not draw random numbers"):
                reading = self.metric.read(model)
            require(bool(reading), "read must return at least one layer, or raise a ValueError")
            for layer, weights in reading.items():
                require(weights.layer == layer, f"Weights must have the layer {layer!r}, got {weights.layer!r}")
                for name, tensor in weights.tensors.items():
                    label = f"tensor {name!r} of layer {layer!r}"
                    require(tensor.is_floating_point(), f"{label} must be floating point, got {tensor.dtype}")
                    is_detached = tensor.device.type == "cpu" and not tensor.requires_grad
                    require(is_detached, f"{label} must be detached, on the CPU")
                    tensor.add_(1)  # a view would change the network

    def saved(self) -> None:
        a, _ = self.readings
        with TemporaryDirectory() as folder:
            save_weights(a, Path(folder) / "a.safetensors", self.metric.name)
            loaded = load_weights(Path(folder) / "a.safetensors", self.metric.name)
        require(list(loaded) == list(a), "saved readings must keep the order of layers")
        for x, y, value in self._cases():
            require(value == self._value(loaded[x.layer], y), "saved readings must have equal values")

    def comparable(self) -> None:
        values_by_layer = {x.layer: value for x, y, value in self._cases() if x.layer == y.layer}
        require(bool(values_by_layer), "a layer of a must be comparable with the layer of the same name in b")
        require(math.isfinite(self.metric.combine(values_by_layer)), "combine must return a finite number")

    def identity(self) -> None:
        for i, row in enumerate(self.table):
            name, finite_values = repr(self.layers[i].layer), [value for value in row if not math.isnan(value)]
            require(not math.isnan(row[i]), f"equal layers {name} must be comparable")
            best = max(finite_values) if self.metric.higher_is_better else min(finite_values)
            require(abs(row[i] - best) <= 1e-6, f"equal layers {name} must have the best value, {best}, got {row[i]}")
            if not self.metric.higher_is_better:
                tolerance = 1e-6 * max(1, *finite_values)
                require(abs(row[i]) <= tolerance, f"the distance of equal layers must be 0, got {row[i]}")

    def without_weights(self) -> None:
        empty = nn.Sequential(nn.Identity())
        require_error(ValueError, lambda: self.metric.read(empty), "a network without weights")

    def not_finite(self) -> None:
        first = self.layers[0]
        with_nan = copy.deepcopy(first)
        for tensor in with_nan.tensors.values():
            tensor.fill_(math.nan)
        require_error(NotComparable, lambda: self.metric.value(first, with_nan), "NaN weights")
