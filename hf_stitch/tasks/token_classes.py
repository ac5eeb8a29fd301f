"""Tasks with a class for some tokens of each text: the first token of each word, or masked tokens."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from hf_stitch.adapters import Adapter
from hf_stitch.adapters.preprocess import OFFSETS
from hf_stitch.data import Batch, Samples
from hf_stitch.data.samples import chance
from hf_stitch.printing import see
from hf_stitch.tasks.base import IGNORED, Answers, Array, Side, Whole, as_arrays, logits_of, ratio, total
from hf_stitch.tasks.tokens import PerToken, check_same_tokens, mask_of

WORD = re.compile(r"\S+")  # words are separated by white space
IOB = re.compile(r"O|[BIES]-.+", re.DOTALL)
"""Class names in the IOB or IOBES scheme for entities."""

SHARE, SEED = 0.15, 0
"""Share of masked tokens of a text, and seed of the choice."""


class OfTokens(PerToken):
    """Task with a class for some tokens of each text, found by the tokenizer of a network."""

    def __init__(self, network: Any = None) -> None:
        """Store the network, which provides the tokenizer and the class names."""
        self._network = network

    def about(self, network: Any) -> Self:
        """Return the task for a network, with its tokenizer and class names."""
        return type(self)(network)

    def difference(self, network: Adapter, output: Any) -> str:
        """Return the unmet requirement of this task on the output of a network."""
        shape, ids = tuple(logits_of(output).shape), dict(network.example)[network.interface.content[0]]
        is_wrong = len(shape) != 3 or shape[:2] != tuple(ids.shape[:2]) or ids.is_floating_point()
        expected = f"logits (samples, tokens, classes) for token ids {tuple(ids.shape)}"
        return f"{expected}, but {type(network.model).__name__} outputs {shape}" if is_wrong else ""

    def apart(self, answers: Answers, target: Answers) -> Array:
        """Return the share of different predictions for each sample."""
        count = answers[self.counted]
        return np.divide(count - answers["agreement"], count, out=np.zeros_like(count), where=count > 0)

    def shown(self, answers: Answers, place: int, names: Mapping[int, str]) -> str:
        """Return the number of tokens with the same prediction as the target."""
        return f"{answers['agreement'][place]:.0f} of {answers[self.counted][place]:.0f} {self.counted} as the target"


class Words(OfTokens):
    """Classification of words, separated by white space; the first token of a word has the prediction.

    Labels are a list of classes per text, one for each word; words with the label -100 are ignored.
    """

    name = "token-classification"
    title = "a class for each word"
    family = "classes of words"
    heads = ("ForTokenClassification",)
    models: ClassVar[Mapping[str, str]] = {"": "hf_stitch.artefacts.classification:StitchedModelForTokenClassification"}
    pipelines: ClassVar[Mapping[str, str]] = {"": name}
    figures: ClassVar[Mapping[str, bool]] = {
        "relative_entity_f1": True, "relative_accuracy": True, "entity_f1": True, "accuracy": True,
        "cross_entropy": False, "agreement": True, "kl_divergence": False,
    }  # fmt: skip
    compared = ("relative_entity_f1", "relative_accuracy", "entity_f1", "accuracy", "agreement")
    kept = ("words", "agreement", "right", "entities")
    describes_outputs = True
    counted = "words"
    nothing = "texts must contain words with labels"

    def labels(self, samples: Samples | Batch) -> Sequence[Any] | None:
        """Return the classes of the words of each text."""
        return samples.label_values

    def check_labels(self, samples: Samples | Batch, outputs: int) -> None:
        """Check that each word has a class of the network, or -100."""
        batches = [samples] if isinstance(samples, Batch) else samples.batches(256)
        for batch in batches:
            for id_, text, label in zip(batch.ids, batch.samples, batch.label_values or (), strict=False):
                words = len(WORD.findall(_text(text)))
                if not isinstance(label, tuple) or len(label) != words:
                    raise ValueError(
                        f"sample {id_!r} has {words} words (separated by white space) and the label {label}, but "
                        f"{self.name} requires a list with the class of each word, -100 for ignored words"
                    )
                if wrong := [number for number in label if number != IGNORED and number not in range(outputs)]:
                    raise ValueError(
                        f"sample {id_!r} has label {wrong[0]}, but the target predicts classes 0 to {outputs - 1}"
                        + see("other-labels")
                    )

    def asked(self, network: Any, samples: Sequence[Any], labels: Sequence[Any] | None) -> Tensor:
        """Return the class of each first token of a word; 0 without labels."""
        labels_of_tokens = _first_tokens(network, samples)
        if labels is None:
            return labels_of_tokens.clamp(max=0)
        for row, word_classes in zip(labels_of_tokens, labels, strict=True):
            classes = torch.tensor(word_classes, device=row.device)
            row[row >= 0] = classes[row[row >= 0]]
        return labels_of_tokens

    def measure(self, outputs: Mapping[str, Any], source: Side, target: Side) -> dict[str, Answers]:
        """Count words, correct predictions and agreements; with labels also the parts of F1."""
        (batch, inputs), (twin, target_inputs) = source, target
        check_same_tokens(inputs, target_inputs)
        logits = {name: logits_of(output) for name, output in outputs.items()}
        labels = batch.label_values
        if labels is not None:
            self.check_labels(batch, logits["target"].shape[-1])
        asked = self.asked(self._network, twin.samples, labels)
        measured, has_label = (self.counts(logits, asked, twin, labelled=labels is not None), asked != IGNORED)
        predictions, names = logits["target"].argmax(-1), self._names(logits["target"].shape[-1])
        classes, of_target = (torch.arange(logits["target"].shape[-1], device=has_label.device), measured["target"])
        counts = ((predictions[..., None] == classes) & has_label[..., None]).sum(1)
        of_target |= as_arrays({"": {"predicted": counts}})[""]
        if labels is not None:
            of_target |= as_arrays({"": {"label": (asked[..., None] == classes).sum(1)}})[""]
            if names:
                for name, values in logits.items():
                    measured[name]["entities"] = _counts(values.argmax(-1), asked, has_label, names)
                by_class = [_counts_if_constant(asked, has_label, names, name) for name in names]
                of_target["if_constant"] = np.stack(by_class, 1)
        return {**measured}

    def chance(self, measured: Mapping[str, Answers], seed: int) -> Answers:
        """Return the measures of the most frequent class of words, with the class frequencies as probabilities."""
        target = measured["target"]
        counts: Array = target.get("label", target["predicted"])
        best = int(counts.sum(0).argmax())
        chance = {"words": target["words"], "agreement": target["predicted"][:, best]}
        if "label" in target:
            share = counts.sum(0) / counts.sum()
            logs = np.log(share, out=np.zeros_like(share), where=share > 0)
            chance |= {"right": counts[:, best], "cross_entropy": -(counts @ logs)}
        if "if_constant" in target:
            chance["entities"] = target["if_constant"][:, best]
        return chance

    def figures_of(self, answers: Mapping[str, Array], target: Mapping[str, Array], weights: Array) -> dict[str, Array]:
        """Compute accuracies, cross-entropy and agreement per word, and the F1 score of entities as in seqeval."""
        answers, target = ({name: total(weights, values) for name, values in row.items()} for row in (answers, target))
        words, figures = answers["words"], dict[str, Array]()
        if "entities" in answers:
            f1, reference = _f1(answers["entities"]), _f1(target["entities"])
            figures |= {"relative_entity_f1": ratio(f1, reference), "entity_f1": f1}
        if "right" in answers:
            figures |= {
                "relative_accuracy": ratio(answers["right"], target["right"]),
                "accuracy": answers["right"] / words,
            }
        return figures | {name: answers[name] / words for name in self.figures if name in answers}

    def usage(self) -> str:
        """Print the names of the classes of tokens."""
        return "print([model.config.id2label[i] for i in output.logits[0].argmax(-1).tolist()])"

    def _names(self, count: int) -> list[str]:
        """Return the class names if they follow the IOB or IOBES scheme; empty otherwise."""
        config = getattr(getattr(self._network, "model", self._network), "config", None)
        id2label = getattr(config, "id2label", None) or {}
        names = [str(id2label.get(number, "")) for number in range(count)]
        return names if all(map(IOB.fullmatch, names)) else []


def _text(sample: Any) -> str:
    if not isinstance(sample, str):
        raise ValueError(f"token-classification requires texts, got a sample of type {type(sample).__name__}")
    return sample


def _first_tokens(network: Any, samples: Sequence[Any]) -> Tensor:
    """Return the number of the word that each token begins, or :data:`IGNORED`."""
    spans = network.preprocess(samples, offsets=True)[OFFSETS]
    words_begun = torch.full(spans.shape[:2], IGNORED, device=spans.device)
    for row, (text, token_spans) in enumerate(zip(samples, spans.tolist(), strict=True)):
        starts, last_word = [word.start() for word in WORD.finditer(_text(text))], -1
        for token, (start, stop) in enumerate(token_spans):
            token_text = text[start:stop]
            word = bisect_right(starts, start + len(token_text) - len(token_text.lstrip())) - 1
            if token_text.strip() and word > last_word:
                words_begun[row, token] = last_word = word
    return words_begun


def _counts_if_constant(labels: Tensor, has_label: Tensor, names: Sequence[str], name: str) -> Array:
    """Return counts of right, predicted and true entities of each text, if all words have the same class."""
    (prefix, _, kind), rows = name.partition("-"), []
    for classes, counted in zip(labels, has_label, strict=True):
        true, words = {*entities([names[entity_kind] for entity_kind in classes[counted].tolist()])}, int(counted.sum())
        single = sum(entity_kind == kind and first == last for entity_kind, first, last in true)
        predicted = {"O": 0, "I": min(words, 1)}.get(prefix, words)
        rows.append(({"O": 0, "I": int((kind, 0, words - 1) in true)}.get(prefix, single), predicted, len(true)))
    return np.array(rows, dtype=np.float64)


def _counts(predictions: Tensor, labels: Tensor, has_label: Tensor, names: Sequence[str]) -> Array:
    """Return counts of right, predicted and true entities of each text."""
    rows = []
    for predicted, true, counted in zip(predictions, labels, has_label, strict=True):
        guessed, actual = (
            {*entities([names[number] for number in classes[counted].tolist()])} for classes in (predicted, true)
        )
        rows.append((len(guessed & actual), len(guessed), len(actual)))
    return np.array(rows, dtype=np.float64)


def entities(tags: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield kind, first and last word of each entity, as in the lenient default mode of seqeval."""
    start, previous_prefix, previous_kind = 0, "O", ""
    for index, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        changed = kind != previous_kind
        if previous_prefix != "O" and (previous_prefix in "ES" or prefix in "BSO" or changed):
            yield previous_kind, start, index - 1
        if prefix != "O" and (prefix in "BS" or previous_prefix in "ESO" or changed):
            start = index
        previous_prefix, previous_kind = prefix, kind


