"""Stitched models whose target classifies images or texts."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from transformers.modeling_outputs import ImageClassifierOutput, SequenceClassifierOutput

from hf_stitch.artefacts.modeling import StitchedModel
from hf_stitch.artefacts.outputs import class_loss, logits_of


class StitchedModelForImageClassification(StitchedModel):
    """A stitched model whose target classifies images; returns an ``ImageClassifierOutput``."""

    task: ClassVar[str | None] = "image-classification"
    auto_class: ClassVar[str] = "AutoModelForImageClassification"

    def _with_head(self, output: Any, labels: Tensor | None) -> ImageClassifierOutput:
        logits = logits_of(output)
        return ImageClassifierOutput(loss=class_loss(logits, labels, self.config.problem_type), logits=logits)


class StitchedModelForSequenceClassification(StitchedModel):
    """A stitched model whose target classifies texts; returns a ``SequenceClassifierOutput``."""

    task: ClassVar[str | None] = "text-classification"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"

    def _with_head(self, output: Any, labels: Tensor | None) -> SequenceClassifierOutput:
        logits = logits_of(output)
        return SequenceClassifierOutput(loss=class_loss(logits, labels, self.config.problem_type), logits=logits)
