"""Tasks of networks with one vector of outputs per sample: a class, any number of classes, numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from hf_stitch.adapters import Adapter
from hf_stitch.data import Batch, Samples
from hf_stitch.data.classes import numbered_as, warn_of_other_classes
from hf_stitch.printing import see
from hf_stitch.tasks.base import (
    Answers,
    Array,
    Side,
    Task,
    as_arrays,
    check_predictions,
    divergence,
    logits_of,
    most_likely,
    ratio,
    total,
    widened,
)

OF_IMAGES = "hf_stitch.artefacts.classification:StitchedModelForImageClassification"
OF_TEXTS = "hf_stitch.artefacts.classification:StitchedModelForSequenceClassification"
MULTI_LABEL, REGRESSION = "multi_label_classification", "regression"
"""Problem types of transformers other than classification with one class per sample."""

Classes = NDArray[Any]
"""True or 1 for each class of a sample."""


class OfSamples(Task):
    """Task with one vector of outputs per sample."""

    family = "outputs per sample"
    models: ClassVar[Mapping[str, str]] = {"text": OF_TEXTS, "": OF_IMAGES}
    pipelines: ClassVar[Mapping[str, str]] = {"text": "text-classification", "": "image-classification"}
    describes_outputs = True
    least: ClassVar[int] = 1  # least number of outputs
    needs: ClassVar[str]  # the required output, in words

    def difference(self, network: Adapter, output: Any) -> str:
        """Return the unmet requirement of this task on the output of a network."""
        shape = tuple(logits_of(output).shape)
        is_wrong = len(shape) != 2 or shape[1] < self.least
        return f"{self.needs}, but {type(network.model).__name__} outputs {shape}" if is_wrong else ""


class OfLabelValues(OfSamples):
    """Task with a number for each output as labels; the first entry of :attr:`kept` names the measure of an output."""

    heads = ("ForImageClassification", "ForSequenceClassification")

    def labels(self, samples: Samples | Batch) -> Sequence[Any] | None:
        """Return the numbers of each sample."""
        return samples.label_values

    def measure(self, outputs: Mapping[str, Any], source: Side, target: Side) -> dict[str, Answers]:
        """Return the outputs, and the labels as a measure of the target."""
        batch, logits = source[0], {name: logits_of(output) for name, output in outputs.items()}
        check_predictions(logits["target"].float(), batch)
        measured = {name: as_arrays({"": {self.kept[0]: values}})[""] for name, values in logits.items()}
        if batch.label_values is not None:
            self.check_labels(batch, logits["target"].shape[-1])
            numbers = np.asarray(batch.label_values, dtype=np.float64)
            measured["target"]["label"] = numbers.reshape(len(numbers), -1)
        return {**measured}

    def asked(self, network: Any, samples: Sequence[Any], labels: Sequence[Any] | None) -> Tensor:
        """Return the labels in float32, (samples, outputs)."""
        return torch.tensor(labels, dtype=torch.float32).reshape(len(samples), -1)


class Classification(OfSamples):
    """Classification of images or texts: correctness of classes, and agreement with the target."""

    title = "classification with one class per sample"
    figures: ClassVar[Mapping[str, bool]] = {
        "accuracy": True, "relative_accuracy": True, "cross_entropy": False, "agreement": True,
        "kl_divergence": False,
    }  # fmt: skip
    compared = ("relative_accuracy", "accuracy", "agreement")
    kept = ("right", "agreement")
    classifies = True
    least, needs = 2, "logits (samples, at least 2 classes)"
    numbered = staticmethod(numbered_as)
    warn_of_labels = staticmethod(warn_of_other_classes)

    @classmethod
    def takes(cls, head: str, config: Any) -> bool:
        """Return whether the head predicts one class per sample."""
        problem_type, count = (getattr(config, name, None) for name in ("problem_type", "num_labels"))
        return super().takes(head, config) and problem_type not in (MULTI_LABEL, REGRESSION) and count != 1

    def labels(self, samples: Samples | Batch) -> Sequence[int] | None:
        """Return the classes."""
        return samples.labels

    def check_labels(self, samples: Samples | Batch, outputs: int) -> None:
        """Check that labels are classes of the network."""
        for id_, label in zip(samples.ids, samples.labels or (), strict=False):
            if not 0 <= label < outputs:
                raise ValueError(
                    f"sample {id_!r} has label {label}, but the target predicts classes 0 to {outputs - 1}"
                    + see("other-labels")
                )

    def measure(self, outputs: Mapping[str, Any], source: Side, target: Side) -> dict[str, Answers]:
        """Measure class, agreement, distance and divergence; with labels also correctness and cross-entropy."""
        batch, logits = source[0], {name: logits_of(output) for name, output in outputs.items()}
        check_predictions(logits["target"].float().logsumexp(-1, keepdim=True), batch)
        measured: dict[str, Answers] = {}
        for shape in dict.fromkeys(values.shape for values in logits.values()):
            names = [name for name, values in logits.items() if values.shape == shape]
            values, reference = torch.stack([logits[name].float() for name in names]), logits["target"].float()
            predicted, logs = most_likely(values), values.log_softmax(-1)
            rows = {"class": predicted, "agreement": predicted == most_likely(reference)}
            if batch.labels is not None:
                self.check_labels(batch, shape[-1])
                labels = torch.as_tensor(batch.labels, device=values.device).expand(len(names), -1)
                rows |= {"label": labels, "right": predicted == labels}
                rows["cross_entropy"] = -logs.gather(-1, labels[..., None]).squeeze(-1)
            if shape == reference.shape:  # total variation distance between class probabilities
                rows["distance"] = (values.softmax(-1) - reference.softmax(-1)).abs().sum(-1) / 2
                rows["kl_divergence"] = divergence(logs, reference.log_softmax(-1))
            table = as_arrays({"": rows})[""]
            measured |= {
                name: {key: column[row].copy() for key, column in table.items()} for row, name in enumerate(names)
            }
        return measured

    def chance(self, measured: Mapping[str, Answers], seed: int) -> Answers:
        """Return the measures of the most frequent class, with the class frequencies as probabilities."""
        target = measured["target"]
        labels = target.get("label", target["class"])
        classes, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
        chance = {"agreement": (target["class"] == classes[counts.argmax()]).astype(float)}
        if "label" in target:
            chance["right"] = (inverse == counts.argmax()).astype(float)
            chance["cross_entropy"] = -np.log(counts / counts.sum())[inverse]
        return chance

    def figures_of(self, answers: Mapping[str, Array], target: Mapping[str, Array], weights: Array) -> dict[str, Array]:
        """Compute accuracies, cross-entropy, agreement and divergence."""
        n, figures = weights.sum(1)[:, None], dict[str, Array]()
        if "right" in answers:
            right = total(weights, answers["right"])
            figures = {"accuracy": right / n, "relative_accuracy": ratio(right, total(weights, target["right"]))}
        return figures | {name: total(weights, answers[name]) / n for name in self.figures if name in answers}

    def apart(self, answers: Answers, target: Answers) -> Array:
        """Return the total variation distances between class probabilities."""
        distance: Array = answers["distance"]
        return distance

    def shown(self, answers: Answers, place: int, names: Mapping[int, str]) -> str:
        """Return the name of the class."""
        return named(answers["class"][place], names)

    def label_shown(self, target: Answers, place: int, names: Mapping[int, str]) -> str | None:
        """Return the name of the true class."""
        return named(target["label"][place], names) if "label" in target else None

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy with classes, or with probabilities."""
        logits, labels = widened(logits, labels)
        return functional.cross_entropy(logits, labels.to(logits.dtype) if labels.is_floating_point() else labels)

    def usage(self) -> str:
        """Print the name of the class."""
        return "print(model.config.id2label[output.logits.argmax(-1).item()])"