def _f1(counts: Array) -> Array:
    return ratio(2 * counts[..., 0], counts[..., 1] + counts[..., 2])


class MaskedTokens(OfTokens):
    """Masked tokens of texts: likelihood of the true tokens, and agreement with the target.

    In each text, 15 % of the tokens (at least one, excluding special tokens) become the mask token, whenever maps are
    fitted, trained and scored. The choice is a hash of the tokens of the text, so that all networks, batches, processes
    and jobs mask the same tokens. Unlike in the training of BERT, masked positions never keep their token or receive a
    random token, because the networks are frozen.
    """

    name = "fill-mask"
    title = "masked tokens"
    family = "masked tokens"
    heads = ("ForMaskedLM",)
    models: ClassVar[Mapping[str, str]] = {"": "hf_stitch.artefacts.classification:StitchedModelForMaskedLM"}
    pipelines: ClassVar[Mapping[str, str]] = {"": name}
    figures: ClassVar[Mapping[str, bool]] = {
        "perplexity": False, "relative_perplexity": False, "cross_entropy": False,
        "relative_accuracy": True, "accuracy": True, "agreement": True, "kl_divergence": False,
    }  # fmt: skip
    compared = ("relative_perplexity", "perplexity", "relative_accuracy", "accuracy", "agreement")
    kept = ("tokens", "agreement", "right", "cross_entropy")
    record: ClassVar[Mapping[str, Any]] = {"masking": {"share": SHARE, "seed": SEED}}
    counted = "tokens"
    unused = "masked tokens are scored"
    nothing = "texts must contain tokens other than special tokens"

    def inputs(self, network: Whole, samples: Sequence[Any]) -> Mapping[str, Any]:
        """Return the masked inputs of a network."""
        return _masked(network, samples)[0]

    def asked(self, network: Any, samples: Sequence[Any], labels: Sequence[Any] | None) -> Tensor:
        """Return the masked tokens."""
        return _masked(network, samples)[1]

    def measure(self, outputs: Mapping[str, Any], source: Side, target: Side) -> dict[str, Answers]:
        """Count masked tokens, correct predictions and agreements; for the target also the tokens."""
        (_, inputs), (twin, target_inputs) = source, target
        check_same_tokens(inputs, target_inputs)
        logits = {name: logits_of(output) for name, output in outputs.items()}
        token_labels = self.asked(self._network, twin.samples, None)
        measured, is_masked = self.counts(logits, token_labels, twin), token_labels != IGNORED
        order = (~is_masked).long().argsort(dim=1, stable=True)[:, : int(is_masked.sum(1).max())]
        rows = {"token": token_labels, "predicted": logits["target"].argmax(-1)}
        masked = {name: tokens.double().where(is_masked, torch.nan).gather(1, order) for name, tokens in rows.items()}
        measured["target"] |= as_arrays({"": masked})[""]
        return {**measured}

    def chance(self, measured: Mapping[str, Answers], seed: int) -> Answers:
        """Return the measures of the most frequent token, with the token frequencies as probabilities."""
        target = measured["target"]
        tokens: Array = target["token"]
        kinds, counts = np.unique(tokens[~np.isnan(tokens)], return_counts=True)
        best, logs = kinds[counts.argmax()], np.append(np.log(counts / counts.sum()), 0.0)
        return {
            "tokens": target["tokens"],
            "right": (tokens == best).sum(1).astype(float),
            "agreement": (target["predicted"] == best).sum(1).astype(float),
            "cross_entropy": -logs[np.searchsorted(kinds, tokens)].sum(1),  # NaN sorts after the last
        }

    def figures_of(self, answers: Mapping[str, Array], target: Mapping[str, Array], weights: Array) -> dict[str, Array]:
        """Compute perplexities, cross-entropy, accuracies and agreement per masked token."""
        answers, target = ({name: total(weights, values) for name, values in row.items()} for row in (answers, target))
        tokens = answers["tokens"]
        loss, reference = answers["cross_entropy"] / tokens, target["cross_entropy"] / tokens
        return {
            "perplexity": np.exp(loss), "relative_perplexity": np.exp(loss - reference), "cross_entropy": loss,
            "relative_accuracy": ratio(answers["right"], target["right"]), "accuracy": answers["right"] / tokens,
            **{name: answers[name] / tokens for name in ("agreement", "kl_divergence") if name in answers},
        }  # fmt: skip

    def usage(self) -> str:
        """Print the predictions of masked tokens."""
        return (
            'masks = inputs["input_ids"] == model.processor.mask_token_id\n'
            "print(model.processor.convert_ids_to_tokens(output.logits[masks].argmax(-1)))"
        )


