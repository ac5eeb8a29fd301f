"""Causal language models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hf_stitch.adapters import Adapter
from hf_stitch.adapters.preprocess import OFFSETS
from hf_stitch.data import Batch, Samples
from hf_stitch.tasks.base import (
    IGNORED,
    Answers,
    Array,
    Side,
    Task,
    Whole,
    as_arrays,
    check_predictions,
    divergence,
    logits_of,
    most_likely,
    total,
)

EXCLUDED = 1e30
"""Size of logits that networks set to exclude a token."""

TOLERANCE = {True: 1e-4, False: 3e-2}
"""Whether logits have at least 32 bits -> largest change of the logits of earlier tokens that counts as a rounding
error, relative to the largest logit."""


class PerToken(Task):
    """Task with a prediction for some tokens of each text."""

    per_token = True
    counted: ClassVar[str]  # unit with a prediction, and the measure that counts it

    def counts(
        self, logits: Mapping[str, Tensor], labels: Tensor, twin: Batch, *, labelled: bool = True
    ) -> dict[str, dict[str, Any]]:
        """Count predictions and agreements; with labels also correct predictions, and sum the cross-entropies."""
        has_label = labels != IGNORED
        check_predictions(logits["target"].float().logsumexp(-1).where(has_label, 0), twin)
        best, measured = most_likely(logits["target"]), dict[str, dict[str, Tensor]]()
        target_logs = logits["target"].float().log_softmax(-1)
        for name, values in logits.items():
            predicted, logs = most_likely(values), values.float().log_softmax(-1)
            row = {self.counted: has_label.sum(1), "agreement": ((predicted == best) & has_label).sum(1)}
            if labelled:
                row["right"] = ((predicted == labels) & has_label).sum(1)
                loss = functional.nll_loss(logs.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
                row["cross_entropy"] = loss.view_as(labels).sum(1)
            if logs.shape == target_logs.shape:
                row["kl_divergence"] = divergence(logs, target_logs).where(has_label, 0).sum(1)
            measured[name] = row
        return as_arrays(measured)

    def joined(self, parts: Mapping[str, Sequence[Answers]], samples: Samples) -> dict[str, Answers]:
        """Concatenate the measures of batches; raise an error if no token has a prediction."""
        measures = super().joined(parts, samples)
        self.check_some(bool(measures["target"][self.counted].any()), samples)
        return measures


class NextToken(PerToken):
    """Next token of texts: likelihood of the true token, and agreement with the target."""

    name = "text-generation"
    title = "the next token"
    family = "next tokens"
    heads = ("ForCausalLM", "LMHead", "GenerationDecoder")
    models: ClassVar[Mapping[str, str]] = {"": "hf_stitch.artefacts.language:StitchedModelForCausalLM"}
    pipelines: ClassVar[Mapping[str, str]] = {"": name}
    figures: ClassVar[Mapping[str, bool]] = {
        "perplexity": False, "relative_perplexity": False, "cross_entropy": False, "agreement": True,
        "kl_divergence": False, "bits_per_character": False, "bits_per_byte": False,
    }  # fmt: skip
    compared = ("relative_perplexity", "perplexity", "agreement")
    kept = ("tokens", "cross_entropy", "agreement")
    causal = True
    counted = "tokens"
    unused = "next tokens are scored"
    nothing = "texts must contain a second token to predict"

    def difference(self, network: Adapter, output: Any) -> str:
        """Return the unmet requirement of a causal language model on a network."""
        name, content, logits = type(network.model).__name__, network.interface.content[0], logits_of(output)
        inputs = dict(network.example)
        ids, shape = inputs[content], tuple(logits.shape)
        if ids.is_floating_point() or shape[:-1] != tuple(ids.shape):
            return f"logits (samples, tokens, vocabulary) for token ids {tuple(ids.shape)}, but {name} outputs {shape}"
        changed_ids = torch.cat((ids[:, :-1], ids[:, :1]), 1)
        output_changed = logits_of(network.forward({**inputs, content: changed_ids}))
        changed_logits, expected = (
            logit_tensor[:, :-1].float().clamp(-EXCLUDED, EXCLUDED) for logit_tensor in (output_changed, logits)
        )
        if not changed_logits.numel():
            return ""
        largest = expected.abs().where(expected.abs() < EXCLUDED, 0).max()
        if bool(((changed_logits - expected).abs() <= TOLERANCE[torch.finfo(logits.dtype).bits >= 32] * largest).all()):
            return ""
        return f"a causal language model, but the logits of {name} for a token depend on later tokens"

    def sized_inputs(self, network: Whole, batch: Batch) -> tuple[Mapping[str, Any], Answers]:
        """Return the inputs, and the number of predicted characters and bytes with a fast tokenizer."""
        samples = batch.samples
        tokenizer = network.processor if isinstance(network, Adapter) else None
        if not getattr(tokenizer, "is_fast", False) or not all(isinstance(sample, str) for sample in samples):
            return network.preprocess(samples), {}
        assert isinstance(network, Adapter)
        inputs = network.preprocess(samples, offsets=True)
        spans, mask = inputs.pop(OFFSETS), inputs["attention_mask"].bool() if "attention_mask" in inputs else None
        sizes: list[tuple[int, int]] = []
        for row, (text, span) in enumerate(zip(samples, spans.tolist(), strict=True)):
            is_real = [True] * len(span) if mask is None else mask[row].tolist()
            predicted = [s for i, s in enumerate(span) if i and is_real[i] and is_real[i - 1] and s[1]]
            part = text[min(s[0] for s in predicted) : max(s[1] for s in predicted)] if predicted else ""
            sizes.append((len(part), len(part.encode())))
        characters, byte_counts = np.array(sizes, dtype=np.float64).T
        return inputs, {"characters": characters, "bytes": byte_counts}

    def measure(self, outputs: Mapping[str, Any], source: Side, target: Side) -> dict[str, Answers]:
        """Measure the number of tokens, their summed cross-entropy, and the number of agreements."""
        (_, inputs), (twin, target_inputs) = source, target
        check_same_tokens(inputs, target_inputs)
        logits = {name: logits_of(output) for name, output in outputs.items()}
        labels = following(target_inputs)
        for name, values in logits.items():
            if values.shape[:2] != labels.shape:
                raise ValueError(
                    f"the {name} model outputs {values.shape[1]} tokens, but the target has {labels.shape[1]}; use the "
                    "same tokenizer for both networks and pooling='none'"
                )
        predicting = {name: values[:, :-1] for name, values in logits.items()}
        return {
            name: {**row, "vocabulary": np.full(len(labels), float(logits[name].shape[-1]))}
            for name, row in self.counts(predicting, labels[:, :-1], twin).items()
        }

    def measure_alone(self, network: Adapter, batch: Batch) -> Answers:
        """Measure a language model on its own tokens, which differ from the tokens of the target."""
        inputs, sizes = self.sized_inputs(network, batch)
        measures = self.measure({"target": network.forward(inputs)}, (batch, inputs), (batch, inputs))["target"]
        return {**measures, **sizes, "agreement": np.full(len(measures["tokens"]), np.nan)}

    def chance(self, measured: Mapping[str, Answers], seed: int) -> Answers:
        """Return the measures of a uniform prediction over all tokens."""
        target = {name: values for name, values in measured["target"].items() if name != "kl_divergence"}
        tokens, vocabulary = target["tokens"], target["vocabulary"]
        return {**target, "cross_entropy": tokens * np.log(vocabulary), "agreement": tokens / vocabulary}

    def figures_of(self, answers: Mapping[str, Array], target: Mapping[str, Array], weights: Array) -> dict[str, Array]:
        """Compute perplexities, cross-entropy and agreement per token, and bits of the predicted text."""
        answers, target = ({name: total(weights, values) for name, values in row.items()} for row in (answers, target))
        tokens = answers["tokens"]
        loss, reference = answers["cross_entropy"] / tokens, target["cross_entropy"] / tokens
        figures: dict[str, Array] = {
            "perplexity": np.exp(loss),
            "relative_perplexity": np.exp(loss - reference),
            "cross_entropy": loss,
            **{name: answers[name] / tokens for name in ("agreement", "kl_divergence") if name in answers},
        }
        if np.isnan(answers["agreement"]).any():  # different tokens than the target's
            figures = {name: np.full_like(values, np.nan) for name, values in figures.items()}
        if "characters" in answers and "characters" in target:
            bits = answers["cross_entropy"] / np.log(2)
            figures |= {f"bits_per_{unit}": bits / answers[f"{unit}s"] for unit in ("character", "byte")}
        return figures

    def apart(self, answers: Answers, target: Answers) -> Array:
        """Return the absolute difference of the cross-entropies per token."""
        return np.abs(_per_token(answers) - _per_token(target))

    def shown(self, answers: Answers, place: int, names: Mapping[int, str]) -> str:
        """Return the cross-entropy per token."""
        return f"{_per_token(answers)[place]:.3f} nats per token"

    def asked(self, network: Any, samples: Sequence[Any], labels: Sequence[Any] | None) -> Tensor:
        """Return the next token of each token."""
        return following(network.preprocess(samples))


def following(inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the next token of each token; the first token of a text is not predicted, for both padding sides."""
    ids, real = inputs["input_ids"], mask_of(inputs)
    labels = torch.full_like(ids, IGNORED)
    labels[:, :-1] = torch.where(real[:, :-1] & real[:, 1:], ids[:, 1:], IGNORED)
    return labels


def mask_of(inputs: Mapping[str, Tensor]) -> Tensor:
    """Return a mask of real tokens."""
    ids = inputs["input_ids"]
    return inputs["attention_mask"].bool() if "attention_mask" in inputs else torch.ones_like(ids, dtype=torch.bool)


def _per_token(answers: Answers) -> Array:
    tokens = answers["tokens"]
    return np.divide(answers["cross_entropy"], tokens, out=np.zeros_like(tokens), where=tokens > 0)


def check_same_tokens(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Check that both networks receive the same tokens at the same positions."""
    for name in ("input_ids", "attention_mask"):
        if name in source and name in target and not torch.equal(source[name], target[name].to(source[name].device)):
            raise ValueError(
                f"source and target receive different {name} for the same text; use the same tokenizer and padding "
                "side for both networks"
            )
