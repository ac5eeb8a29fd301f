"""Classification with one class per sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from hf_stitch.data.classes import numbered_as, warn_of_other_classes
from hf_stitch.tasks.base import Answers, Array, Side, Task, as_array, check_predictions
from hf_stitch.tasks.heads import check_labels, logits_of


class Classification(Task):
    """Classes of images or texts: right ones, and those that the target predicts too."""

    classifies = True
    kept = ("right", "agreement")
    figures = ("relative_accuracy", "accuracy", "agreement")
    numbered = staticmethod(numbered_as)
    warn_of_labels = staticmethod(warn_of_other_classes)

    def measure(self, outputs: Mapping[str, Any], source: Side, target: Side) -> dict[str, Answers]:
        """Measure class, agreement and distance; with labels also correctness and cross-entropy."""
        batch, logits = source[0], {name: logits_of(output) for name, output in outputs.items()}
        check_predictions(logits["target"].float().logsumexp(-1, keepdim=True), batch)
        predicted = {name: values.float().argmax(-1) for name, values in logits.items()}
        measured: dict[str, Answers] = {}
        for name, values in logits.items():
            row = {"class": as_array(predicted[name]), "agreement": as_array(predicted[name] == predicted["target"])}
            if batch.labels is not None:
                check_labels(batch, values.shape[-1])
                labels = torch.as_tensor(batch.labels, device=values.device)
                row["label"] = as_array(labels)
                row["right"] = as_array(predicted[name] == labels)
                row["cross_entropy"] = as_array(functional.cross_entropy(values.float(), labels, reduction="none"))
            if values.shape == logits["target"].shape:  # total variation distance between class probabilities
                apart = values.float().softmax(-1) - logits["target"].float().softmax(-1)
                row["distance"] = as_array(apart.abs().sum(-1) / 2)
            measured[name] = row
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

    def figures_of(self, own: Mapping[str, Array], target: Mapping[str, Array], n: Array) -> dict[str, Array]:
        """Compute accuracies, cross-entropy and agreement."""
        found: dict[str, Array] = {}
        if "right" in own:
            right, reference = own["right"], target["right"]
            found["accuracy"], relative = right / n, np.full_like(right, np.nan)
            found["relative_accuracy"] = np.divide(right, reference, out=relative, where=reference > 0)
            if "cross_entropy" in own:
                found["cross_entropy"] = own["cross_entropy"] / n
        return {**found, "agreement": own["agreement"] / n}
