"""Distances between the outputs of two networks, per sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from hf_stitch.tasks.base import logits_of
from hf_stitch_versions.recording import is_value, values_of

Array = NDArray[np.float64]

DISTRIBUTIONS = ("image-classification", "text-classification", "text-generation", "fill-mask", "token-classification")
"""Tasks with logits of classes or tokens as outputs."""

CAUSAL = "text-generation"
"""Task with the next tokens as labels."""

BINS = 10
"""Number of confidence bins of the calibration error."""


@dataclass(frozen=True)
class Measure:
    """Distance between outputs: the Kullback-Leibler divergence, or squared differences for outputs without classes.

    Attributes:
        name: ``KL`` or ``squared difference``.
        what: The distance in words.
        causal: Whether the next token is the label of each token.
        nested: Whether the first vocabulary may be the beginning of the second, or the reverse, as after adding tokens.
    """

    name: str
    what: str
    causal: bool = False
    nested: bool = False

    @classmethod
    def of(cls, task: str | None) -> Measure:
        """Return the measure for the task of the head of a network."""
        if task in DISTRIBUTIONS:
            unit = "tokens" if task in (CAUSAL, "fill-mask") else "classes"
            return cls("KL", f"Kullback-Leibler divergence of the {unit}, in nats", task == CAUSAL)
        return cls("squared difference", "squared difference of the outputs, over their variance between samples")

    @property
    def per_token(self) -> bool:
        """Whether outputs are probabilities of tokens."""
        return "tokens" in self.what

    @property
    def is_divergence(self) -> bool:
        """Whether outputs are probabilities of classes."""
        return self.name == "KL"

    def output(self, output: Any) -> Tensor:
        """Return the compared part of the output of a network, in float64: log-probabilities, or numbers."""
        if self.is_divergence:
            if isinstance(output, Mapping) and "logits" not in output:
                raise ValueError(
                    "only one of the networks has a head: load both with a head or both without "
                    "(task='feature-extraction'), or omit the data to compare weights"
                )
            return logits_of(output).double().log_softmax(-1)
        tensors = answers(output)
        first = next(iter(tensors.values()))
        return torch.cat([value for value in tensors.values() if value.shape[:-1] == first.shape[:-1]], -1)

    def left_out(self, output: Any) -> list[str]:
        """Return the names of the outputs of a network that are not compared."""
        if self.is_divergence:
            return []
        tensors = answers(output)
        first = next(iter(tensors.values()))
        return [name for name, value in tensors.items() if value.shape[:-1] != first.shape[:-1]]

    def fits(self, reference: Tensor, second: Tensor) -> bool:
        """Return whether two outputs have the same shape, or vocabularies of different lengths are allowed."""
        if self.nested and self.per_token:
            return reference.shape[:-1] == second.shape[:-1]
        return reference.shape == second.shape

    def apart(self, reference: Tensor, second: Tensor, mask: Tensor | None) -> Array:
        """Return the distance of an output from the reference, one number per sample: a mean over its tokens.

        With two vocabularies, the common tokens are compared, and −log of their probability in the longer vocabulary is
        added. If the longer one is not the reference, this is the divergence, else it would be infinite.

        Args:
            reference: Output of the reference, from :meth:`output`, (batch, …, width). Its probabilities weight the
                divergence.
            second: Output of the second network.
            mask: (batch, tokens), true for real tokens; ``None`` without padding.

        Returns:
            (batch,) float64.
        """
        if self.is_divergence:
            outside = elsewhere(reference, second)
            width = min(reference.shape[-1], second.shape[-1])
            if reference.shape != second.shape:
                reference, second = (logs[..., :width].log_softmax(-1) for logs in (reference, second))
            values = outside + (reference.exp() * (reference - second).where(reference > -torch.inf, 0)).sum(-1)
        else:
            values = (reference - second).square().sum(-1)
        return per_sample(values, mask)

    def spread(self, reference: Tensor, mask: Tensor | None) -> dict[str, Array]:
        """Return the means of the outputs and of their squares per sample: the scale of squared differences."""
        rows = reference.reshape(len(reference), -1, reference.shape[-1])
        squares = per_sample(rows.square().sum(-1), mask)
        means = np.stack([per_sample(rows[..., feature], mask) for feature in range(rows.shape[-1])], 1)
        return {"squares": squares, "means": means}


def answers(output: Any) -> dict[str, Tensor]:
    """Return the outputs of a network in float64, with at least two axes: the first one, and further top-level outputs.

    Start and end logits, or classes and boxes, are several outputs. Hidden states and nested outputs count only if they
    come first.
    """
    tensors = {place: value.double() for place, value in values_of(output, whole=True).items() if is_value(value)}
    first = next(iter(tensors))
    outputs = {place: v for place, v in tensors.items() if place == first or not ("." in place or "hidden" in place)}
    return {place: value if value.dim() > 1 else value.reshape(-1, 1) for place, value in outputs.items()}


def elsewhere(first: Tensor, second: Tensor) -> Tensor:
    """Return −log of the probability of the common tokens, in the network with the longer vocabulary."""
    longer, width = max(first, second, key=lambda output: output.shape[-1]), min(first.shape[-1], second.shape[-1])
    return longer.new_zeros(()) if longer.shape[-1] == width else -longer[..., :width].logsumexp(-1)


def per_sample(values: Tensor, mask: Tensor | None) -> Array:
    """Return the mean of the values of each sample, over real tokens."""
    if values.dim() == 1:
        return np.asarray(values.cpu().numpy(), dtype=np.float64)
    if mask is not None and values.shape[:2] == mask.shape:
        weights = mask.to(values).reshape(*mask.shape, *[1] * (values.dim() - 2)).expand_as(values)
        values = values.where(weights > 0, 0)
        return np.asarray((values.flatten(1).sum(1) / weights.flatten(1).sum(1)).cpu().numpy(), dtype=np.float64)
    return np.asarray(values.flatten(1).mean(1).cpu().numpy(), dtype=np.float64)


def quality(
    measure: Measure, output: Tensor, ids: Tensor | None, labels: Sequence[int] | None, mask: Tensor | None
) -> dict[str, Array]:
    """Return quality measures of the output of one network: confidence and, with labels, accuracy and cross-entropy.

    Args:
        measure: The distance between outputs; without classes nothing is measured.
        output: Log-probabilities, from :meth:`Measure.output`.
        ids: Token ids of the inputs, the labels of a causal language model.
        labels: Classes of the samples; ``None`` without labels.
        mask: True for real tokens.

    Returns:
        Measure -> (batch,) float64: ``confidence``, ``right``, ``cross_entropy``.
    """
    if not measure.is_divergence:
        return {}
    predictions = output.max(-1)
    measures = {"confidence": per_sample(predictions.values.exp(), mask)}
    if measure.causal and ids is not None and output.shape[:2] == ids.shape:
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(ids.device)
        expected, counted = ids[:, 1:], real[:, 1:] & real[:, :-1] & (ids[:, 1:] < output.shape[-1])
        expected = expected.where(counted, 0)
        loss = functional.nll_loss(output[:, :-1].flatten(0, 1), expected.flatten(), reduction="none").view_as(expected)
        is_right = (predictions.indices[:, :-1] == expected).double()
        return measures | {"cross_entropy": per_sample(loss, counted), "right": per_sample(is_right, counted)}
    if labels is None or output.dim() != 2:
        return measures
    expected = torch.as_tensor(labels, device=output.device)
    loss = functional.nll_loss(output, expected, reduction="none")
    return measures | {
        "cross_entropy": per_sample(loss, None),
        "right": per_sample((predictions.indices == expected).double(), None),
    }


def agreement(first: Tensor, second: Tensor, mask: Tensor | None) -> Array:
    """Return the share of equal predictions of two networks, per sample."""
    return per_sample((first.argmax(-1) == second.argmax(-1)).double(), mask)


def calibration_error(measured: Mapping[str, Array]) -> float:
    """Return the expected calibration error (Guo et al. 2017, equation 3), with ten bins of equal width."""
    confidence, right = measured["confidence"], measured["right"]
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [abs(float((right - confidence)[bins == index].sum())) for index in range(BINS)]
    return sum(gaps) / len(confidence)
