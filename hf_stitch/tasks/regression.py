"""Regression: one or several numbers per sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hf_stitch.data import Batch, Samples
from hf_stitch.tasks.base import Answers, Array, ratio, total
from hf_stitch.tasks.classification import MULTI_LABEL, REGRESSION, OfLabelValues
from hf_stitch.tasks.heads import widened


class Regression(OfLabelValues):
    """Numbers of samples: how far from the labels, and from the numbers of the target."""

    name = "regression"
    title = "numbers"
    problem_type: ClassVar[Any] = REGRESSION
    needs = "numbers (samples, outputs)"
    figures: ClassVar[Mapping[str, bool]] = {
        "relative_r2": True, "agreement": True, "r2": True, "mse": False, "pearson": True, "spearman": True,
    }  # fmt: skip
    compared = tuple(figures)
    kept = ("value",)

    @classmethod
    def takes(cls, head: str, config: Any) -> bool:
        """Return whether the head has numbers as its outputs."""
        kind, count = (getattr(config, name, None) for name in ("problem_type", "num_labels"))
        return super().takes(head, config) and kind != MULTI_LABEL and (kind == REGRESSION or count == 1)

    def check_labels(self, samples: Samples | Batch, outputs: int) -> None:
        """Check that there are as many numbers as outputs."""
        for id_, label in zip(samples.ids, samples.label_values or (), strict=False):
            if (count := len(label) if isinstance(label, tuple) else 1) != outputs:
                raise ValueError(f"sample {id_!r} has {count} numbers as label, and the target outputs {outputs}")

    def chance(self, measured: Mapping[str, Answers], seed: int) -> Answers:
        """Return the mean of the labels of the scored samples, or without labels of the outputs of the target."""
        of: Array = measured["target"].get("label", measured["target"]["value"])
        return {"value": np.broadcast_to(of.mean(0), of.shape)}

    def figures_of(self, own: Mapping[str, Array], target: Mapping[str, Array], weights: Array) -> dict[str, Array]:
        """Compute the figures, each a mean over outputs.

        - ``r2``: share of the variation of the labels that the predictor explains; ``agreement`` is the same with the
          outputs of the target as labels, so that both have one unit: 1 is a perfect predictor, 0 is the mean.
        - ``relative_r2``: ``r2`` divided by that of the target, the headline: as relative accuracies, it needs no unit
          of the labels, and thresholds and other data sets compare with it. Undefined if the target explains nothing.
        - ``mse``: mean squared error, in the squared unit of the labels.
        - ``pearson`` and ``spearman``: correlations with the labels, in any unit; for scores of another unit than the
          labels, as those of rerankers and reward models.

        A figure that is undefined (constant labels or outputs, a single sample) is NaN.
        """
        value, label = own["value"], target.get("label")
        agreement = {"agreement": _explained(value, target["value"], weights)}
        if label is None:
            return agreement
        r2, of_target = (_explained(row["value"], label, weights) for row in (own, target))
        constant = np.ptp(value, 0) <= 1e-6 * np.abs(value).max(0)
        return {
            "relative_r2": ratio(r2, of_target), **agreement, "r2": r2,
            "mse": total(weights, np.square(value - label).mean(-1)) / weights.sum(1)[:, None],
            "pearson": np.where(constant, np.nan, _pearson(value, label, weights)).mean(-1),
            "spearman": np.where(constant, np.nan, _spearman(value, label, weights)).mean(-1),
        }  # fmt: skip

    def apart(self, own: Answers, target: Answers) -> Array:
        """Return the mean absolute differences."""
        differences: Array = np.abs(own["value"] - target["value"]).mean(-1)
        return differences

    def shown(self, answers: Answers, place: int, names: Mapping[int, str]) -> str:
        """Return the numbers."""
        return _listed(answers["value"][place])

    def label_shown(self, target: Answers, place: int, names: Mapping[int, str]) -> str | None:
        """Return the numbers of the label."""
        return _listed(target["label"][place]) if "label" in target else None

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean squared error."""
        logits, labels = widened(logits, labels)
        return functional.mse_loss(logits, labels.reshape(logits.shape).to(logits.dtype))

    def summed_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean squared errors of samples, summed."""
        return self.imitation_loss(logits, labels, 1.0).sum()

    def imitation_loss(self, logits: Tensor, wanted: Tensor, temperature: float) -> Tensor:
        """Return the mean squared error of each sample."""
        if temperature != 1:
            raise ValueError(
                f"temperature softens probabilities, and regression has none: leave it at 1, got {temperature}"
            )
        return (logits - wanted.to(logits.dtype)).square().flatten(1).mean(1)

    def decided(self, logits: Tensor) -> Tensor:
        """Return the numbers."""
        return logits

    def right(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return NaN: numbers are not right or wrong."""
        return logits.new_full((), torch.nan)

    def usage(self) -> str:
        """Print the numbers."""
        return "print(output.logits[0].tolist())"


def _listed(numbers: Array) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)


def _variation(x: Array, weights: Array) -> Array:
    """Return ``Σ (x - mean)²`` of each resample; NaN if x is constant."""
    x = x - x.mean(0)
    squares = total(weights, x * x)
    found: Array = squares - total(weights, x) ** 2 / weights.sum(1)[:, None, None]
    return np.where(found > 1e-12 * squares, found, np.nan)  # less is rounding


def _explained(values: Array, labels: Array, weights: Array) -> Array:
    """Return ``1 - Σ (value - label)² / Σ (label - mean)²``, a mean over outputs."""
    explained: Array = (1 - total(weights, np.square(values - labels)) / _variation(labels, weights)).mean(-1)
    return explained


def _pearson(values: Array, labels: Array, weights: Array) -> Array:
    """Return the correlation of each output, (resamples, predictors, outputs)."""
    x, y = values - values.mean(0), labels - labels.mean(0)
    both = total(weights, x * y) - total(weights, x) * total(weights, y) / weights.sum(1)[:, None, None]
    found: Array = both / np.sqrt(_variation(x, weights) * _variation(y, weights))
    return found


def _spearman(values: Array, labels: Array, weights: Array) -> Array:
    """Return the rank correlation of each output, (resamples, predictors, outputs)."""
    found = np.empty((len(weights), *values.shape[1:]))
    for output in range(values.shape[-1]):
        y = _ranks(labels[:, 0, output], weights)
        for predictor in range(values.shape[1]):
            x = _ranks(values[:, predictor, output], weights)
            both, own, other = ((weights * product).sum(1) for product in (x * y, x * x, y * y))
            found[:, predictor, output] = ratio(both, np.sqrt(own * other))
    return found


def _ranks(values: Array, weights: Array) -> Array:
    """Return the ranks of values in each resample, less their mean; a sample occurs as often as its weight."""
    _, place = np.unique(values, return_inverse=True)
    order = np.argsort(place, kind="stable")
    starts = np.flatnonzero(np.diff(place[order], prepend=-1))
    equal = np.add.reduceat(weights[:, order], starts, axis=1)
    ranks: Array = (np.cumsum(equal, 1) - equal / 2)[:, place] - weights.sum(1, keepdims=True) / 2
    return ranks
