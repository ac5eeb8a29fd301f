"""A task with a defect to choose."""

from __future__ import annotations

from itertools import count
from typing import Any, ClassVar

import numpy as np
import torch
from broken import Broken
from hf_stitch_testing import check_task
from torch import Tensor, nn

import hf_stitch
from hf_stitch.data import Samples
from hf_stitch.registry import registries
from hf_stitch.tasks.base import Answers, Array
from hf_stitch.tasks.per_sample import ImageClassification, TextClassification


class Images(ImageClassification):
    """Classes of images."""

    name = "images"
    defect: ClassVar[str] = ""
    calls: ClassVar[Any] = count()

    def model_for(self, modality: str) -> Any:
        other = self.defect == "head" and next(self.calls) % 2
        return (TextClassification() if other else super()).model_for(modality)

    def measure(self, outputs: Any, source: Any, target: Any) -> dict[str, Answers]:
        found = super().measure(outputs, source, target)
        if self.defect == "batches":
            for row in found.values():
                row["right"] = np.asarray(row["right"]) * len(row["right"])
        return found

    def figures_of(self, answers: Any, target: Any, weights: Array) -> dict[str, Array]:
        found = super().figures_of(answers, target, weights)
        if self.defect == "itself":
            found = {"other": found.pop("accuracy"), **found}
        if self.defect == "resamples":
            found["agreement"] = found["agreement"] * weights.max()
        if self.defect == "several":
            found["agreement"] = found["agreement"] * found["agreement"].shape[-1]
        return found

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels) * (len(labels) if self.defect == "loss" else 1)

    def imitation_loss(self, logits: Tensor, target: Tensor, temperature: float) -> Tensor:
        found = super().imitation_loss(logits, target, temperature)
        return found + logits.sum(-1) if self.defect == "imitation" else found


def arguments(defect: str) -> tuple[Any, ...]:
    changes = {"defect": defect} | ({"compared": ("hit_rate",)} if defect == "declared" else {})
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))
    images = torch.randn(20, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    data = Samples.of(images, label=[place % 3 for place in range(20)])
    return type("Changed", (Images,), changes)(), hf_stitch.load(net, example_inputs=images[:2]), data


TASKS = {
    "declared": "compared must be a subset of figures, got hit_rate",
    "head": "the stitched model must be a",
    "itself": "figures must be declared",
    "batches": "for a single sample and in a batch must be equal",
    "resamples": "agreement of weighted and of repeated samples must be equal",
    "several": "agreement of a predictor, alone and with a second one, must be equal",
    "loss": "the loss of repeated samples must be",
    "imitation": "must have a zero gradient",
}
TABLES = [Broken(check_task, arguments, TASKS, registries.tasks)]
