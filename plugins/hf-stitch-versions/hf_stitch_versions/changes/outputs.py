"""How far the outputs of two networks lie apart, sample by sample."""

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
"""Tasks whose outputs are logits of classes or tokens."""

CAUSAL = "text-generation"
"""The task whose labels are the next tokens."""

BINS = 10
"""Number of bins of confidence of the calibration error."""


@dataclass(frozen=True)
class Measure:
    """How outputs are compared: by the Kullback-Leibler divergence, or by squared differences without classes.

    Attributes:
        name: ``KL`` or ``squared difference``.
        what: What is compared, in words.
        causal: Whether the next token is the label of each token.
        nested: Whether one vocabulary may be the beginning of the other, as after tokens were added.
    """

    name: str
    what: str
    causal: bool = False
    nested: bool = False

    @classmethod
    def of(cls, task: str | None) -> Measure:
        """Return the measure for a task of the head of a network."""
        if task in DISTRIBUTIONS:
            of = "tokens" if task in (CAUSAL, "fill-mask") else "classes"
            return cls("KL", f"Kullback-Leibler divergence of the {of}, in nats", task == CAUSAL)
        return cls("squared difference", "squared difference of the outputs, over that of the outputs of other samples")

    @property
    def per_token(self) -> bool:
        """Whether outputs are probabilities of tokens."""
        return "tokens" in self.what

    @property
    def is_divergence(self) -> bool:
        """Whether outputs are probabilities of classes."""
        return self.name == "KL"

    def output(self, output: Any) -> Tensor:
        """Return what is compared of the output of a network, in float64: log-probabilities, or numbers."""
        if self.is_divergence:
            if isinstance(output, Mapping) and "logits" not in output:
                raise ValueError(
                    "one network has a head and the other has none: load both with one, or without "
                    "(task='feature-extraction'), or leave out the data to compare weights"
                )
            return logits_of(output).double().log_softmax(-1)
        found = answers(output)
        first = next(iter(found.values()))
        return torch.cat([value for value in found.values() if value.shape[:-1] == first.shape[:-1]], -1)

    def left_out(self, output: Any) -> list[str]:
        """Return the names of what is not compared of the output of a network."""
        if self.is_divergence:
            return []
        found = answers(output)
        first = next(iter(found.values()))
        return [name for name, value in found.items() if value.shape[:-1] != first.shape[:-1]]

    def fits(self, reference: Tensor, other: Tensor) -> bool:
        """Return whether two outputs can be compared: of one shape, or of vocabularies of which one is longer."""
        if self.nested and self.per_token:
            return reference.shape[:-1] == other.shape[:-1]
        return reference.shape == other.shape

    def apart(self, reference: Tensor, other: Tensor, mask: Tensor | None) -> Array:
        """Return how far an output is from that of the reference, one number per sample: a mean over its tokens.

        Of two vocabularies, the common tokens are compared, and −log of their probability in the longer one is added.
        If the longer one is not the reference, this is the divergence, else it would be infinite.

        Args:
            reference: Output of the reference, of :meth:`output`, (batch, …, width).
            other: Output of another network; the expectation is that of the reference.
            mask: (batch, tokens), true for real tokens; ``None`` if all are.

        Returns:
            (batch,) float64.
        """
        if self.is_divergence:
            lost = elsewhere(reference, other)
            width = min(reference.shape[-1], other.shape[-1])
            if reference.shape != other.shape:
                reference, other = (each[..., :width].log_softmax(-1) for each in (reference, other))
            values = lost + (reference.exp() * (reference - other).where(reference > -torch.inf, 0)).sum(-1)
        else:
            values = (reference - other).square().sum(-1)
        return per_sample(values, mask)

    def spread(self, reference: Tensor, mask: Tensor | None) -> dict[str, Array]:
        """Return sums over which squared differences are relative: of each sample, those of the outputs and squares."""
        rows = reference.reshape(len(reference), -1, reference.shape[-1])
        squares = per_sample(rows.square().sum(-1), mask)
        means = np.stack([per_sample(rows[..., each], mask) for each in range(rows.shape[-1])], 1)
        return {"squares": squares, "means": means}


def answers(output: Any) -> dict[str, Tensor]:
    """Return what a network answers, in float64, with two axes or more: its first output, and others of its own.

    Start and end of an answer, classes and boxes are several. Hidden states and what is nested count as the first only.
    """
    every = {place: value.double() for place, value in values_of(output, whole=True).items() if is_value(value)}
    first = next(iter(every))
    found = {place: v for place, v in every.items() if place == first or not ("." in place or "hidden" in place)}
    return {place: value if value.dim() > 1 else value.reshape(-1, 1) for place, value in found.items()}


def elsewhere(one: Tensor, other: Tensor) -> Tensor:
    """Return −log of the probability of the tokens that both networks have, in the one with the longer vocabulary."""
    longer, width = max(one, other, key=lambda each: each.shape[-1]), min(one.shape[-1], other.shape[-1])
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
    """Return what is measured of the output of one network: confidence, and with labels what is right and likely.

    Args:
        measure: How outputs are compared; nothing is measured of outputs without classes.
        output: Log-probabilities, of :meth:`Measure.output`.
        ids: Token ids of the inputs, the labels of a causal language model.
        labels: Classes of the samples, if they are known.
        mask: True for real tokens.

    Returns:
        Measure -> (batch,) float64: ``confidence``, ``right``, ``cross_entropy``.
    """
    if not measure.is_divergence:
        return {}
    best = output.max(-1)
    found = {"confidence": per_sample(best.values.exp(), mask)}
    if measure.causal and ids is not None and output.shape[:2] == ids.shape:
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(ids.device)
        asked, counted = ids[:, 1:], real[:, 1:] & real[:, :-1] & (ids[:, 1:] < output.shape[-1])
        asked = asked.where(counted, 0)
        loss = functional.nll_loss(output[:, :-1].flatten(0, 1), asked.flatten(), reduction="none").view_as(asked)
        right = (best.indices[:, :-1] == asked).double()
        return found | {"cross_entropy": per_sample(loss, counted), "right": per_sample(right, counted)}
    if labels is None or output.dim() != 2:
        return found
    asked = torch.as_tensor(labels, device=output.device)
    loss = functional.nll_loss(output, asked, reduction="none")
    return found | {
        "cross_entropy": per_sample(loss, None),
        "right": per_sample((best.indices == asked).double(), None),
    }


def agreement(one: Tensor, other: Tensor, mask: Tensor | None) -> Array:
    """Return the share of the predictions of each sample that are the same class in both networks."""
    return per_sample((one.argmax(-1) == other.argmax(-1)).double(), mask)


def calibration_error(measured: Mapping[str, Array]) -> float:
    """Return the expected calibration error of classes (Guo et al. 2017, equation 3), with ten bins of equal width."""
    confidence, right = measured["confidence"], measured["right"]
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [abs(float((right - confidence)[bins == each].sum())) for each in range(BINS)]
    return sum(gaps) / len(confidence)
