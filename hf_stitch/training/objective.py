"""Training objective of stitches: the loss of a task with hard or soft labels, plus penalties."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from hf_stitch.metrics import ActivationMetric
from hf_stitch.metrics.base import activation_metric
from hf_stitch.registry import registries
from hf_stitch.stitches import StitchingLayer
from hf_stitch.tasks.base import IGNORED, Task

Answer = Literal["hard", "target", "source"]
ANSWERS: tuple[str, ...] = get_args(Answer)
L1 = ("l1", "proximal_l1")
"""Penalties on the absolute weights of the maps."""


@dataclass(frozen=True)
class Objective:
    """Loss of a task with a mixture of labels, plus penalties (Csiszárik et al. 2021, section 4.1 and equation 4).

    With classes, the loss is ``Σ_l w_l · T² · CE(softmax(z / T), p_l)`` with soft labels ``p_l = softmax(z_l / T)``
    (Hinton et al. 2015). For hard labels T is 1.
    """

    labels: Mapping[str, float]  # weight of each kind of labels
    temperature: float = 1.0  # temperature T, above 0
    penalties: Mapping[str, float] = field(default_factory=dict)  # weight of each penalty

    def __post_init__(self) -> None:
        """Validate constraints that the option types of ``TaskLoss`` do not express."""
        if not self.labels:
            raise ValueError("labels must contain at least one kind of labels, got none")
        for name, weight in self.penalties.items():
            if not math.isfinite(weight) or weight == 0 or (name in L1 and weight < 0):
                expected = "a number above 0" if name in L1 else "a finite number other than 0"
                raise ValueError(f"the weight of penalty {name!r} must be {expected}, got {weight!r}")
            if name in L1:
                continue
            metric = activation_metric(name)
            if not metric.differentiable or metric.statistic == "outputs":
                raise ValueError(
                    f"penalty {name!r} must be 'l1', 'proximal_l1' or a differentiable metric of representations, got "
                    f"{metric}"
                )

    @property
    def metrics(self) -> dict[str, ActivationMetric]:
        """The penalties that are metrics, by name."""
        return {name: activation_metric(name) for name in self.penalties if name not in L1}

    def loss(self, task: Task, logits: Tensor, answers: Mapping[str, Tensor]) -> Tensor:
        """Compute the weighted task losses, summed over samples, or over tokens with a prediction."""
        total = logits.new_zeros(())
        has_prediction = answers["hard"] != IGNORED if task.per_token else None
        for name, weight in self.labels.items():
            if name == "hard":
                label_loss = task.summed_loss(logits, answers[name])
            else:
                losses = task.imitation_loss(logits, answers[name], self.temperature)
                label_loss = self.temperature**2 * (losses[has_prediction] if task.per_token else losses).sum()
            total = total + weight * label_loss
        return total

    def penalty(self, layer: StitchingLayer, rows: tuple[Tensor, Tensor] | None) -> Tensor:
        """Compute the weighted sum of the penalties; ``proximal_l1`` counts in eval mode only (see ``shrink``)."""
        total = next(layer.parameters()).new_zeros(())
        missing = {} if rows is None else self.missing_rows(*rows)
        for name, weight in self.penalties.items():
            if name == "l1" or (name == "proximal_l1" and not layer.training):
                total = total + weight * sum(_weights(layer), total)
            elif name not in L1 and name not in missing:
                assert rows is not None
                total = total + weight * type(registries.metrics.build(name)).function(*rows)
        return total

    @torch.no_grad()
    def shrink(self, layer: StitchingLayer, rate: float) -> None:
        """Apply the proximal step of the penalty ``proximal_l1`` after a step of the optimizer.

        Each weight w of an affine map becomes ``sign(w) · max(|w| - rate · penalty, 0)`` (soft threshold, Parikh & Boyd
        2014, section 6.5.2). Small weights become exactly 0, unlike with gradients of ``l1``.
        """
        if not (penalty := self.penalties.get("proximal_l1")):
            return
        for part in layer.parts:
            weight = getattr(layer, part).weight
            weight.copy_(functional.softshrink(weight, rate * penalty))

    def missing_rows(self, x: Tensor, y: Tensor) -> dict[str, int]:
        """Return the required number of rows of each penalty metric that needs more rows than passed."""
        min_rows = {
            name: max(metric.min_rows("x", x.shape[1]), metric.min_rows("y", y.shape[1]))
            for name, metric in self.metrics.items()
        }
        return {name: count for name, count in min_rows.items() if count > len(x)}


def _weights(layer: StitchingLayer) -> list[Tensor]:
    """Return the sum of absolute weights of each map; for a map without a matrix, of all parameters except biases."""
    sums: list[Tensor] = []
    for part in layer.parts:
        stitch = getattr(layer, part)
        if hasattr(stitch, "matrix"):
            sums.append(stitch.matrix().abs().sum())
        else:
            parameters = stitch.named_parameters()
            sums += [value.abs().sum() for name, value in parameters if name.rpartition(".")[2] != "bias"]
    return sums
