"""Metrics that break one promise fail the part that checks it, and no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from failing_parts import assert_fails_only, failing, names
from torch import Tensor, nn

from hf_stitch.metrics import FeaturesMetric, MomentsMetric, NotComparable, WeightMetric, of_rows
from hf_stitch.statistics import Moments, Weights
from hf_stitch.testing import check_metric, check_weight_metric


@of_rows
def mean_gap(x: Tensor, y: Tensor) -> Tensor:
    if x.shape[1] != y.shape[1]:
        raise ValueError("mean_gap needs equal widths")
    return (x.mean(0) - y.mean(0)).norm()


class MeanGap(MomentsMetric):
    """The distance of the means, which conforms."""

    name = "mean_gap"
    function = staticmethod(mean_gap)
    formula = staticmethod(lambda moments: (moments.mean_x - moments.mean_y).norm())
    higher_is_better = False
    triangle_inequality = True
    differentiable = True
    symmetric = True
    range = (0.0, float("inf"))
    equal_widths = True


def changed(change: Callable[[Callable[..., Any], Any, Any], Any]) -> Any:
    """The function of the metric with a defect."""

    def function(x: Any, y: Any) -> Any:
        return change(mean_gap, x, y)

    function.__name__ = "mean_gap"
    return staticmethod(function)


def in_place(function: Callable[..., Any], x: Any, y: Any) -> Any:
    value = function(x, y)
    if isinstance(x, Tensor) and not x.requires_grad and not y.requires_grad:
        x.copy_(x.flip(0))  # which leaves the mean as it is, nearly
    return value


def of_integers(function: Callable[..., Any], x: Any, y: Any) -> Any:
    return function(x.double() if isinstance(x, Tensor) and x.dtype == torch.int64 else x, y)


def without_gradient(function: Callable[..., Any], x: Any, y: Any) -> Any:
    return function(x, y) if not isinstance(x, Tensor) else function(x, y.detach())


def of_float32(function: Callable[..., Any], x: Any, y: Any) -> Any:
    value = function(x, y)
    return value[None] if isinstance(value, Tensor) else value


def of_any_widths(function: Callable[..., Any], x: Any, y: Any) -> Any:
    width = min(x.shape[-1], y.shape[-1]) if x.ndim == y.ndim == 2 else 1
    return function(x[:, :width], y[:, :width]) if x.ndim == 2 else function(x, y)


class Streamed(FeaturesMetric):
    """The same, from all rows, with a defect when it is streamed."""

    name, higher_is_better, range, equal_widths = "mean_gap", False, (0.0, float("inf")), True
    function = staticmethod(mean_gap)
    symmetric = True

    def update(self, x: Tensor, y: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(x, y + (len(x) == 1), *args, **kwargs)


@of_rows
def squared_gap(x: Tensor, y: Tensor) -> Tensor:
    if x.shape[1] != y.shape[1]:
        raise ValueError("squared_gap needs equal widths")
    return (x.mean(0) - y.mean(0)).square().sum() ** 4


class SquaredGap(MeanGap):
    """No distance: a power of one."""

    name = "squared_gap"
    function = staticmethod(squared_gap)
    formula = staticmethod(lambda moments: (moments.mean_x - moments.mean_y).square().sum() ** 4)
    differentiable = False


@of_rows
def shifted_gap(x: Tensor, y: Tensor) -> Tensor:
    if x.shape[1] != y.shape[1]:
        raise ValueError("shifted_gap needs equal widths")
    return 1 + (x.mean(0) - y.mean(0)).norm()


class ShiftedGap(MeanGap):
    """At least 1, for equal sides, too."""

    name = "shifted_gap"
    function = staticmethod(shifted_gap)
    formula = staticmethod(lambda moments: 1 + (moments.mean_x - moments.mean_y).norm())
    differentiable = False


@of_rows
def first_gap(x: Tensor, y: Tensor) -> Tensor:
    if x.shape[1] != y.shape[1]:
        raise ValueError("first_gap needs equal widths")
    return (x.mean(0) - y.mean(0)).norm() * (1 + x.mean(0).norm())


class FirstGap(MeanGap):
    """The sides do not count alike."""

    name = "first_gap"
    function = staticmethod(first_gap)
    formula = staticmethod(lambda moments: (moments.mean_x - moments.mean_y).norm() * (1 + moments.mean_x.norm()))
    triangle_inequality = False


class WrongMoments(MeanGap):
    def from_moments(self, moments: Moments) -> float:
        return 2 * super().from_moments(moments)

    def compute(self) -> float:
        return super().compute() / 2


BROKEN: dict[str, tuple[type[MomentsMetric | FeaturesMetric], dict[str, Any], str]] = {
    "declarations": (MeanGap, {"statistic": "debiased_moments"}, "statistic must be one of"),
    "pure": (MeanGap, {"function": changed(in_place)}, "must not modify the rows"),
    "types": (MeanGap, {"function": changed(of_float32)}, "0-d float64"),
    "range": (MeanGap, {"range": (0.0, 1e-3)}, "outside the range"),
    "symmetric": (FirstGap, {}, "with the sides exchanged"),
    "streamed": (Streamed, {}, "streamed in batches"),
    "moments": (WrongMoments, {}, "from Moments"),
    "invariances": (MeanGap, {"invariances": ("scaling",)}, "x put through scaling"),
    "degenerate": (MeanGap, {"function": changed(of_integers)}, "integers must raise ValueError"),
    "too_few_rows": (MeanGap, {"min_rows": lambda self, side, width: 9}, "fewer rows than the 9 declared must raise"),
    "unequal_widths": (MeanGap, {"function": changed(of_any_widths)}, "unequal widths must raise ValueError"),
    "identity": (ShiftedGap, {}, "must be 0 for equal sides"),
    "triangle": (SquaredGap, {}, "triangle inequality must hold"),
    "gradient": (MeanGap, {"function": changed(without_gradient)}, "the gradient on y"),
}


def test_what_the_defects_are_added_to_conforms() -> None:
    assert failing(check_metric, MeanGap) == {}


@pytest.mark.parametrize("part", BROKEN)
def test_a_metric_fails_only_the_part_that_it_violates(part: str) -> None:
    kind, defect, message = BROKEN[part]
    assert_fails_only(part, message, check_metric, type("Broken", (kind,), defect))


def test_every_part_can_fail() -> None:
    assert set(BROKEN) == names(check_metric, MeanGap)


class Angle(WeightMetric):
    """The angle between weights, which conforms."""

    name, title = "angle", "angle of weights"
    higher_is_better, triangle_inequality, symmetric, range = False, True, True, (0.0, 3.15)

    @staticmethod
    def function(x: Weights, y: Weights) -> float:
        a, b = x.tensors["weight"].double().flatten(), y.tensors["weight"].double().flatten()
        if a.shape != b.shape:
            raise NotComparable(x.layer, "shapes differ")
        a, b = a / a.norm(), b / b.norm()
        return float(2 * torch.atan2((a - b).norm(), (a + b).norm()))

    def read(self, model: nn.Module) -> dict[str, Weights]:
        layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        if not layers:
            raise ValueError("angle reads linear layers")
        return {name: Weights(name, {"weight": each.weight.detach().clone()}) for name, each in layers.items()}


class Views(Angle):
    def read(self, model: nn.Module) -> dict[str, Weights]:
        return {
            name: Weights(name, {"weight": module.weight.detach()})
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
        } or super().read(model)


class Tagged(Angle):
    """Readings hold what files do not keep."""

    def read(self, model: nn.Module) -> dict[str, Weights]:
        read = super().read(model)
        for each in read.values():
            object.__setattr__(each, "tag", True)
        return read

    def value(self, x: Weights, y: Weights) -> float:
        return super().value(x, y) * (1 if hasattr(x, "tag") else 0.5)


class Apart(Angle):
    """Layers of the same name are never compared, unless they are the same."""

    def combine(self, values: Any) -> float:
        return float("nan")


class Directed(Angle):
    triangle_inequality = False

    def value(self, x: Weights, y: Weights) -> float:
        return super().value(x, y) * (0.5 if x.tensors["weight"].sum() > y.tensors["weight"].sum() else 1)


class Shifted(Angle):
    range = (0.0, 9.0)

    def value(self, x: Weights, y: Weights) -> float:
        return super().value(x, y) + 1


class Power(Angle):
    range = (0.0, 1e9)

    def value(self, x: Weights, y: Weights) -> float:
        return super().value(x, y) ** 9


class Empty(Angle):
    def read(self, model: nn.Module) -> dict[str, Weights]:
        try:
            return super().read(model)
        except ValueError:
            return {}


class Tolerant(Angle):
    def value(self, x: Weights, y: Weights) -> float:
        if not y.tensors["weight"].isfinite().all():
            return 1.0
        return super().value(x, y)


BROKEN_WEIGHTS: dict[str, tuple[type[Angle], dict[str, Any], str]] = {
    "declarations": (
        Angle,
        {"__init__": lambda self, **options: WeightMetric.__init__(self)},
        "an unknown option must raise TypeError",
    ),
    "reading": (Views, {}, "must be copies"),
    "saved": (Tagged, {}, "saved readings change the value"),
    "comparable": (Apart, {}, "combine must return a finite number"),
    "range": (Angle, {"range": (0.0, 0.1)}, "is outside of"),
    "symmetric": (Directed, {}, "v."),
    "identity": (Shifted, {}, "the distance of a layer from itself is 1"),
    "triangle": (Power, {}, "the triangle inequality does not hold"),
    "without_weights": (Empty, {}, "a network without weights must raise ValueError"),
    "not_finite": (Tolerant, {}, "weights that are not finite must raise NotComparable"),
}


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 4))


@pytest.mark.parametrize("part", BROKEN_WEIGHTS)
def test_a_metric_of_weights_fails_only_the_part_that_it_violates(part: str) -> None:
    kind, defect, message = BROKEN_WEIGHTS[part]
    assert failing(check_weight_metric, Angle, network(0), network(1)) == {}
    assert_fails_only(part, message, check_weight_metric, type("Broken", (kind,), defect), network(0), network(1))


def test_every_part_of_a_metric_of_weights_can_fail() -> None:
    assert set(BROKEN_WEIGHTS) == names(check_weight_metric, Angle, network(0), network(1))