class ImageClassification(Classification):
    """One class per image."""

    name = "image-classification"
    heads = ("ForImageClassification",)
    models: ClassVar[Mapping[str, str]] = {"": OF_IMAGES}
    pipelines: ClassVar[Mapping[str, str]] = {"": name}


class TextClassification(Classification):
    """One class per text."""

    name = "text-classification"
    heads = ("ForSequenceClassification",)
    models: ClassVar[Mapping[str, str]] = {"": OF_TEXTS}
    pipelines: ClassVar[Mapping[str, str]] = {"": name}


def named(number: float, names: Mapping[int, str]) -> str:
    """Return the name of a class, or its number if it does not have a name."""
    return "none" if number < 0 else str(names.get(int(number), int(number)))


class MultiLabel(OfLabelValues):
    """Multi-label classification: the classes of a sample with a probability above one half."""

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
        """Return whether the head predicts several classes per sample."""
        return super().takes(head, config) and getattr(config, "problem_type", None) == MULTI_LABEL

    def check_labels(self, samples: Samples | Batch, outputs: int) -> None:
        """Check that labels have a 0 or 1 for each class."""
        for id_, label in zip(samples.ids, samples.label_values or (), strict=False):
            if not isinstance(label, tuple) or len(label) != outputs or not {0, 1} >= {*label}:
                raise ValueError(
                    f"sample {id_!r} has label {label}, but {self.name} requires a list of {outputs} numbers, 0 or 1 "
                    "for each class (multi-hot)"
                )

    def chance(self, measured: Mapping[str, Answers], seed: int) -> Answers:
        """Return the class frequencies of the labels (or of the target's predictions) as probabilities."""
        target = measured["target"]
        labels: Array = target.get("label", target["score"] > 0)
        with np.errstate(divide="ignore"):
            share = labels.mean(0)
            return {"score": np.broadcast_to(np.log(share) - np.log1p(-share), labels.shape)}

    def figures_of(self, answers: Mapping[str, Array], target: Mapping[str, Array], weights: Array) -> dict[str, Array]:
        """Compute the figures.

        - ``micro_f1``: F1 over all classes of all samples; ``agreement`` is the same with the target's predicted
          classes as labels. The headline ``relative_micro_f1`` is divided by the target's micro F1, which makes
          thresholds and datasets comparable; classes without samples do not count.
        - ``macro_f1`` and ``mean_average_precision``: means over classes with at least one sample, of F1 and of the
          average precision (area under precision and recall, in steps).
        - ``exact_match``: share of samples with all classes right.
        """
        predicted, label = answers["score"] > 0, target.get("label")
        agreement = {"agreement": _f1(*_counts(predicted, target["score"] > 0, weights))}
        if label is None:
            return agreement
        counts, target_counts = (_counts(row["score"] > 0, label, weights) for row in (answers, target))
        micro, exact = _f1(*counts), (predicted == label).all(-1).astype(float)
        return {
            "relative_micro_f1": ratio(micro, _f1(*target_counts)), **agreement,
            "micro_f1": micro, "macro_f1": _macro(_of_classes(*counts), counts[2]),
            "mean_average_precision": _macro(_average_precision(answers["score"], label, weights), counts[2]),
            "exact_match": total(weights, exact) / weights.sum(1)[:, None],
        }  # fmt: skip

    def apart(self, answers: Answers, target: Answers) -> Array:
        """Return the mean differences of probabilities."""
        probabilities = [1 / (1 + np.exp(-row["score"])) for row in (answers, target)]
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
        """Return the sum of the binary cross-entropies of samples, each a mean over classes."""
        return _cross_entropy(logits, labels.to(logits.dtype)).sum()

    def imitation_loss(self, logits: Tensor, target: Tensor, temperature: float) -> Tensor:
        """Return the binary cross-entropy of each sample with the probabilities of a whole network."""
        return _cross_entropy(logits / temperature, (target.to(logits.dtype) / temperature).sigmoid())

    def decided(self, logits: Tensor) -> Tensor:
        """Return the classes with a probability above one half."""
        return logits > 0

    def right(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Count samples with all classes right."""
        return (self.decided(logits) == labels).all(-1).sum()

    def usage(self) -> str:
        """Print the names of the classes."""
        return "print([model.config.id2label[i] for i in (output.logits[0] > 0).nonzero().flatten().tolist()])"


def _listed(classes: Classes, names: Mapping[int, str]) -> str:
    return ", ".join(named(number, names) for number in np.flatnonzero(classes).tolist()) or "none"


def _cross_entropy(logits: Tensor, probabilities: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, probabilities, reduction="none").mean(-1)


def _counts(predicted: Classes, label: Classes, weights: Array) -> tuple[Array, Array, Array]:
    """Return counts of right, predicted and true classes, each (resamples, predictors, classes)."""
    assigned, true = predicted.astype(np.float64), np.broadcast_to(label, predicted.shape).astype(np.float64)
    return total(weights, assigned * true), total(weights, assigned), total(weights, true)


def _f1(right: Array, predicted: Array, true: Array) -> Array:
    """Return F1 over all classes; NaN if none is predicted or true."""
    return _of_classes(*(count.sum(-1) for count in (right, predicted, true)))


def _of_classes(right: Array, predicted: Array, true: Array) -> Array:
    return ratio(2 * right, predicted + true)


def _macro(values: Array, true: Array) -> Array:
    """Return the mean over classes with at least one sample."""
    is_present = true > 0
    return ratio(np.where(is_present, values, 0).sum(-1), is_present.sum(-1))


def _average_precision(score: Array, label: Array, weights: Array) -> Array:
    """Return ``Σ (recall - recall before) · precision`` over thresholds, of each class; equal scores are one step."""
    precisions = np.empty((len(weights), *score.shape[1:]))
    for predictor, class_index in np.ndindex(*score.shape[1:]):
        order = np.argsort(-score[:, predictor, class_index], kind="stable")
        ranked = score[order, predictor, class_index]
        step_ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
        sorted_weights, true = weights[:, order], label[order, 0, class_index]
        right, predicted = (sorted_weights * true).cumsum(1)[:, step_ends], sorted_weights.cumsum(1)[:, step_ends]
        precision = np.divide(right, predicted, out=np.zeros_like(right), where=predicted > 0)
        steps = np.diff(right, axis=1, prepend=0)
        precisions[:, predictor, class_index] = ratio((steps * precision).sum(1), right[:, -1])
    return precisions


class Regression(OfLabelValues):
    """Regression: differences of outputs from the labels, and from the outputs of the target."""

    name = "regression"
    title = "numbers"
    problem_type: ClassVar[Any] = REGRESSION
    needs = "numbers (samples, outputs)"
    has_probabilities = False
    figures: ClassVar[Mapping[str, bool]] = {
        "relative_r2": True, "agreement": True, "r2": True, "mse": False, "pearson": True, "spearman": True,
    }  # fmt: skip
    compared = tuple(figures)
    kept = ("value",)

    @classmethod
    def takes(cls, head: str, config: Any) -> bool:
        """Return whether the head outputs numbers."""
        problem_type, count = (getattr(config, name, None) for name in ("problem_type", "num_labels"))
        return (
            super().takes(head, config) and problem_type != MULTI_LABEL and (problem_type == REGRESSION or count == 1)
        )

    def check_labels(self, samples: Samples | Batch, outputs: int) -> None:
        """Check that labels have one number for each output."""
        for id_, label in zip(samples.ids, samples.label_values or (), strict=False):
            if (count := len(label) if isinstance(label, tuple) else 1) != outputs:
                raise ValueError(f"sample {id_!r} has {count} numbers as label, but the target outputs {outputs}")

    def chance(self, measured: Mapping[str, Answers], seed: int) -> Answers:
        """Return the mean label of the scored samples, or the mean output of the target without labels."""
        labels: Array = measured["target"].get("label", measured["target"]["value"])
        return {"value": np.broadcast_to(labels.mean(0), labels.shape)}

    def figures_of(self, answers: Mapping[str, Array], target: Mapping[str, Array], weights: Array) -> dict[str, Array]:
        """Compute the figures, each a mean over outputs.

        - ``r2``: share of the variation of the labels that the predictor explains; ``agreement`` is the same with the
          outputs of the target as labels. For both, 1 is a perfect predictor and 0 is the mean.
        - ``relative_r2``: ``r2`` divided by the target's ``r2``, the headline: independent of the unit of the labels,
          and comparable with thresholds and other datasets. Undefined if the target explains nothing.
        - ``mse``: mean squared error, in the squared unit of the labels.
        - ``pearson`` and ``spearman``: correlations with the labels, in any unit; for scores in another unit than the
          labels, for example of rerankers and reward models.

        A figure that is undefined (constant labels or outputs, a single sample) is NaN.
        """
        value, label = answers["value"], target.get("label")
        agreement = {"agreement": _explained(value, target["value"], weights)}
        if label is None:
            return agreement
        r2, target_r2 = (_explained(row["value"], label, weights) for row in (answers, target))
        constant = np.ptp(value, 0) <= 1e-6 * np.abs(value).max(0)
        return {
            "relative_r2": ratio(r2, target_r2), **agreement, "r2": r2,
            "mse": total(weights, np.square(value - label).mean(-1)) / weights.sum(1)[:, None],
            "pearson": np.where(constant, np.nan, _pearson(value, label, weights)).mean(-1),
            "spearman": np.where(constant, np.nan, _spearman(value, label, weights)).mean(-1),
        }  # fmt: skip

    def apart(self, answers: Answers, target: Answers) -> Array:
        """Return the mean absolute differences."""
        differences: Array = np.abs(answers["value"] - target["value"]).mean(-1)
        return differences

    def shown(self, answers: Answers, place: int, names: Mapping[int, str]) -> str:
        """Return the numbers."""
        return _in_words(answers["value"][place])

    def label_shown(self, target: Answers, place: int, names: Mapping[int, str]) -> str | None:
        """Return the numbers of the label."""
        return _in_words(target["label"][place]) if "label" in target else None

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean squared error."""
        logits, labels = widened(logits, labels)
        return functional.mse_loss(logits, labels.reshape(logits.shape).to(logits.dtype))

    def summed_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the mean squared errors of samples."""
        return self.imitation_loss(logits, labels, 1.0).sum()

    def imitation_loss(self, logits: Tensor, target: Tensor, temperature: float) -> Tensor:
        """Return the mean squared error of each sample."""
        return (logits - target.to(logits.dtype)).square().flatten(1).mean(1)

    def decided(self, logits: Tensor) -> Tensor:
        """Return the numbers."""
        return logits

    def right(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return NaN: numbers are neither right nor wrong."""
        return logits.new_full((), torch.nan)

    def usage(self) -> str:
        """Print the numbers."""
        return "print(output.logits[0].tolist())"


def _in_words(numbers: Array) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)


