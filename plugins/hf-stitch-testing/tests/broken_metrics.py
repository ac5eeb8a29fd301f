"""Metrics and detectors with one defect each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from broken import Broken, WithDefect
from hf_stitch_testing import check_detector, check_metric, check_weight_metric
from torch import Tensor, nn

from hf_stitch.detectors import Detector, Scorer
from hf_stitch.metrics import FeaturesMetric, MomentsMetric, NotComparable, WeightMetric, of_rows
from hf_stitch.registry import registries
from hf_stitch.representation import Representation
from hf_stitch.statistics import Weights

Formula = Callable[[Tensor, Tensor], Tensor]


def of_means(formula: Formula) -> dict[str, Any]:
    """A function of the means of both sides, as a metric has it for rows and for moments."""

    @of_rows
    def mean_gap(x: Tensor, y: Tensor) -> Tensor:
        if x.shape[1] != y.shape[1]:
            raise ValueError("mean_gap needs equal widths")
        return formula(x.mean(0), y.mean(0))

    of_moments = staticmethod(lambda moments: formula(moments.mean_x, moments.mean_y))
    return {"function": staticmethod(mean_gap), "formula": of_moments}


class MeanGap(MomentsMetric):
    """The distance of the means, which conforms."""

    name, range = "mean_gap", (0.0, float("inf"))
    higher_is_better = False
    triangle_inequality = differentiable = symmetric = equal_widths = True
    locals().update(of_means(lambda x, y: (x - y).norm()))


def changed(change: Callable[[Callable[..., Any], Any, Any], Any]) -> dict[str, Any]:
    """The function of the metric with a defect."""

    def mean_gap(x: Any, y: Any) -> Any:
        return change(MeanGap.function, x, y)

    return {"function": staticmethod(mean_gap)}


def in_place(function: Callable[..., Any], x: Any, y: Any) -> Any:
    value = function(x, y)
    if isinstance(x, Tensor) and not x.requires_grad and not y.requires_grad:
        x.copy_(x.flip(0))  # which leaves the mean as it is, nearly
    return value


def of_integers(function: Callable[..., Any], x: Any, y: Any) -> Any:
    return function(x.double() if isinstance(x, Tensor) and x.dtype == torch.int64 else x, y)


def without_gradient(function: Callable[..., Any], x: Any, y: Any) -> Any:
    return function(x, y) if not isinstance(x, Tensor) else function(x, y.detach())


def of_shape_1(function: Callable[..., Any], x: Any, y: Any) -> Any:
    value = function(x, y)
    return value[None] if isinstance(value, Tensor) else value


def of_any_widths(function: Callable[..., Any], x: Any, y: Any) -> Any:
    width = min(x.shape[-1], y.shape[-1]) if x.ndim == y.ndim == 2 else 1
    return function(x[:, :width], y[:, :width]) if x.ndim == 2 else function(x, y)


class OfRows(FeaturesMetric):
    """The same, from all rows."""

    name, higher_is_better, range, equal_widths = "mean_gap", False, (0.0, float("inf")), True
    function = MeanGap.__dict__["function"]
    symmetric = True


def of_gaps(formula: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The length of what a formula makes of the differences of the rows."""

    @of_rows
    def mean_gap(x: Tensor, y: Tensor) -> Tensor:
        if x.shape[1] != y.shape[1]:
            raise ValueError("mean_gap needs equal widths")
        return formula(x - y).norm()

    return {"function": staticmethod(mean_gap)}


