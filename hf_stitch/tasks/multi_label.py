"""Classification with any number of classes per sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from hf_stitch.data import Batch, Samples
from hf_stitch.tasks.base import Answers, Array, ratio, total
from hf_stitch.tasks.classification import MULTI_LABEL, OfLabelValues, named
from hf_stitch.tasks.heads import widened

Classes = NDArray[Any]
"""A true value or a 1 for each class of each sample."""


class MultiLabel(OfLabelValues):
    """Classes of samples, each of which has any number of them: those whose probability is above one half."""

    name = "multi-label-classification"
    title = "classification with any number of classes per sample"
    problem_type: ClassVar[Any] = MULTI_LABEL
    needs = "logits (samples, classes)"
    figures: ClassVar[Mapping[str, bool]] = dict.fromkeys(
        ("relative_micro_f1", "agreement", "micro_f1", "macro_f1", "mean_average_precision", "exact_match"), True
    )
    compared = tuple(figures)
    kept = ("score",)

    @classmethod
    def takes(cls, head: str, config: Any) -> bool:
        """Return whether the head has several classes per sample."""
        return super().takes(head, config) and getattr(config, "problem_type", None) == MULTI_LABEL

    def check_labels(self, samples: Samples | Batch, outputs: int) -> None:
        """Check that there is a 0 or 1 for each class."""
        for id_, label in zip(samples.ids, samples.label_values or (), strict=False):
            if not isinstance(label, tuple) or len(label) != outputs or not {0, 1} >= {*label}:
                raise ValueError(
                    f"sample {id_!r} has the label {label}, and {self.name} takes a list of {outputs} numbers, 0 or 1 "
                    "for each class (multi-hot)"
                )

    def chance(self, measured: Mapping[str, Answers], seed: int) -> Answers:
        """Return the share of each class among the labels of the scored samples, or the target's, as probability."""
        target = measured["target"]
        of: Array = target.get("label", target["score"] > 0)
        with np.errstate(divide="ignore"):
            share = of.mean(0)
            return {"score": np.broadcast_to(np.log(share) - np.log1p(-share), of.shape)}

    def figures_of(self, own: Mapping[str, Array], target: Mapping[str, Array], weights: Array) -> dict[str, Array]:
        """Compute the figures.

        - ``micro_f1``: F1 over all classes of all samples; ``agreement`` is the same with the classes that the target
          predicts as labels. ``relative_micro_f1`` is divided by that of the target, the headline: thresholds and other
          data sets compare with it, and classes that no sample has do not count.
        - ``macro_f1`` and ``mean_average_precision``: means over classes that a sample has, of F1 and of the average
          precision (area under precision and recall, in steps).
        - ``exact_match``: share of samples of which all classes are right.
        """
        predicted, label = own["score"] > 0, target.get("label")
        agreement = {"agreement": _f1(*_counts(predicted, target["score"] > 0, weights))}
        if label is None:
            return agreement
        counts, of_target = (_counts(row["score"] > 0, label, weights) for row in (own, target))
        micro, exact = _f1(*counts), (predicted == label).all(-1).astype(float)
        return {
            "relative_micro_f1": ratio(micro, _f1(*of_target)), **agreement,
            "micro_f1": micro, "macro_f1": _macro(_of_classes(*counts), counts[2]),
            "mean_average_precision": _macro(_average_precision(own["score"], label, weights), counts[2]),
            "exact_match": total(weights, exact) / weights.sum(1)[:, None],
        }  # fmt: skip

    def apart(self, own: Answers, target: Answers) -> Array:
        """Return the mean differences of probabilities."""
        probabilities = [1 / (1 + np.exp(-row["score"])) for row in (own, target)]
        differences: Array = np.abs(probabilities[0] - probabilities[1]).mean(-1)
        return differences

    def shown(self, answers: Answers, place: int, names: Mapping[int, str]) -> str:
        """Return the names of the classes."""
        return _listed(answers["score"][place] > 0, names)

    def label_shown(self, target: Answers, place: int, names: Mapping[int, str]) -> str | None:
        """Return the names of the true classes."""
        return _listed(target["label"][place], names) if "label" in target else None

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the binary cross-entropy, a mean over classes and samples."""
        logits, labels = widened(logits, labels)
        return functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))

    def summed_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the binary cross-entropies of samples, means over classes, summed."""
        return _cross_entropy(logits, labels.to(logits.dtype)).sum()

    def imitation_loss(self, logits: Tensor, wanted: Tensor, temperature: float) -> Tensor:
        """Return the binary cross-entropy of each sample with the probabilities of a whole network."""
        return _cross_entropy(logits / temperature, (wanted.to(logits.dtype) / temperature).sigmoid())

    def decided(self, logits: Tensor) -> Tensor:
        """Return which classes are more likely than not."""
        return logits > 0

    def right(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Count samples of which all classes are right."""
        return (self.decided(logits) == labels).all(-1).sum()

    def usage(self) -> str:
        """Print the names of the classes."""
        return "print([model.config.id2label[i] for i in (output.logits[0] > 0).nonzero().flatten().tolist()])"


def _listed(classes: Classes, names: Mapping[int, str]) -> str:
    return ", ".join(named(number, names) for number in np.flatnonzero(classes).tolist()) or "none"


def _cross_entropy(logits: Tensor, probabilities: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, probabilities, reduction="none").mean(-1)


def _counts(predicted: Classes, label: Classes, weights: Array) -> tuple[Array, Array, Array]:
    """Return how often a class is right, predicted, and true: (resamples, predictors, classes) each."""
    found, true = predicted.astype(np.float64), np.broadcast_to(label, predicted.shape).astype(np.float64)
    return total(weights, found * true), total(weights, found), total(weights, true)


def _f1(right: Array, predicted: Array, true: Array) -> Array:
    """Return F1 over all classes; NaN without any predicted or true class."""
    return _of_classes(*(count.sum(-1) for count in (right, predicted, true)))


def _of_classes(right: Array, predicted: Array, true: Array) -> Array:
    return ratio(2 * right, predicted + true)


def _macro(values: Array, true: Array) -> Array:
    """Return the mean over classes that a sample has."""
    has = true > 0
    return ratio(np.where(has, values, 0).sum(-1), has.sum(-1))


def _average_precision(score: Array, label: Array, weights: Array) -> Array:
    """Return ``Σ (recall - recall before) · precision`` over thresholds, of each class; equal scores are one step."""
    found = np.empty((len(weights), *score.shape[1:]))
    for predictor, kind in np.ndindex(*score.shape[1:]):
        order = np.argsort(-score[:, predictor, kind], kind="stable")
        ranked = score[order, predictor, kind]
        last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
        drawn, true = weights[:, order], label[order, 0, kind]
        right, seen = (drawn * true).cumsum(1)[:, last], drawn.cumsum(1)[:, last]
        precision = np.divide(right, seen, out=np.zeros_like(right), where=seen > 0)
        steps = np.diff(right, axis=1, prepend=0)
        found[:, predictor, kind] = ratio((steps * precision).sum(1), right[:, -1])
    return found