def _variation(x: Array, weights: Array) -> Array:
    """Return ``Σ (x - mean)²`` of each resample; NaN if x is constant."""
    x = x - x.mean(0)
    squares = total(weights, x * x)
    variation: Array = squares - total(weights, x) ** 2 / weights.sum(1)[:, None, None]
    return np.where(variation > 1e-12 * squares, variation, np.nan)  # smaller values are rounding errors


def _explained(values: Array, labels: Array, weights: Array) -> Array:
    """Return ``1 - Σ (value - label)² / Σ (label - mean)²``, a mean over outputs."""
    explained: Array = (1 - total(weights, np.square(values - labels)) / _variation(labels, weights)).mean(-1)
    return explained


def _pearson(values: Array, labels: Array, weights: Array) -> Array:
    """Return the correlation of each output, (resamples, predictors, outputs)."""
    x, y = values - values.mean(0), labels - labels.mean(0)
    covariance = total(weights, x * y) - total(weights, x) * total(weights, y) / weights.sum(1)[:, None, None]
    correlations: Array = covariance / np.sqrt(_variation(x, weights) * _variation(y, weights))
    return correlations


def _spearman(values: Array, labels: Array, weights: Array) -> Array:
    """Return the rank correlation of each output, (resamples, predictors, outputs)."""
    correlations = np.empty((len(weights), *values.shape[1:]))
    for output in range(values.shape[-1]):
        y = _ranks(labels[:, 0, output], weights)
        for predictor in range(values.shape[1]):
            x = _ranks(values[:, predictor, output], weights)
            xy, xx, yy = ((weights * product).sum(1) for product in (x * y, x * x, y * y))
            correlations[:, predictor, output] = ratio(xy, np.sqrt(xx * yy))
    return correlations


def _ranks(values: Array, weights: Array) -> Array:
    """Return the ranks of values in each resample, minus their mean; a sample occurs as often as its weight."""
    _, level = np.unique(values, return_inverse=True)
    order = np.argsort(level, kind="stable")
    starts = np.flatnonzero(np.diff(level[order], prepend=-1))
    equal = np.add.reduceat(weights[:, order], starts, axis=1)
    ranks: Array = (np.cumsum(equal, 1) - equal / 2)[:, level] - weights.sum(1, keepdims=True) / 2
    return ranks