class Streamed(OfRows):
    """A defect when it is streamed."""

    def update(self, x: Tensor, y: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(x, y + (len(x) == 1), *args, **kwargs)


WRONG_MOMENTS = {
    "from_moments": lambda self, moments: 2 * MomentsMetric.from_moments(self, moments),
    "compute": lambda self: MomentsMetric.compute(self) / 2,
}
METRICS: dict[str, tuple[type[MomentsMetric | FeaturesMetric], dict[str, Any], str]] = {
    "declarations": (MeanGap, {"statistic": "debiased_moments"}, "statistic must be one of"),
    "pure": (MeanGap, changed(in_place), "must not modify the rows"),
    "types": (MeanGap, changed(of_shape_1), "0-d float64"),
    "range": (MeanGap, {"range": (0.0, 1e-3)}, "must lie in the range"),
    "symmetric": (
        MeanGap,
        {"triangle_inequality": False, **of_means(lambda x, y: (x - y).norm() * (1 + x.norm()))},
        "with swapped sides",
    ),
    "streamed": (Streamed, {}, "streamed in batches"),
    "moments": (MeanGap, WRONG_MOMENTS, "from Moments"),
    "invariances": (MeanGap, {"invariances": ("scaling",)}, "x transformed by scaling"),
    "order": (OfRows, of_gaps(lambda gaps: gaps[0]), "of shuffled samples"),
    "repeated": (OfRows, of_gaps(lambda gaps: gaps.sum(0)), "of each row twice"),
    "dead": (
        OfRows,
        {"invariances": ("scaling", "translation"), **of_gaps(lambda gaps: gaps[0] * 0)},
        "equal rows of x must raise",
    ),
    "degenerate": (MeanGap, changed(of_integers), "integers must raise ValueError"),
    "too_few_rows": (MeanGap, {"min_rows": lambda self, side, width: 9}, "fewer rows than the 9 declared must raise"),
    "unequal_widths": (MeanGap, changed(of_any_widths), "unequal widths must raise ValueError"),
    "identity": (MeanGap, of_means(lambda x, y: 1 + (x - y).norm()), "must be 0 for equal sides"),
    "triangle": (
        MeanGap,
        {"differentiable": False, **of_means(lambda x, y: (x - y).square().sum() ** 4)},
        "triangle inequality must hold",
    ),
    "gradient": (MeanGap, changed(without_gradient), "the gradient on y"),
}


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


def views(self: Angle, model: nn.Module) -> dict[str, Weights]:
    return {name: Weights(name, {"weight": model.state_dict()[f"{name}.weight"]}) for name in Angle.read(self, model)}


class Tagged(Angle):
    """Readings hold what files do not keep."""

    def read(self, model: nn.Module) -> dict[str, Weights]:
        read = super().read(model)
        for each in read.values():
            object.__setattr__(each, "tag", True)
        return read

    def value(self, x: Weights, y: Weights) -> float:
        return super().value(x, y) * (1 if hasattr(x, "tag") else 0.5)


def empty(self: Angle, model: nn.Module) -> dict[str, Weights]:
    return Angle.read(self, model) if any(isinstance(each, nn.Linear) for each in model.modules()) else {}


def valued(change: Callable[[float, Tensor, Tensor], float], **declared: Any) -> dict[str, Any]:
    """A change of the values; of a pair that is not comparable by its shapes, there is none."""

    def value(self: Angle, x: Weights, y: Weights) -> float:
        comparable = y.tensors["weight"].isfinite().all()
        known = Angle.value(self, x, y) if comparable or change is not tolerant else 0.0
        return change(known, x.tensors["weight"], y.tensors["weight"])

    return {"value": value, **declared}


def tolerant(value: float, x: Tensor, y: Tensor) -> float:
    return value if y.isfinite().all() else 1.0


WEIGHTS: dict[str, tuple[type[Angle], dict[str, Any], str]] = {
    "declarations": (
        Angle,
        {"__init__": lambda self, **options: WeightMetric.__init__(self)},
        "an unknown option must raise TypeError",
    ),
    "reading": (Angle, {"read": views}, "must return copies"),
    "saved": (Tagged, {}, "saved readings must have equal values"),
    "comparable": (Angle, {"combine": lambda self, values: float("nan")}, "combine must return a finite number"),
    "range": (Angle, {"range": (0.0, 0.1)}, "must lie in the range"),
    "symmetric": (
        Angle,
        valued(lambda value, x, y: value * (0.5 if x.sum() > y.sum() else 1), triangle_inequality=False),
        "with swapped sides",
    ),
    "identity": (
        Angle,
        valued(lambda value, x, y: value + 1, range=(0.0, 9.0)),
        "the distance of equal layers must be 0, got 1",
    ),
    "triangle": (Angle, valued(lambda value, x, y: value**9, range=(0.0, 1e9)), "triangle inequality must hold"),
    "without_weights": (Angle, {"read": empty}, "a network without weights must raise ValueError"),
    "not_finite": (Angle, valued(tolerant), "NaN weights must raise NotComparable"),
}


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 4))


@dataclass(frozen=True)
class Distance(WithDefect, Detector):
    """The distance from the mean, with a defect to choose."""

    name: ClassVar[str] = "distance"
    title: ClassVar[str] = "distance"
    reads: ClassVar[Any] = "samples"
    needs_labels: ClassVar[bool] = True

    def fit(self, activations: Iterable[Representation], *args: Any, **kwargs: Any) -> Scorer:
        if self.defect == "needs":
            kwargs.setdefault("labels", [place % 3 for place in range(96)])
        return super().fit(activations, *args, **kwargs)

    def _fit(self, activations: Iterable[Representation], *args: Any, **kwargs: Any) -> Scorer:
        batches = [batch.rows("mean").double() for batch in activations]
        if self.defect == "random_state":
            torch.rand(1)
        mean = torch.cat(batches).mean(0) + (0.1 if self.defect == "batches" and len(batches) > 1 else 0)
        return Distances(mean, self.defect)


class Distances(Scorer):
    def __init__(self, mean: Tensor, defect: str) -> None:
        self.mean, self.defect = mean, defect

    def score(self, activations: Representation) -> Tensor:
        rows = activations.rows("mean").double()
        if rows.shape[1] != len(self.mean):
            known = "" if self.defect == "width" else f": fitted to {len(self.mean)}, got {rows.shape[1]}"
            raise ValueError(f"wrong width{known}")
        scores = (rows - self.mean).norm(dim=1)
        if self.defect == "independent" and len(rows) < 96:
            scores = scores + 1e-3
        if self.defect == "scores":
            scores = scores.float()
        return -scores if self.defect == "far" else scores


DETECTORS = {
    "config": "must rebuild",
    "needs": "missing labels must raise ValueError",
    "scores": "scores must be float64, got torch.float32",
    "independent": "must not depend on the remaining samples",
    "batches": "scores of bd must not depend on the batches",
    "random_state": "must not change torch's random state",
    "far": "far samples must score higher than known samples",
    "width": "must name 5 and 7: wrong width",
}


def made(table: dict[str, Any], sound: type, part: str) -> Any:
    kind, defect, _ = table.get(part, (sound, {}, ""))
    return type("Broken", (kind,), defect)


TABLES = [
    Broken(check_metric, lambda part: (made(METRICS, MeanGap, part),), {part: row[2] for part, row in METRICS.items()}),
    Broken(
        check_weight_metric,
        lambda part: (made(WEIGHTS, Angle, part), network(0), network(1)),
        {part: row[2] for part, row in WEIGHTS.items()},
    ),
    Broken(check_detector, lambda part: (Distance(part),), DETECTORS, registries.detectors),
]
