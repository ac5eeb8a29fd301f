"""Metrics between the weights of two networks, without data."""

from __future__ import annotations

import math
from operator import mul
from typing import ClassVar

from torch import Tensor, nn

from hf_stitch.metrics import NotComparable, WeightMetric
from hf_stitch.offloading import is_offloaded
from hf_stitch.papers import Paper
from hf_stitch.statistics import Weights
from hf_stitch_versions.changes.weights import effective, update_rank_of

ROY_2007 = Paper(
    "Roy & Vetterli: The effective rank: A measure of effective dimensionality",
    "https://www.eurasip.org/Proceedings/Eusipco/Eusipco2007/Papers/a5p-h05.pdf",
)


def _weight_cosine(x: Weights, y: Weights) -> float:
    first, second = _in_double(x), _in_double(y)
    length = _norm(first) * _norm(second)
    if not length:
        raise NotComparable(x.layer, f"the cosine is not defined: its weights, or the weights of {y.layer!r}, are zero")
    return sum(float(value.flatten() @ second[name].flatten()) for name, value in first.items()) / length


def _relative_change(x: Weights, y: Weights) -> float:
    size, change = _norm(_in_double(x)), _norm(_change(x, y))
    if change and not size:
        raise NotComparable(x.layer, "the relative change is not defined: its weights are zero in the first network")
    return change / size if change else 0.0


def _update_rank(x: Weights, y: Weights) -> float:
    changed = [change.flatten(1) for change in _change(x, y).values() if change.any()]
    energies = [float(change.square().sum()) for change in changed]
    ranks = [update_rank_of(change) for change in changed]
    return sum(map(mul, ranks, energies)) / sum(energies) if changed else 0.0


class _OfModules(WeightMetric):
    """Base class of metrics that compare the weights of two modules with the same names and shapes."""

    _reads: ClassVar[str] = "weights"
    _axes: ClassVar[int] = 1  # minimum number of axes of a weight

    def read(self, model: nn.Module) -> dict[str, Weights]:
        """Copy the effective weights of each module, without its submodules.

        Parameters of the root module, such as position embeddings, count as layers.
        """
        if is_offloaded(model):
            raise ValueError(
                f"{self.name} requires weights in memory, but accelerate offloads the weights of "
                f"{type(model).__name__}; load the network without a device_map"
            )
        weights: dict[str, dict[str, Tensor]] = {}
        for name, value in effective(model).items():
            if value.dim() >= self._axes:
                layer, _, parameter = name.rpartition(".")
                weights.setdefault(layer or parameter, {})[parameter] = value.to("cpu", copy=True).contiguous()
        if not weights:
            raise ValueError(f"{self.name} requires {self._reads}, but {type(model).__name__} does not have any")
        return {layer: Weights(layer, tensors) for layer, tensors in weights.items()}

    def check_shared(self, a: Weights, b: Weights) -> None:
        """Check that the weights of two modules have the same names and shapes, as in ``WeightMetric``."""
        shapes_a, shapes_b = ({name: tuple(value.shape) for name, value in side.tensors.items()} for side in (a, b))
        if shapes_a != shapes_b:
            raise NotComparable(
                a.layer,
                f"it has {_listed(shapes_a)}, but {b.layer!r} has {_listed(shapes_b)}; compare equal shapes",
            )


class WeightCosine(_OfModules):
    """Cosine of the weights of two modules of the same shape: matrices, convolution kernels, embeddings.

    Several weights of one module count as one vector. Biases and norm weights are ignored. The metric compares
    effective weights: PEFT adapters merged, quantized weights dequantized, parametrisations and pruning applied. The
    value for networks is the mean over their modules.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from hf_stitch_versions import WeightCosine
        >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> _ = one.weight.data.copy_(torch.eye(2)), other.weight.data.copy_(torch.ones(2, 2))
        >>> metric = WeightCosine()
        >>> x, y = (metric.read(nn.Sequential(each))["0"] for each in (one, other))
        >>> round(metric.value(x, y), 4)
        0.7071
    """

    name, title = "weight_cosine", "cosine of the weights"
    function = staticmethod(_weight_cosine)
    range = (-1.0, 1.0)
    _reads = "matrices, kernels and embeddings"
    _axes = 2


class RelativeChange(_OfModules):
    """Norm of the difference b − a of all weights of a module, over the norm of a; not symmetric.

    Norm weights, biases and running statistics count, too. 0: nothing changed. Weights are effective weights, as in
    :class:`WeightCosine`. The value for networks is the mean over their modules.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from hf_stitch_versions import RelativeChange
        >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> _ = other.load_state_dict({name: 1.5 * value for name, value in one.state_dict().items()})
        >>> metric = RelativeChange()
        >>> x, y = (metric.read(nn.Sequential(each))["0"] for each in (one, other))
        >>> round(metric.value(x, y), 4), round(metric.value(y, x), 4)
        (0.5, 0.3333)
    """

    name, title = "relative_change", "change of the weights, relative to the first network"
    function = staticmethod(_relative_change)
    range = (0.0, math.inf)
    higher_is_better = False
    symmetric = False


class UpdateRank(_OfModules):
    """Effective rank of the change b − a of the matrices of a module, over the largest possible rank.

    The effective rank is the exponential of the entropy of the normalised singular values (Roy and Vetterli 2007). Low:
    few directions changed, as with a low-rank adapter; 1: all directions changed alike; 0: nothing changed. Convolution
    kernels are matrices with one row per output. For several matrices in a module, the value is the mean, weighted by
    the squared norms of their changes. Only modules of the same name, versions of each other, are compared.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from hf_stitch_versions import UpdateRank
        >>> one, other = nn.Linear(4, 4), nn.Linear(4, 4)
        >>> _ = other.weight.data.copy_(one.weight.data + torch.ones(4, 4))
        >>> metric = UpdateRank()
        >>> x, y = (metric.read(nn.Sequential(each))["0"] for each in (one, other))
        >>> round(metric.value(x, y), 3)
        0.25
    """

    name, title, papers = "update_rank", "effective rank of the change of the weights", (ROY_2007,)
    function = staticmethod(_update_rank)
    higher_is_better = False
    _reads = "matrices, kernels and embeddings"
    _axes = 2

    def check_shared(self, a: Weights, b: Weights) -> None:
        """Check that two modules and their weights have the same names and shapes."""
        if a.layer != b.layer:
            raise NotComparable(
                a.layer, f"{b.layer!r} is a different layer; update_rank compares layers of the same name"
            )
        super().check_shared(a, b)


def _in_double(weights: Weights) -> dict[str, Tensor]:
    return {name: value.double() for name, value in weights.tensors.items()}


def _change(x: Weights, y: Weights) -> dict[str, Tensor]:
    """Return the change of each weight from the first module to the second, in float64."""
    return {name: y.tensors[name].double() - value for name, value in _in_double(x).items()}


def _norm(tensors: dict[str, Tensor]) -> float:
    return math.hypot(*(float(value.norm()) for value in tensors.values()))


def _listed(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())
