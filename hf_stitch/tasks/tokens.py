"""Causal language models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hf_stitch.adapters import Adapter
from hf_stitch.adapters.preprocess import OFFSETS
from hf_stitch.data import Batch, Samples
from hf_stitch.tasks.base import Answers, Array, Side, Task, Whole, as_array, check_predictions
from hf_stitch.tasks.heads import logits_of


class NextToken(Task):
    """The next token of texts: how likely it was, and whether the target predicts the same one."""

    causal = True
    unused = "next tokens are scored"
    kept = ("tokens", "cross_entropy", "agreement")
    figures = ("relative_perplexity", "perplexity", "agreement")

    def inputs(self, network: Whole, samples: Sequence[Any]) -> tuple[Mapping[str, Any], Answers]:
        """Return the inputs, and the characters and bytes that are predicted, if they are known."""
        tokenizer = network.processor if isinstance(network, Adapter) else None
        if not getattr(tokenizer, "is_fast", False) or not all(isinstance(sample, str) for sample in samples):
            return network.preprocess(samples), {}
        assert isinstance(network, Adapter)
        inputs = network.preprocess(samples, offsets=True)
        spans, mask = inputs.pop(OFFSETS), inputs["attention_mask"].bool() if "attention_mask" in inputs else None
        sizes: list[tuple[int, int]] = []
        for row, (text, span) in enumerate(zip(samples, spans.tolist(), strict=True)):
            real = [True] * len(span) if mask is None else mask[row].tolist()
            predicted = [s for i, s in enumerate(span) if i and real[i] and real[i - 1] and s[1]]
            part = text[min(s[0] for s in predicted) : max(s[1] for s in predicted)] if predicted else ""
            sizes.append((len(part), len(part.encode())))
        characters, size = np.array(sizes, dtype=np.float64).T
        return inputs, {"characters": characters, "bytes": size}

    def measure(self, outputs: Mapping[str, Any], source: Side, target: Side) -> dict[str, Answers]:
        """Measure the number of tokens, their summed cross-entropy, and those that agree."""
        (_, inputs), (twin, own) = source, target
        _check_same_tokens(inputs, own)
        logits = {name: logits_of(output) for name, output in outputs.items()}
        labels = own["input_ids"][:, 1:]
        mask = (
            own["attention_mask"].bool()
            if "attention_mask" in own
            else torch.ones_like(own["input_ids"], dtype=torch.bool)
        )
        real = mask[:, :-1] & mask[:, 1:]  # the first token of a text has no context, whichever side is padded
        check_predictions(logits["target"][:, :-1].float().logsumexp(-1).where(real, 0), twin)
        best = logits["target"][:, :-1].argmax(-1)
        measured: dict[str, Answers] = {}
        for name, values in logits.items():
            if values.shape[:2] != own["input_ids"].shape:
                raise ValueError(
                    f"the {name} model outputs {values.shape[1]} tokens where the target has {labels.shape[1] + 1}: "
                    "use the same tokenizer for both networks and pooling='none'"
                )
            ahead = values[:, :-1].float()
            loss = functional.cross_entropy(ahead.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
            measured[name] = {
                "tokens": as_array(real.sum(1)),
                "cross_entropy": as_array((loss * real).sum(1)),
                "agreement": as_array(((ahead.argmax(-1) == best) & real).sum(1)),
                "vocabulary": np.full(len(labels), float(values.shape[-1])),
            }
        return measured

    def measure_alone(self, network: Adapter, batch: Batch) -> Answers:
        """Measure a language model on its own tokens, which cannot be compared with those of the target."""
        inputs, sizes = self.inputs(network, batch.samples)
        found = self.measure({"target": network.forward(inputs)}, (batch, inputs), (batch, inputs))["target"]
        return {**found, **sizes, "agreement": np.full(len(found["tokens"]), np.nan)}

    def joined(self, parts: Mapping[str, Sequence[Answers]], samples: Samples) -> dict[str, Answers]:
        """Concatenate the measures of batches, of which one predicts a token."""
        found = super().joined(parts, samples)
        if not found["target"]["tokens"].any():
            raise ValueError(
                f"no text has a second token to predict, neither sample {samples.ids[0]!r} nor any other: pass longer "
                "texts"
            )
        return found

    def chance(self, measured: Mapping[str, Answers], seed: int) -> Answers:
        """Return the measures of a predictor for which all tokens are equally likely."""
        target = measured["target"]
        tokens, vocabulary = target["tokens"], target["vocabulary"]
        return {**target, "cross_entropy": tokens * np.log(vocabulary), "agreement": tokens / vocabulary}

    def figures_of(self, own: Mapping[str, Array], target: Mapping[str, Array], n: Array) -> dict[str, Array]:
        """Compute perplexities, cross-entropy and agreement per token, and bits of the predicted text."""
        tokens = own["tokens"]
        loss, reference = own["cross_entropy"] / tokens, target["cross_entropy"] / tokens
        figures = {
            "perplexity": np.exp(loss),
            "relative_perplexity": np.exp(loss - reference),
            "cross_entropy": loss,
            "agreement": own["agreement"] / tokens,
        }
        if np.isnan(own["agreement"]).any():  # on other tokens than the target
            figures = {name: np.full_like(values, np.nan) for name, values in figures.items()}
        if "characters" in own and "characters" in target:
            bits = own["cross_entropy"] / np.log(2)
            figures |= {f"bits_per_{unit}": bits / own[f"{unit}s"] for unit in ("character", "byte")}
        return figures


def _check_same_tokens(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Check that both networks receive the same tokens at the same positions."""
    for name in ("input_ids", "attention_mask"):
        if name in source and name in target and not torch.equal(source[name], target[name].to(source[name].device)):
            raise ValueError(
                f"source and target receive different {name} for the same text: comparing next tokens requires the "
                "same tokenizer and padding side for both networks"
            )
