"""What is minimised: cross-entropy with labels of one's choice, and penalties."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from hf_stitch.metrics import Metric
from hf_stitch.registry import registries
from hf_stitch.stitches import StitchingLayer

ANSWERS = ("hard", "target", "source")
IGNORED = -100
"""Hard label of a token of which no prediction is asked."""


@dataclass(frozen=True)
class Objective:
    """Cross-entropy with a mixture of labels, plus penalties (Csiszárik et al. 2021, section 4.1 and equation 4).

    ``Σ_l w_l · T² · CE(softmax(z / T), p_l)`` with soft labels ``p_l = softmax(z_l / T)`` (Hinton et al. 2015); of hard
    labels T is 1.

    Attributes:
        labels: Weight of each kind: ``hard``, ``target`` and ``source`` (the answers of a whole parent).
        temperature: T, above 0.
        penalties: Weight of each: ``l1`` (the sum of the absolute entries of the maps, biases left out), or a
            differentiable metric of the transformed rows with the target's: of a similarity, a weight above 0 pushes
            them apart, and one below 0 together. A batch of fewer rows than a metric takes, as the last of an epoch may
            be, goes without it.
    """

    labels: Mapping[str, float]
    temperature: float = 1.0
    penalties: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what cannot be minimised."""
        if unknown := [name for name in self.labels if name not in ANSWERS]:
            raise ValueError(f"labels must be of {', '.join(ANSWERS)}, got {unknown[0]!r}")
        if not self.labels or not all(_is_number(weight) and weight > 0 for weight in self.labels.values()):
            raise ValueError(f"labels must have weights above 0, got {dict(self.labels)}")
        if not (_is_number(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature must be above 0, got {self.temperature}")
        for name, weight in self.penalties.items():
            if not _is_number(weight) or weight == 0 or (name == "l1" and weight < 0):
                wanted = "a number above 0" if name == "l1" else "a finite number other than 0"
                raise ValueError(f"the weight of penalty {name!r} must be {wanted}, got {weight!r}")
            if name == "l1":
                continue
            metric = registries.metrics.build(name)
            if not metric.differentiable or metric.statistic == "outputs":
                raise ValueError(
                    f"penalty {name!r} must be 'l1' or a differentiable metric of representations, and {metric} is not "
                    "one"
                )

    @property
    def metrics(self) -> dict[str, Metric]:
        """The metrics among the penalties."""
        return {name: registries.metrics.build(name) for name in self.penalties if name != "l1"}

    def loss(self, logits: Tensor, answers: Mapping[str, Tensor]) -> Tensor:
        """The cross-entropies summed over the samples; of texts over the tokens that are asked for.

        Args:
            logits: ``(batch, classes)``, or ``(batch, tokens, vocabulary)`` of the tokens that come next.
            answers: For each kind of labels: classes (``IGNORED``: not asked for), or logits.
        """
        total = logits.new_zeros(())
        asked = answers["hard"] != IGNORED if "hard" in answers else None
        for name, weight in self.labels.items():
            if name == "hard":
                part = functional.cross_entropy(
                    logits.flatten(0, -2), answers[name].flatten(), ignore_index=IGNORED, reduction="sum"
                )
            else:
                soft = (answers[name].to(logits.dtype) / self.temperature).softmax(-1)
                each = -(soft * (logits / self.temperature).log_softmax(-1)).sum(-1)
                part = self.temperature**2 * (each if logits.dim() == 2 or asked is None else each[asked]).sum()
            total = total + weight * part
        return total

    def penalty(self, layer: StitchingLayer, rows: tuple[Tensor, Tensor] | None) -> Tensor:
        """The penalties together; ``rows`` are the transformed ones and the target's, if a metric asks for them."""
        total = next(layer.parameters()).new_zeros(())
        missing = {} if rows is None else self.missing_rows(*rows)
        for name, weight in self.penalties.items():
            if name == "l1":
                total = total + weight * sum(_weights(layer), total)
            elif name not in missing:
                assert rows is not None
                total = total + weight * type(registries.metrics.build(name)).function(*rows)
        return total

    def missing_rows(self, x: Tensor, y: Tensor) -> dict[str, int]:
        """The metrics among the penalties that take more rows than these, and how many each takes."""
        least = {
            name: max(metric.min_rows("x", x.shape[1]), metric.min_rows("y", y.shape[1]))
            for name, metric in self.metrics.items()
        }
        return {name: count for name, count in least.items() if count > len(x)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _weights(layer: StitchingLayer) -> list[Tensor]:
    """The summed absolute entries of each map; of maps that have no matrix, of all that is trained but biases."""
    sums: list[Tensor] = []
    for part in layer.parts:
        stitch = getattr(layer, part)
        if hasattr(stitch, "matrix"):
            sums.append(stitch.matrix().abs().sum())
        else:
            named = stitch.named_parameters()
            sums += [value.abs().sum() for name, value in named if name.rpartition(".")[2] != "bias"]
    return sums


def next_tokens(inputs: Mapping[str, Tensor]) -> Tensor:
    """For each token the one that comes next, ``(batch, tokens)``; ``IGNORED`` where none is to be predicted."""
    ids = inputs["input_ids"]
    real = inputs["attention_mask"].bool() if "attention_mask" in inputs else torch.ones_like(ids, dtype=torch.bool)
    following = torch.full_like(ids, IGNORED)
    following[:, :-1] = torch.where(real[:, :-1] & real[:, 1:], ids[:, 1:], IGNORED)
    return following
