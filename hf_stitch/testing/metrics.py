"""Conformance check for metrics of activations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hf_stitch.metrics.base import ActivationMetric, Metric, MomentsMetric, activation_metric
from hf_stitch.statistics import Moments
from hf_stitch.testing._moved import moved
from hf_stitch.testing._require import require, require_error

_ROWS = 61
_STATISTICS = ("moments", "debiased", "grams", "features", "outputs")
_INVARIANCES = ("orthogonal", "scaling", "invertible", "permutation", "translation")


def check_metric(metric: str | type[Metric] | Metric, **options: Any) -> None:
    """Check that a metric of activations satisfies the contract of ``ActivationMetric``.

    The metric has all declarations. Arrays give a float and tensors (including bfloat16) a 0-d float64 tensor, within
    its range. It draws no random numbers and does not modify the rows. Streamed in any batches, and from ``Moments`` if
    supported, it gives the value of all rows at once, to 1e-8. Declared symmetry and invariances hold to 1e-7. The
    distance between equal sides is 0 to 1e-6 of other distances, and satisfies the triangle inequality if declared.
    Gradients agree with finite differences if the metric is differentiable. Degenerate rows, and fewer rows than
    declared, raise an error that names the metric.

    Args:
        metric: Name in the registry of metrics, a class, or a metric with options, which is not modified.
        **options: Options of the metric, if given by name or class.

    Raises:
        AssertionError: The contract is violated; the message names the violation.

    Example:
        >>> from hf_stitch.metrics._procrustes import Procrustes
        >>> check_metric(Procrustes, unit_norm=False)
    """
    built = activation_metric(metric(**options)) if isinstance(metric, type) else activation_metric(metric, **options)
    _check_declared(built)
    for dx, dy in ((5, 5),) if built.equal_widths else ((5, 5), (6, 4), (4, 6)):
        x, y = _rows(built, dx, 1), _rows(built, dy, 2)
        value = _check_value(built, x, y)
        _check_streamed(built, x, y, value)
        _check_unchanged(built, x, y, value)
    x, y, z = (_rows(built, 5, seed) for seed in (1, 2, 3))
    _check_degenerate(built, x, y)
    if not built.higher_is_better:
        _check_distance(built, x, y, z)
    if built.differentiable:
        _check_gradient(built, x[:24], y[:24])


def _rows(metric: ActivationMetric, width: int, seed: int) -> Tensor:
    """Float64 rows with a common part for all seeds, and means several standard deviations from 0.

    A metric of outputs gets probabilities, which are also valid logits.
    """
    shared = torch.randn(_ROWS, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    mixing, noise, mean = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((3, width), (_ROWS, width), (width,))
    )
    rows = shared @ mixing + 0.7 * noise + 3 * mean
    return (rows / 5).softmax(1) if metric.statistic == "outputs" else rows


def _labels(metric: ActivationMetric, rows: int) -> dict[str, Tensor]:
    return {"labels": torch.arange(rows) % 4} if metric.labelled else {}


def _value(metric: ActivationMetric, x: Tensor, y: Tensor) -> Tensor:
    value: Tensor = type(metric).function(x, y, **metric.options, **_labels(metric, len(x)))
    return value


def _twin(metric: ActivationMetric) -> ActivationMetric:
    return type(metric)(**metric.options)


def _check_declared(metric: ActivationMetric) -> None:
    require(metric.function.__name__ == metric.name, f"function must be named {metric.name!r} like the metric")
    require(metric.statistic in _STATISTICS, f"statistic must be one of {_STATISTICS}, got {metric.statistic!r}")
    low, high = metric.range
    require(low < high, f"range must be (smallest, largest), got {metric.range}")
    unknown = set(metric.invariances) - set(_INVARIANCES)
    require(not unknown, f"invariances must be among {_INVARIANCES}, got {sorted(unknown)}")
    require(
        not metric.higher_is_better or not metric.triangle_inequality,
        "triangle_inequality needs higher_is_better=False",
    )
    require_error(TypeError, lambda: type(metric)(no_such_option=1), "an unknown option")


def _check_value(metric: ActivationMetric, x: Tensor, y: Tensor) -> float:
    random_state, before = torch.get_rng_state(), (x.clone(), y.clone())
    value = _value(metric, x, y)
    require(torch.equal(torch.get_rng_state(), random_state), "a metric must draw no random numbers")
    require(torch.equal(x, before[0]) and torch.equal(y, before[1]), "a metric must not modify the rows")
    require(
        value.shape == () and value.dtype == torch.float64, f"tensors must give a 0-d float64 tensor, gave {value!r}"
    )
    labels = {key: part.numpy() for key, part in _labels(metric, len(x)).items()}
    of_arrays = type(metric).function(x.numpy(), y.numpy(), **metric.options, **labels)
    require(type(of_arrays) is float, f"arrays must give a float, gave {type(of_arrays).__name__}")
    _require_close(of_arrays, value.item(), 1e-12, "of arrays")
    coarse = _value(metric, x.bfloat16(), y.bfloat16())
    _require_close(
        coarse.item(), _value(metric, x.bfloat16().double(), y.bfloat16().double()).item(), 1e-12, "of bfloat16"
    )
    for what, number in (("", value.item()), (" of bfloat16 rows", coarse.item())):
        low, high = metric.range
        require(
            low - 1e-12 <= number <= high + 1e-12, f"the value {number}{what} lies outside the range {metric.range}"
        )
    if metric.symmetric:
        _require_close(_value(metric, y, x).item(), value.item(), 1e-7, "with the sides exchanged")
    return value.item()


def _check_streamed(metric: ActivationMetric, x: Tensor, y: Tensor, value: float) -> None:
    labels = _labels(metric, len(x))
    for sizes in ([7] * 8 + [5], [60, 1], [1, 30, 30]):
        streamed = _twin(metric)
        for rows in torch.arange(len(x)).split(sizes):
            streamed.update(x[rows], y[rows], **{key: part[rows] for key, part in labels.items()})
        _require_close(streamed.compute(), value, 1e-8, f"streamed in batches of {sizes}")
    message = require_error(ValueError, _twin(metric).compute, "computing without rows")
    require(metric.name in message, f"an error must name {metric.name}: {message}")
    if isinstance(metric, MomentsMetric) and metric.statistic == "moments":
        from_moments = metric.from_moments(Moments(x.shape[1], y.shape[1]).update(x, y))
        _require_close(from_moments, value, 1e-8, "from Moments")


def _check_unchanged(metric: ActivationMetric, x: Tensor, y: Tensor, value: float) -> None:
    for invariance in metric.invariances:
        for seed in range(2):
            _require_close(
                _value(metric, moved(x, invariance, seed), y).item(), value, 1e-7, f"x put through {invariance}"
            )
            _require_close(
                _value(metric, x, moved(y, invariance, seed)).item(), value, 1e-7, f"y put through {invariance}"
            )


def _check_degenerate(metric: ActivationMetric, x: Tensor, y: Tensor) -> None:
    with_nan = x.clone()
    with_nan[3, 1] = math.nan
    cases = {
        "fewer rows of y than of x": (x, y[:-1]),
        "one row": (x[:1], y[:1]),
        "NaN in x": (with_nan, y),
        "NaN in y": (y, with_nan),
        "integers": (x.long(), y),
        "complex numbers": (x, y + 0j),
        "a vector": (x[:, 0], y),
    }
    for what, (bad_x, bad_y) in cases.items():
        message = require_error(ValueError, lambda a=bad_x, b=bad_y: _value(metric, a, b), what)  # type: ignore[misc]
        require(metric.name in message, f"the error on {what} must name {metric.name}: {message}")
    if metric.equal_widths:
        require_error(ValueError, lambda: _value(metric, x, y[:, :-1]), "unequal widths")
    least = max(metric.min_rows("x", x.shape[1]), metric.min_rows("y", y.shape[1]))
    few = slice(least - 1)
    message = require_error(ValueError, lambda: _value(metric, x[few], y[few]), f"fewer rows than the {least} declared")
    require(metric.name in message, f"the error on too few rows must name {metric.name}: {message}")


def _check_distance(metric: ActivationMetric, x: Tensor, y: Tensor, z: Tensor) -> None:
    xx, xy, yz, xz = (_value(metric, *pair).item() for pair in ((x, x), (x, y), (y, z), (x, z)))
    require(abs(xx) <= 1e-6 * xy, f"a distance must be 0 for equal sides, got {xx} compared with {xy} for others")
    if metric.triangle_inequality:
        holds = max(xy, yz, xz) <= sum((xy, yz, xz)) / 2 + 1e-9
        require(holds, f"the triangle inequality must hold, got distances {xy}, {yz} and {xz}")


def _check_gradient(metric: ActivationMetric, x: Tensor, y: Tensor) -> None:
    for side in (0, 1):
        pair = [x.clone(), y.clone()]
        pair[side].requires_grad_()
        with torch.enable_grad():
            agrees = torch.autograd.gradcheck(
                lambda *rows: _value(metric, *rows), pair, atol=1e-6, raise_exception=False
            )
        require(agrees, f"the gradient on {'xy'[side]} must agree with finite differences")


def _require_close(got: float, expected: float, tolerance: float, what: str) -> None:
    close = math.isclose(got, expected, rel_tol=tolerance, abs_tol=tolerance)
    require(close, f"the value {what} is {got!r}, which should be {expected!r} to {tolerance:g}")
