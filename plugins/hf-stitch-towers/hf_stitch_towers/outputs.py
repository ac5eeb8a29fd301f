"""Compare the outputs of a network with its outputs after the features of a tower are replaced."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig

from hf_stitch.tasks.base import divergence
from hf_stitch_towers.answers import Asked, rounds
from hf_stitch_towers.examples import PLACEHOLDERS, placeholder
from hf_stitch_towers.result import (
    ACCURACY,
    ANSWER,
    CHANGES,
    CLOSENESS,
    DECIDED,
    DECIDED_AGREEMENT,
    FIGURES,
    KL,
    MEAN,
    ORIGINAL,
)  # fmt: skip

TOKENS = 16
"""Maximum number of compared tokens of a caption."""

GREEDY = 0.9
"""Minimum share of generated tokens that a forward pass over the caption also predicts; the rest are ties."""

TRANSDUCERS = ("ForRNNT", "ForTDT")
"""Suffixes of classes that generate without logits for each token."""

EMBEDDINGS = {"vision": "image_embeds", "audio": "audio_embeds", "text": "text_embeds"}
"""Tower of a network of two towers -> field of the output with its embedding."""

Measures = Mapping[str, Mapping[str, Tensor]]
"""Row -> measure -> (samples, …)."""


class Outputs(ABC):
    """Base class for the comparison of outputs.

    Args:
        model: The original network.
        part: The exchanged tower.
        tokenizer: Tokenizer for answers of a network that generates.

    Attributes:
        asked: Id of a sample -> its possible answers; set before scoring samples with answers.
    """

    figures: tuple[str, ...]

    def __init__(self, model: Any, part: str, tokenizer: Any = None) -> None:
        self.model, self.part, self.tokenizer = model, part, tokenizer
        self.asked: Mapping[Any, Asked] = {}
        self.types: int | None = None

    @classmethod
    def of(cls, model: Any, part: str, tokenizer: Any = None) -> Outputs:
        """Return the comparison: of captions for a network that generates, else of embeddings."""
        writes = getattr(model, "can_generate", lambda: False)() and not type(model).__name__.endswith(TRANSDUCERS)
        return (Captions if writes else Embeddings)(model, part, tokenizer)

    def plain(self, output: Any) -> Tensor:
        """Return the compared tensor of an output.

        Raises:
            ValueError: If the output lacks it.
        """
        name = "logits" if isinstance(self, Captions) else EMBEDDINGS[self.part]
        tensor = output.get(name) if isinstance(output, Mapping) else None
        if not isinstance(tensor, Tensor) or (name != "logits" and tensor.dim() != 2):
            raise ValueError(
                f"{type(self.model).__name__} neither generates texts nor returns {name}, so the exchange cannot be "
                f"scored; outputs: {', '.join(output) if output else 'none'}"
            )
        return tensor

    @abstractmethod
    def contexts(self, inputs: Mapping[str, Any], ids: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the arguments of each forward pass to compare, and store the tokens expected from it."""

    def kept(self, number: int, output: Any) -> Tensor:
        """Return the part of an output to store; ``number`` is the index of its forward pass in :meth:`contexts`."""
        return self.plain(output)

    @abstractmethod
    def measures(self, rows: Mapping[str, Sequence[Tensor]]) -> Measures:
        """Compare the outputs of each row with the original; ``rows`` include the original and the mean."""

    @abstractmethod
    def figures_of(self, measured: Measures) -> dict[str, dict[str, np.ndarray]]:
        """Return the metrics of all samples: row -> metric -> (samples,)."""

    @abstractmethod
    def chosen_by(self, figures: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, float]:
        """Return the score of each row for choosing a matcher; higher is better."""


