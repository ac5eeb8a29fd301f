"""Conformance check for metrics of activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from hf_stitch.metrics.base import ActivationMetric, Metric, MomentsMetric, activation_metric
from hf_stitch.statistics import Moments
from hf_stitch.testing._moved import moved
from hf_stitch.testing._require import require, require_error, skip_unless
from hf_stitch.testing.conformance import conformance

_ROWS = 61
_STATISTICS = ("moments", "debiased", "grams", "features", "outputs")
_INVARIANCES = ("orthogonal", "scaling", "invertible", "permutation", "translation")


@conformance
def check_metric(metric: str | type[Metric] | Metric, **options: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    """Check that a metric of activations satisfies the contract of ``ActivationMetric``.

    The parts, each for rows of equal widths and, if the metric takes them, of unequal ones:

    - ``declarations``: its name is that of its function; statistic, range and invariances are valid; an unknown option
      raises a ``TypeError``.
    - ``pure``: it draws no random numbers and does not modify the rows.
    - ``types``: arrays give a float, tensors a 0-d float64 tensor of the same value; bfloat16 is converted first.
    - ``range``: values lie within its range, those of bfloat16 rows too.
    - ``symmetric``: exchanged sides give the same value to 1e-7, if declared.
    - ``streamed``: streamed in any batches, it gives the value of all rows at once, to 1e-8. Without rows it raises an
      error that names it.
    - ``moments``: so it does from ``Moments``, if it is computed from them.
    - ``invariances``: those that it declares hold on either side to 1e-7.
    - ``degenerate``: NaN, a single row, sides of different lengths, integers, complex numbers and vectors raise an
      error that names it.
    - ``too_few_rows``: so do fewer rows than it declares.
    - ``unequal_widths``: they raise an error if it declares that it needs equal ones.
    - ``identity``: the distance between equal sides is 0 to 1e-6 of other distances, if it is a distance.
    - ``triangle``: distances satisfy the triangle inequality, if declared.
    - ``gradient``: gradients agree with finite differences, if it is declared differentiable.

    Args:
        metric: Name in the registry of metrics, a class, or a metric with options, which is not modified.
        **options: Options of the metric, if given by name or class.

    Raises:
        AssertionError: The contract is violated; the message names the violation.

    Example:
        >>> from hf_stitch.metrics._procrustes import Procrustes
        >>> check_metric(Procrustes, unit_norm=False)
    """

    @cache
    def built() -> ActivationMetric:
        if isinstance(metric, type):
            return activation_metric(metric(**options))
        return activation_metric(metric, **options)

    @cache
    def compared() -> list[tuple[Tensor, Tensor, float]]:
        """Pairs of sides with the value of the metric."""
        widths = ((5, 5),) if built().equal_widths else ((5, 5), (6, 4), (4, 6))
        pairs = [(_rows(built(), dx, 1), _rows(built(), dy, 2)) for dx, dy in widths]
        return [(x, y, float(_value(built(), x.clone(), y.clone()))) for x, y in pairs]

    def of_pairs(check: Callable[[ActivationMetric, Tensor, Tensor, float], None]) -> Callable[[], None]:
        def run() -> None:
            for x, y, value in compared():
                check(built(), x.clone(), y.clone(), value)

        return run

    def of_rows(check: Callable[..., None], count: int) -> Callable[[], None]:
        return lambda: check(built(), *(_rows(built(), 5, 1 + seed) for seed in range(count)))

    yield "declarations", lambda: _check_declared(built())
    yield "pure", of_pairs(_check_pure)
    yield "types", of_pairs(_check_types)
    yield "range", of_pairs(_check_range)
    yield "symmetric", of_pairs(_check_symmetric)
    yield "streamed", of_pairs(_check_streamed)
    yield "moments", of_pairs(_check_moments)
    yield "invariances", of_pairs(_check_unchanged)
    yield "degenerate", of_rows(_check_degenerate, 2)
    yield "too_few_rows", of_rows(_check_few_rows, 2)
    yield "unequal_widths", of_rows(_check_widths, 2)
    yield "identity", of_rows(_check_identity, 2)
    yield "triangle", of_rows(_check_triangle, 3)
    yield "gradient", of_rows(_check_gradient, 2)


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


def _value(metric: ActivationMetric, x: Tensor, y: Tensor) -> Tensor:
    value: Tensor = type(metric).function(x, y, **metric.options)
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


def _check_pure(metric: ActivationMetric, x: Tensor, y: Tensor, value: float) -> None:
    random_state, before = torch.get_rng_state(), (x.clone(), y.clone())
    _value(metric, x, y)
    require(torch.equal(torch.get_rng_state(), random_state), "a metric must draw no random numbers")
    require(torch.equal(x, before[0]) and torch.equal(y, before[1]), "a metric must not modify the rows")


def _check_types(metric: ActivationMetric, x: Tensor, y: Tensor, value: float) -> None:
    of_tensors = _value(metric, x.clone(), y.clone())
    right = of_tensors.shape == () and of_tensors.dtype == torch.float64
    require(right, f"tensors must give a 0-d float64 tensor, gave {of_tensors!r}")
    of_arrays = type(metric).function(x.numpy(), y.numpy(), **metric.options)
    require(type(of_arrays) is float, f"arrays must give a float, gave {type(of_arrays).__name__}")
    _require_close(of_arrays, value, 1e-12, "of arrays")
    narrow = x.bfloat16(), y.bfloat16()
    wide = _value(metric, narrow[0].double(), narrow[1].double())
    _require_close(_value(metric, *narrow).item(), wide.item(), 1e-12, "of bfloat16")


def _check_range(metric: ActivationMetric, x: Tensor, y: Tensor, value: float) -> None:
    low, high = metric.range
    of_narrow = _value(metric, x.bfloat16(), y.bfloat16()).item()
    for what, number in (("", value), (" of bfloat16 rows", of_narrow)):
        inside = low - 1e-12 <= number <= high + 1e-12
        require(inside, f"the value {number}{what} lies outside the range {metric.range}")


def _check_symmetric(metric: ActivationMetric, x: Tensor, y: Tensor, value: float) -> None:
    skip_unless(metric.symmetric, f"{metric.name} does not declare symmetry")
    _require_close(_value(metric, y, x).item(), value, 1e-7, "with the sides exchanged")


def _check_streamed(metric: ActivationMetric, x: Tensor, y: Tensor, value: float) -> None:
    for sizes in ([7] * 8 + [5], [60, 1], [1, 30, 30]):
        streamed = _twin(metric)
        for rows in torch.arange(len(x)).split(sizes):
            streamed.update(x[rows], y[rows])
        _require_close(streamed.compute(), value, 1e-8, f"streamed in batches of {sizes}")
    message = require_error(ValueError, _twin(metric).compute, "computing without rows")
    require(metric.name in message, f"an error must name {metric.name}: {message}")


def _check_moments(metric: ActivationMetric, x: Tensor, y: Tensor, value: float) -> None:
    supported = isinstance(metric, MomentsMetric) and metric.statistic == "moments"
    skip_unless(supported, f"{metric.name} is not computed from Moments")
    assert isinstance(metric, MomentsMetric)
    from_moments = metric.from_moments(Moments(x.shape[1], y.shape[1]).update(x, y))
    _require_close(from_moments, value, 1e-8, "from Moments")


def _check_unchanged(metric: ActivationMetric, x: Tensor, y: Tensor, value: float) -> None:
    skip_unless(bool(metric.invariances), f"{metric.name} declares no invariances")
    for invariance in metric.invariances:
        for seed in range(2):
            of_x = _value(metric, moved(x, invariance, seed), y)
            _require_close(of_x.item(), value, 1e-7, f"x put through {invariance}")
            of_y = _value(metric, x, moved(y, invariance, seed))
            _require_close(of_y.item(), value, 1e-7, f"y put through {invariance}")


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
    for what, sides in cases.items():
        message = require_error(ValueError, partial(_value, metric, *sides), what)
        require(metric.name in message, f"the error on {what} must name {metric.name}: {message}")


def _check_few_rows(metric: ActivationMetric, x: Tensor, y: Tensor) -> None:
    least = max(metric.min_rows("x", x.shape[1]), metric.min_rows("y", y.shape[1]))
    few = slice(least - 1)
    message = require_error(ValueError, lambda: _value(metric, x[few], y[few]), f"fewer rows than the {least} declared")
    require(metric.name in message, f"the error on too few rows must name {metric.name}: {message}")


def _check_widths(metric: ActivationMetric, x: Tensor, y: Tensor) -> None:
    skip_unless(metric.equal_widths, f"{metric.name} takes unequal widths")
    require_error(ValueError, lambda: _value(metric, x, y[:, :-1]), "unequal widths")


def _check_identity(metric: ActivationMetric, x: Tensor, y: Tensor) -> None:
    skip_unless(not metric.higher_is_better, f"{metric.name} is a similarity, not a distance")
    xx, xy = _value(metric, x, x).item(), _value(metric, x, y).item()
    require(abs(xx) <= 1e-6 * xy, f"a distance must be 0 for equal sides, got {xx} compared with {xy} for others")


def _check_triangle(metric: ActivationMetric, x: Tensor, y: Tensor, z: Tensor) -> None:
    skip_unless(metric.triangle_inequality, f"{metric.name} does not declare the triangle inequality")
    xy, yz, xz = (_value(metric, *pair).item() for pair in ((x, y), (y, z), (x, z)))
    holds = max(xy, yz, xz) <= sum((xy, yz, xz)) / 2 + 1e-9
    require(holds, f"the triangle inequality must hold, got distances {xy}, {yz} and {xz}")


def _check_gradient(metric: ActivationMetric, x: Tensor, y: Tensor) -> None:
    skip_unless(metric.differentiable, f"{metric.name} is not declared differentiable")
    for side in (0, 1):
        pair = [x[:24].clone(), y[:24].clone()]
        pair[side].requires_grad_()
        with torch.enable_grad():
            agrees = torch.autograd.gradcheck(
                lambda *rows: _value(metric, *rows), pair, atol=1e-6, raise_exception=False
            )
        require(agrees, f"the gradient on {'xy'[side]} must agree with finite differences")


def _require_close(got: float, expected: float, tolerance: float, what: str) -> None:
    close = math.isclose(got, expected, rel_tol=tolerance, abs_tol=tolerance)
    require(close, f"the value {what} is {got!r}, which should be {expected!r} to {tolerance:g}")