def _masked(network: Any, samples: Sequence[Any]) -> tuple[dict[str, Any], Tensor]:
    """Return masked inputs, and the masked tokens (:data:`IGNORED` elsewhere)."""
    tokenizer = network.processor
    if getattr(tokenizer, "mask_token_id", None) is None:
        raise ValueError(
            f"fill-mask requires a tokenizer with a mask token, got {type(tokenizer).__name__}; pass one as "
            "processor= to hf_stitch.load, or use task=None"
        )
    if not getattr(network, "completes", True):
        raise ValueError(
            "align='prefix' does not support fill-mask, because the source lacks the mask token of the target; use "
            "masked language models with the same tokenizer, or task=None"
        )
    inputs = dict(network.preprocess(samples))
    ids = inputs["input_ids"]
    free = mask_of(inputs) & ~torch.isin(ids, torch.tensor(tokenizer.all_special_ids, device=ids.device))
    labels = torch.full_like(ids, IGNORED)
    for row, text_ids, is_free in zip(labels, ids, free, strict=True):
        masked = is_free.nonzero()[:, 0][list(_masked_places(tuple(text_ids[is_free].tolist())))]
        row[masked] = text_ids[masked]
    inputs["input_ids"] = ids.masked_fill(labels != IGNORED, tokenizer.mask_token_id)
    return inputs, labels


@lru_cache(maxsize=4096)  # several networks and predictors read each text
def _masked_places(tokens: tuple[int, ...]) -> tuple[int, ...]:
    text = chance(SEED, repr(tokens)).hex()
    count = max(round(SHARE * len(tokens)), 1)
    return tuple(sorted(sorted(range(len(tokens)), key=lambda index: chance(SEED, f"{text} {index}"))[:count]))