class Captions(Outputs):
    """Comparison of next tokens on the captions that the original writes.

    A token is decided by the image if the original would write a different token with the mean of all images.
    """

    figures = FIGURES[:-2]

    def contexts(self, inputs: Mapping[str, Any], ids: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the captions of the original and, for samples with answers, one context per choice."""
        captions = with_captions(self.model, inputs, self.types)
        self.types = captions.types
        self.tokens, self.counted = captions.tokens, captions.counted
        self.choices, self.right = list[tuple[Tensor, Tensor]](), torch.zeros(0, dtype=torch.long)
        if not all(id_ in self.asked for id_ in ids):
            return [captions.full]
        questions = [self.asked[id_] for id_ in ids]
        self.right = torch.tensor([question.right for question in questions])
        start = captions.move_shared_tokens(self.tokenizer.all_special_ids, greedy(self.model).eos_token_id)
        self.choices = list(rounds(self.tokenizer, start.text, questions, padding_of(self.model)))
        return [captions.full, *(start.with_tokens(tokens) for tokens, _ in self.choices)]

    def kept(self, number: int, output: Any) -> Tensor:
        """Return the logits of the compared tokens only."""
        tokens = self.tokens if number == 0 else self.choices[number - 1][0]
        return self.plain(output)[:, -tokens.shape[1] :].clone()

    def measures(self, rows: Mapping[str, Sequence[Tensor]]) -> Measures:
        """Return divergence, agreement and likelihood per sample, also for decided tokens and answers."""
        logs = {name: _logs(logits, self.tokens) for name, (logits, *_) in rows.items()}
        original = logs[ORIGINAL]
        for name, values in logs.items():
            if bool(values[self.counted].isnan().any()):
                raise ValueError(f"outputs of the row {name!r} are NaN: try a different dtype, or omit samples")
        decided = self.counted & (logs[MEAN].argmax(-1) != original.argmax(-1))
        measures: dict[str, dict[str, Tensor]] = {}
        for name, values in logs.items():
            same = (values.argmax(-1) == original.argmax(-1)).double()
            change = (values - original).gather(-1, self.tokens[..., None])[..., 0]
            measured = divergence(values, original), same, change, change, same  # in the order of `figures`
            measures[name] = {
                figure: ((measure * tokens).sum(1) / tokens.sum(1)).cpu()
                for figure, measure in zip(self.figures, measured, strict=False)
                for tokens in [decided if figure in (DECIDED, DECIDED_AGREEMENT) else self.counted]
            }
            measures[name] |= self._answers(rows[name][1:])
        return measures

    def _answers(self, logits: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the log-likelihood per token of the right answer, and whether it is the most likely of several."""
        if not logits:
            return {}
        likelihoods = torch.stack([
            _logs(choice_logits, tokens).gather(-1, tokens[..., None])[..., 0].where(counted, 0).sum(1)
            for choice_logits, (tokens, counted) in zip(logits, self.choices, strict=True)
        ], 1).cpu()  # fmt: skip
        right, lengths = self.right[:, None], torch.stack([counted.sum(1) for _, counted in self.choices], 1).cpu()
        scores = {ANSWER: (likelihoods / lengths).gather(1, right)[:, 0]}
        return scores if len(logits) == 1 else {**scores, ACCURACY: (likelihoods.argmax(1) == self.right).double()}

    def figures_of(self, measured: Measures) -> dict[str, dict[str, np.ndarray]]:
        """Return the measures, and the changes of answers from the original, per image."""
        figures = {name: {figure: measure.numpy() for figure, measure in row.items()} for name, row in measured.items()}
        for row in figures.values():
            for figure, change in CHANGES.items():
                if figure in row:
                    row[change] = row[figure] - figures[ORIGINAL][figure]
        return {name: {figure: row[figure] for figure in FIGURES if figure in row} for name, row in figures.items()}

    def chosen_by(self, figures: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, float]:
        """Return the likelihood of decided tokens; without such tokens, the negative divergence."""
        figure, sign = (DECIDED, 1) if np.isfinite(figures[MEAN][DECIDED]).any() else (KL, -1)
        return {name: sign * float(np.nanmean(row[figure])) for name, row in figures.items()}


class Embeddings(Outputs):
    """Comparison of the embeddings of a network of two towers: cosines, and nearest embeddings."""

    figures = FIGURES[-2:]

    def contexts(self, inputs: Mapping[str, Any], ids: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the inputs."""
        return [dict(inputs)]

    def measures(self, rows: Mapping[str, Sequence[Tensor]]) -> Measures:
        """Return the embeddings, normalised to length 1."""
        return {
            name: {"": functional.normalize(embeddings.double(), dim=-1).cpu()} for name, (embeddings,) in rows.items()
        }

    def figures_of(self, measured: Measures) -> dict[str, dict[str, np.ndarray]]:
        """Return the cosine with the original's embedding, and whether it is the nearest of all samples."""
        original = measured[ORIGINAL][""]
        figures = {}
        for name, row in measured.items():
            cosines = row[""] @ original.T
            nearest = (cosines.argmax(1) == torch.arange(len(original))).double()
            figures[name] = dict(zip(self.figures, (cosines.diagonal().numpy(), nearest.numpy()), strict=True))
        return figures

    def chosen_by(self, figures: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, float]:
        """Return the mean cosine."""
        return {name: float(row[CLOSENESS].mean()) for name, row in figures.items()}


def _logs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probabilities at the last positions, one for each of these tokens."""
    return logits[:, -tokens.shape[1] :].double().log_softmax(-1)


@dataclass(frozen=True)
class CaptionInputs:
    """Captions that a network generated, as arguments of a forward pass.

    Attributes:
        inputs: All arguments of a forward pass without captions.
        name: Argument of the text.
        mask: Argument of its mask.
        types: Token type of generated tokens.
        text: Tokens of the text that captions continue.
        tokens: Tokens of captions, (samples, tokens).
        counted: Mask of the tokens that count, up to the end of each caption.
        moved: Number of tokens moved from captions to the text.
    """

    inputs: Mapping[str, Any]
    name: str
    mask: str
    types: int
    text: Tensor
    tokens: Tensor
    counted: Tensor
    moved: int = 0

    @property
    def full(self) -> dict[str, Any]:
        """The arguments with captions."""
        return self.with_tokens(self.tokens)

    def move_shared_tokens(self, special: Sequence[int], ends: Any) -> CaptionInputs:
        """Return a copy with special tokens that begin all captions (languages, tasks) moved to the text."""
        end_ids = {ends} if isinstance(ends, int) else set(ends or ())
        count = 0
        for column in self.tokens.T[:-1]:
            first = int(column[0])
            if first not in special or first in end_ids or not bool((column == first).all()):
                break
            count += 1
        text = torch.cat([self.text, self.tokens[:, :count]], 1)
        return replace(self, text=text, tokens=self.tokens[:, count:], counted=self.counted[:, count:], moved=count)

    def with_tokens(self, tokens: Tensor) -> dict[str, Any]:
        """Return the arguments with other tokens after the text; the last token is not an input."""
        length = self.text.shape[1] + tokens.shape[1] - 1
        full = {**self.inputs, self.name: torch.cat([self.text, tokens], 1)[:, :length]}
        shape = self.inputs[self.name].shape
        for key, value in self.inputs.items():
            if key != self.name and isinstance(value, Tensor) and value.shape == shape:
                fill = 1 if key == self.mask else self.types
                ahead = value.new_full((len(value), max(self.text.shape[1] - self.moved - value.shape[1], 0)), fill)
                behind = value.new_full((len(value), self.moved), fill)
                extended = torch.cat([ahead, value, behind], 1)[:, : self.text.shape[1]]
                full[key] = torch.cat(
                    [extended, extended.new_full((len(extended), length - extended.shape[1]), fill)], 1
                )
        return full


def with_captions(model: Any, inputs: Mapping[str, Any], types: int | None = None) -> CaptionInputs:
    """Generate captions with a network, and check that it predicts them.

    Args:
        model: A network that generates.
        inputs: All arguments of a forward pass.
        types: Token type of generated tokens; ``None`` to find it.

    Raises:
        ValueError: If the generated captions differ from its predictions on them.
    """
    if text_of(model)[1] == "attention_mask" and "attention_mask" in inspect.signature(model.forward).parameters:
        inputs = {
            "attention_mask": torch.ones_like(inputs["input_ids"]),
            **inputs,
        }  # otherwise it is guessed or missing
    text, new, counted = generate_greedily(model, inputs)
    name, mask = text_of(model)
    suppressed = greedy(model).suppress_tokens or []
    has_types = any(key not in (name, mask) and isinstance(value, Tensor) and value.shape == inputs[name].shape
                for key, value in inputs.items())  # fmt: skip
    candidates: dict[float, CaptionInputs] = {}  # agreement of generated and predicted tokens -> captions
    for token_type in (types,) if types is not None else (0, 1) if has_types else (0,):  # 1 in PaliGemma
        candidate = CaptionInputs(inputs, name, mask, token_type, text, new, counted)
        try:
            logits = model(**candidate.full).logits[:, -new.shape[1] :].clone()
        except Exception:  # this type marks an image
            if token_type == 0 or types is not None:
                raise
            continue
        logits[..., suppressed] = -torch.inf
        candidates.setdefault(float((logits.argmax(-1) == new)[counted].double().mean()), candidate)
    if (best := max(candidates)) > GREEDY:
        return candidates[best]
    raise ValueError(
        f"the captions of {type(model).__name__} differ from its own predictions on them, so the exchange cannot be "
        "scored by captions"
    )


def generate_greedily(model: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Generate greedily with a network.

    Args:
        model: A network that generates.
        inputs: All arguments of a forward pass.

    Returns:
        The text that it continues, which may differ from the input; the new tokens, (samples, tokens); and the mask of
        tokens that belong to a caption.

    Raises:
        ValueError: If texts are padded on the right, generation fails, or the generated text is empty.
    """
    name, mask = text_of(model)
    if mask in inputs and not bool(inputs[mask][:, -1].all()):
        raise ValueError("generation requires left padding: set processor.tokenizer.padding_side = 'left'")
    original_config = model.generation_config
    greedy_config = greedy(model)
    model.generation_config = greedy_config  # otherwise the defaults of the network apply
    try:
        ids = model.generate(**inputs)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # the code of the network can raise anything
        raise ValueError(f"{type(model).__name__} cannot generate from these inputs: {error}") from error
    finally:
        model.generation_config = original_config
    text, new = split_generated(ids, inputs[name])
    if not new.shape[1]:
        raise ValueError(f"{type(model).__name__} generates empty texts for these images")
    ends = greedy_config.eos_token_id
    ended = torch.isin(new, torch.tensor([ends] if isinstance(ends, int) else ends or [], device=new.device))
    return text, new, (ended.cumsum(1) - ended.long()) == 0


def split_generated(ids: Tensor, prompt: Tensor) -> tuple[Tensor, Tensor]:
    """Split generated ids into the text that the network continued and the new tokens."""
    count = prompt.shape[1]
    if torch.equal(ids[:, :count], prompt):
        return prompt, ids[:, count:]
    if torch.equal(ids[:, 1 : count + 1], prompt):  # with a first token of the decoder
        return ids[:, : count + 1], ids[:, count + 1 :]
    if count > 1 and torch.equal(ids[:, : count - 1], prompt[:, :-1]):  # BLIP continues the text without its end
        return ids[:, : count - 1], ids[:, count - 1 :]
    return prompt, ids  # the new tokens alone


def greedy(model: Any) -> GenerationConfig:
    """Return the config for greedy generation, without placeholder tokens."""
    config, placeholder_ids = model.generation_config, [placeholder(model, kind) for kind in PLACEHOLDERS]
    special = {key: getattr(config, key, None) for key in ("bos_token_id", "eos_token_id", "decoder_start_token_id")}
    return GenerationConfig(
        **special, max_new_tokens=TOKENS, do_sample=False, num_beams=1, pad_token_id=padding_of(model),
        suppress_tokens=[id_ for id_ in placeholder_ids if id_ is not None] or None,  # they would require an image
    )  # fmt: skip


def padding_of(model: Any) -> int:
    """Return the padding token; without one, the end of text, or 0."""
    pad, ends = (getattr(model.generation_config, name, None) for name in ("pad_token_id", "eos_token_id"))
    ends = ends[0] if isinstance(ends, list) and ends else ends
    return int(next((token for token in (pad, ends) if isinstance(token, int)), 0))


def text_of(model: Any) -> tuple[str, str]:
    """Return the names of the arguments for the text that a network continues, and for its mask."""
    has_encoder = bool(model.config.is_encoder_decoder)
    return ("decoder_input_ids", "decoder_attention_mask") if has_encoder else ("input_ids", "attention_mask")
