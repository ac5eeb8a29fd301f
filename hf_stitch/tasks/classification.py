"""Classification with one class per sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hf_stitch.adapters import Adapter
from hf_stitch.data import Batch, Samples
from hf_stitch.data.classes import numbered_as, warn_of_other_classes
from hf_stitch.errors import see
from hf_stitch.tasks.base import Answers, Array, Side, Task, as_arrays, check_predictions, most_likely, ratio, total
from hf_stitch.tasks.heads import divergence, logits_of, widened

OF_IMAGES = "hf_stitch.artefacts.classification:StitchedModelForImageClassification"
OF_TEXTS = "hf_stitch.artefacts.classification:StitchedModelForSequenceClassification"
MULTI_LABEL, REGRESSION = "multi_label_classification", "regression"
"""Problem types of transformers that are no classification with one class per sample."""


class OfSamples(Task):
    """A task with one vector of outputs per sample."""

    family = "outputs per sample"
    models: ClassVar[Mapping[str, str]] = {"text": OF_TEXTS, "": OF_IMAGES}
    pipelines: ClassVar[Mapping[str, str]] = {"text": "text-classification", "": "image-classification"}
    describes_outputs = True
    least: ClassVar[int] = 1  # least number of outputs
    needs: ClassVar[str]  # the output that it needs, in words

    def difference(self, network: Adapter, output: Any) -> str:
        """Return what this task needs and the output of a network is not."""
        shape = tuple(logits_of(output).shape)
        wrong = len(shape) != 2 or shape[1] < self.least
        return f"{self.needs}, but {type(network.model).__name__} outputs {shape}" if wrong else ""


class OfLabelValues(OfSamples):
    """A task whose labels have a number for each output; the measure of an output is named by :attr:`kept`."""

    heads = ("ForImageClassification", "ForSequenceClassification")

    def labels(self, samples: Samples | Batch) -> Sequence[Any] | None:
        """Return the numbers of each sample."""
        return samples.label_values

    def measure(self, outputs: Mapping[str, Any], source: Side, target: Side) -> dict[str, Answers]:
        """Return the outputs, of the target also the labels."""
        batch, found = source[0], {name: logits_of(output) for name, output in outputs.items()}
        check_predictions(found["target"].float(), batch)
        measured = {name: as_arrays({"": {self.kept[0]: values}})[""] for name, values in found.items()}
        if batch.label_values is not None:
            self.check_labels(batch, found["target"].shape[-1])
            numbers = np.asarray(batch.label_values, dtype=np.float64)
            measured["target"]["label"] = numbers.reshape(len(numbers), -1)
        return {**measured}

    def asked(self, network: Any, samples: Sequence[Any], labels: Sequence[Any] | None) -> Tensor:
        """Return the labels in float32, (samples, outputs)."""
        return torch.tensor(labels, dtype=torch.float32).reshape(len(samples), -1)


class Classification(OfSamples):
    """Classes of images or texts: right ones, and those that the target predicts too."""

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
        """Return whether the head has one class per sample."""
        kind, count = (getattr(config, name, None) for name in ("problem_type", "num_labels"))
        return super().takes(head, config) and kind not in (MULTI_LABEL, REGRESSION) and count != 1

    def labels(self, samples: Samples | Batch) -> Sequence[int] | None:
        """Return the classes."""
        return samples.labels

    def check_labels(self, samples: Samples | Batch, outputs: int) -> None:
        """Check that labels are classes of the network."""
        for id_, label in zip(samples.ids, samples.labels or (), strict=False):
            if not 0 <= label < outputs:
                raise ValueError(
                    f"sample {id_!r} has label {label}, and the target predicts classes 0 to {outputs - 1}"
                    + see("other-labels")
                )

    def measure(self, outputs: Mapping[str, Any], source: Side, target: Side) -> dict[str, Answers]:
        """Measure class, agreement, distance and divergence; with labels also correctness and cross-entropy."""
        batch, logits = source[0], {name: logits_of(output) for name, output in outputs.items()}
        check_predictions(logits["target"].float().logsumexp(-1, keepdim=True), batch)
        measured: dict[str, Answers] = {}
        for shape in dict.fromkeys(values.shape for values in logits.values()):
            names = [name for name, values in logits.items() if values.shape == shape]
            values, of_target = torch.stack([logits[name].float() for name in names]), logits["target"].float()
            predicted, logs = most_likely(values), values.log_softmax(-1)
            rows = {"class": predicted, "agreement": predicted == most_likely(of_target)}
            if batch.labels is not None:
                self.check_labels(batch, shape[-1])
                labels = torch.as_tensor(batch.labels, device=values.device).expand(len(names), -1)
                rows |= {"label": labels, "right": predicted == labels}
                rows["cross_entropy"] = -logs.gather(-1, labels[..., None]).squeeze(-1)
            if shape == of_target.shape:  # total variation distance between class probabilities
                rows["distance"] = (values.softmax(-1) - of_target.softmax(-1)).abs().sum(-1) / 2
                rows["kl_divergence"] = divergence(logs, of_target.log_softmax(-1))
            found = as_arrays({"": rows})[""]
            measured |= {name: {key: of[place].copy() for key, of in found.items()} for place, name in enumerate(names)}
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

    def figures_of(self, own: Mapping[str, Array], target: Mapping[str, Array], weights: Array) -> dict[str, Array]:
        """Compute accuracies, cross-entropy, agreement and divergence."""
        n, found = weights.sum(1)[:, None], dict[str, Array]()
        if "right" in own:
            right = total(weights, own["right"])
            found = {"accuracy": right / n, "relative_accuracy": ratio(right, total(weights, target["right"]))}
        return found | {name: total(weights, own[name]) / n for name in self.figures if name in own}

    def apart(self, own: Answers, target: Answers) -> Array:
        """Return the total variation distances between class probabilities."""
        distance: Array = own["distance"]
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
    """Return the name of a class, or its number."""
    return "none" if number < 0 else str(names.get(int(number), int(number)))
