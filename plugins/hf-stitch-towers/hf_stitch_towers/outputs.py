"""How far the outputs of a network are from its own if modules read other features of a tower."""

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
"""Most tokens of a caption that the original writes for an image, on which outputs are compared."""

GREEDY = 0.9
"""Least share of tokens of a caption that are the most likely ones in a forward over it; others are ties."""

TRANSDUCERS = ("ForRNNT", "ForTDT")
"""Ends of the names of classes that write, but have no logits for each token."""

EMBEDDINGS = {"vision": "image_embeds", "audio": "audio_embeds", "text": "text_embeds"}
"""Part of a network of two towers -> output that is the embedding of what its tower reads."""

Measures = Mapping[str, Mapping[str, Tensor]]
"""Row -> measure -> (samples, …)."""


class Outputs(ABC):
    """What is compared of outputs.

    Args:
        model: The original.
        part: Which tower is exchanged.
        tokenizer: Of a network that writes, for answers.

    Attributes:
        asked: Id of a sample -> what should be written about it; set before samples with answers are scored.
    """

    figures: tuple[str, ...]

    def __init__(self, model: Any, part: str, tokenizer: Any = None) -> None:
        self.model, self.part, self.tokenizer = model, part, tokenizer
        self.asked: Mapping[Any, Asked] = {}
        self.types: int | None = None

    @classmethod
    def of(cls, model: Any, part: str, tokenizer: Any = None) -> Outputs:
        """Return what is compared: captions of a network that writes, embeddings of one that has two towers."""
        writes = getattr(model, "can_generate", lambda: False)() and not type(model).__name__.endswith(TRANSDUCERS)
        return (Captions if writes else Embeddings)(model, part, tokenizer)

    def plain(self, output: Any) -> Tensor:
        """Return the tensor of an output that is compared.

        Raises:
            ValueError: If the output has none.
        """
        name = "logits" if isinstance(self, Captions) else EMBEDDINGS[self.part]
        found = output.get(name) if isinstance(output, Mapping) else None
        if not isinstance(found, Tensor) or (name != "logits" and found.dim() != 2):
            raise ValueError(
                f"{type(self.model).__name__} neither writes texts nor has {name} among its outputs, so that nothing "
                f"tells whether it is as good as before; outputs: {', '.join(output) if output else 'none'}"
            )
        return found

    @abstractmethod
    def contexts(self, inputs: Mapping[str, Any], ids: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the arguments of the forwards that are compared, and remember what they should output."""

    def kept(self, place: int, output: Any) -> Tensor:
        """Return what is kept of the output of a forward, by its place among the contexts."""
        return self.plain(output)

    @abstractmethod
    def measures(self, rows: Mapping[str, Sequence[Tensor]]) -> Measures:
        """Compare the outputs of rows, which include the mean, with those of the original, for each forward."""

    @abstractmethod
    def figures_of(self, measured: Measures) -> dict[str, dict[str, np.ndarray]]:
        """Return the figures of all samples: row -> figure -> (samples,)."""

    @abstractmethod
    def chosen_by(self, found: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, float]:
        """Return for each row by what a map is chosen; more is better."""


class Captions(Outputs):
    """Next tokens along the captions that the original writes.

    A token counts as decided by the image if the original would write another one with the mean of all images.
    """

    figures = FIGURES[:-2]

    def contexts(self, inputs: Mapping[str, Any], ids: Sequence[Any]) -> list[dict[str, Any]]:
        """Let the original write captions; then come the answers of samples that have them, all with each choice."""
        written = with_captions(self.model, inputs, self.types)
        self.types = written.types
        self.wanted, self.counted = written.tokens, written.counted
        self.choices, self.right = list[tuple[Tensor, Tensor]](), torch.zeros(0, dtype=torch.long)
        if not all(each in self.asked for each in ids):
            return [written.full]
        asked = [self.asked[each] for each in ids]
        self.right = torch.tensor([each.right for each in asked])
        begun = written.begun_by(self.tokenizer.all_special_ids, greedy(self.model).eos_token_id)
        self.choices = list(rounds(self.tokenizer, begun.begun, asked, padding_of(self.model)))
        return [written.full, *(begun.followed_by(tokens) for tokens, _ in self.choices)]

    def kept(self, place: int, output: Any) -> Tensor:
        """Return the logits of the tokens that count, of which texts have many more."""
        tokens = self.wanted if place == 0 else self.choices[place - 1][0]
        return self.plain(output)[:, -tokens.shape[1] :].clone()

    def measures(self, rows: Mapping[str, Sequence[Tensor]]) -> Measures:
        """Return divergence, agreement and likelihood of each sample, the latter also of decided tokens and answers."""
        logs = {name: _logs(logits, self.wanted) for name, (logits, *_) in rows.items()}
        own = logs[ORIGINAL]
        for name, values in logs.items():
            if bool(values[self.counted].isnan().any()):
                raise ValueError(f"outputs of the row {name!r} are NaN: try another dtype, or leave samples out")
        decided = self.counted & (logs[MEAN].argmax(-1) != own.argmax(-1))
        found: dict[str, dict[str, Tensor]] = {}
        for name, values in logs.items():
            same = (values.argmax(-1) == own.argmax(-1)).double()
            written = (values - own).gather(-1, self.wanted[..., None])[..., 0]
            measured = divergence(values, own), same, written, written, same
            found[name] = {
                figure: ((each * tokens).sum(1) / tokens.sum(1)).cpu()
                for figure, each in zip(self.figures, measured, strict=False)
                for tokens in [decided if figure in (DECIDED, DECIDED_AGREEMENT) else self.counted]
            }
            found[name] |= self._answers(rows[name][1:])
        return found

    def _answers(self, logits: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the likelihood of the right answer per token, and whether it is the likeliest of several."""
        if not logits:
            return {}
        likely = torch.stack([
            _logs(each, tokens).gather(-1, tokens[..., None])[..., 0].where(counted, 0).sum(1)
            for each, (tokens, counted) in zip(logits, self.choices, strict=True)
        ], 1).cpu()  # fmt: skip
        right, lengths = self.right[:, None], torch.stack([counted.sum(1) for _, counted in self.choices], 1).cpu()
        found = {ANSWER: (likely / lengths).gather(1, right)[:, 0]}
        return found if len(logits) == 1 else {**found, ACCURACY: (likely.argmax(1) == self.right).double()}

    def figures_of(self, measured: Measures) -> dict[str, dict[str, np.ndarray]]:
        """Return the measures, which are figures, and how answers change from the original's, image by image."""
        found = {name: {figure: each.numpy() for figure, each in row.items()} for name, row in measured.items()}
        for row in found.values():
            for figure, change in CHANGES.items():
                if figure in row:
                    row[change] = row[figure] - found[ORIGINAL][figure]
        return {name: {figure: row[figure] for figure in FIGURES if figure in row} for name, row in found.items()}

    def chosen_by(self, found: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, float]:
        """Return the likelihood of decided tokens, or else the negative divergence."""
        figure, sign = (DECIDED, 1) if np.isfinite(found[MEAN][DECIDED]).any() else (KL, -1)
        return {name: sign * float(np.nanmean(row[figure])) for name, row in found.items()}


class Embeddings(Outputs):
    """Embeddings of a network of two towers: how near they are to the original's, and whether none is nearer."""

    figures = FIGURES[-2:]

    def contexts(self, inputs: Mapping[str, Any], ids: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the inputs."""
        return [dict(inputs)]

    def measures(self, rows: Mapping[str, Sequence[Tensor]]) -> Measures:
        """Return the embeddings, of length 1."""
        return {name: {"": functional.normalize(each.double(), dim=-1).cpu()} for name, (each,) in rows.items()}

    def figures_of(self, measured: Measures) -> dict[str, dict[str, np.ndarray]]:
        """Return the cosine with the original's embedding, and whether it is the nearest of the original's."""
        own = measured[ORIGINAL][""]
        found = {}
        for name, row in measured.items():
            cosines = row[""] @ own.T
            nearest = (cosines.argmax(1) == torch.arange(len(own))).double()
            found[name] = dict(zip(self.figures, (cosines.diagonal().numpy(), nearest.numpy()), strict=True))
        return found

    def chosen_by(self, found: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, float]:
        """Return the mean cosine."""
        return {name: float(row[CLOSENESS].mean()) for name, row in found.items()}


def _logs(logits: Tensor, wanted: Tensor) -> Tensor:
    """Return the log-probabilities of the tokens behind a text."""
    return logits[:, -wanted.shape[1] :].double().log_softmax(-1)


@dataclass(frozen=True)
class Written:
    """What a network writes about images, as arguments of a forward.

    Attributes:
        inputs: All arguments of a forward without captions.
        name: That of the text.
        mask: That of its mask.
        types: What tokens are that it writes, in an argument for their types.
        begun: The text that captions continue.
        tokens: Those of captions, (samples, tokens).
        counted: Which of them count, up to the end of each caption.
        moved: Number of tokens that were moved from captions to the text.
    """

    inputs: Mapping[str, Any]
    name: str
    mask: str
    types: int
    begun: Tensor
    tokens: Tensor
    counted: Tensor
    moved: int = 0

    @property
    def full(self) -> dict[str, Any]:
        """The arguments with captions."""
        return self.followed_by(self.tokens)

    def begun_by(self, special: Sequence[int], ends: Any) -> Written:
        """Return it with what all captions begin with moved to the text: special tokens, as languages and tasks."""
        ended = {ends} if isinstance(ends, int) else set(ends or ())
        count = 0
        for column in self.tokens.T[:-1]:
            first = int(column[0])
            if first not in special or first in ended or not bool((column == first).all()):
                break
            count += 1
        begun = torch.cat([self.begun, self.tokens[:, :count]], 1)
        return replace(self, begun=begun, tokens=self.tokens[:, count:], counted=self.counted[:, count:], moved=count)

    def followed_by(self, tokens: Tensor) -> dict[str, Any]:
        """Return the arguments with other tokens behind the text, without the last one, which nothing follows."""
        length = self.begun.shape[1] + tokens.shape[1] - 1
        full = {**self.inputs, self.name: torch.cat([self.begun, tokens], 1)[:, :length]}
        shape = self.inputs[self.name].shape
        for key, value in self.inputs.items():
            if key != self.name and isinstance(value, Tensor) and value.shape == shape:
                fill = 1 if key == self.mask else self.types
                ahead = value.new_full((len(value), max(self.begun.shape[1] - self.moved - value.shape[1], 0)), fill)
                behind = value.new_full((len(value), self.moved), fill)
                own = torch.cat([ahead, value, behind], 1)[:, : self.begun.shape[1]]
                full[key] = torch.cat([own, own.new_full((len(own), length - own.shape[1]), fill)], 1)
        return full


def with_captions(model: Any, inputs: Mapping[str, Any], types: int | None = None) -> Written:
    """Let a network write captions, and check that it predicts them.

    Args:
        model: A network that generates.
        inputs: All arguments of a forward.
        types: What tokens are that it writes, if that is known.

    Raises:
        ValueError: If what it writes is not what it predicts from its own words.
    """
    if text_of(model)[1] == "attention_mask" and "attention_mask" in inspect.signature(model.forward).parameters:
        inputs = {"attention_mask": torch.ones_like(inputs["input_ids"]), **inputs}  # else one is guessed, or missing
    begun, new, counted = written(model, inputs)
    name, mask = text_of(model)
    marks = greedy(model).suppress_tokens or []
    typed = any(key not in (name, mask) and isinstance(value, Tensor) and value.shape == inputs[name].shape
                for key, value in inputs.items())  # fmt: skip
    found: dict[float, Written] = {}
    for each in (types,) if types is not None else (0, 1) if typed else (0,):  # what PaliGemma writes counts as 1
        made = Written(inputs, name, mask, each, begun, new, counted)
        try:
            logits = model(**made.full).logits[:, -new.shape[1] :].clone()
        except Exception:  # of a network where this type stands for an image
            if each == 0 or types is not None:
                raise
            continue
        logits[..., marks] = -torch.inf
        found.setdefault(float((logits.argmax(-1) == new)[counted].double().mean()), made)
    if (best := max(found)) > GREEDY:
        return found[best]
    raise ValueError(
        f"what {type(model).__name__} writes is not what it predicts from its own words, so that captions cannot tell "
        "whether it is as good as before"
    )


def written(model: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a network writes behind its inputs, each token the likeliest.

    Args:
        model: A network that generates.
        inputs: All arguments of a forward.

    Returns:
        The text that it continues, which is not always what it was given; the new tokens, (samples, tokens); and which
        of these belong to a caption.

    Raises:
        ValueError: If texts are padded behind, or the network does not generate, or writes nothing.
    """
    name, mask = text_of(model)
    if mask in inputs and not bool(inputs[mask][:, -1].all()):
        raise ValueError("texts are padded behind: set processor.tokenizer.padding_side = 'left', as generating needs")
    own = model.generation_config
    plain = greedy(model)
    model.generation_config = plain  # else what it leaves open comes from the network's own
    try:
        ids = model.generate(**inputs)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # the code of the network can raise anything
        raise ValueError(f"{type(model).__name__} does not generate from these inputs: {error}") from error
    finally:
        model.generation_config = own
    begun, new = divided(ids, inputs[name])
    if not new.shape[1]:
        raise ValueError(f"{type(model).__name__} writes nothing about these images")
    ends = plain.eos_token_id
    ended = torch.isin(new, torch.tensor([ends] if isinstance(ends, int) else ends or [], device=new.device))
    return begun, new, (ended.cumsum(1) - ended.long()) == 0


def divided(ids: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """Return the text that a network continued, and what it wrote behind it."""
    count = given.shape[1]
    if torch.equal(ids[:, :count], given):
        return given, ids[:, count:]
    if torch.equal(ids[:, 1 : count + 1], given):  # a first token of the decoder was put before it
        return ids[:, : count + 1], ids[:, count + 1 :]
    if count > 1 and torch.equal(ids[:, : count - 1], given[:, :-1]):  # BLIP continues the text without its end
        return ids[:, : count - 1], ids[:, count - 1 :]
    return given, ids  # the new tokens alone


def greedy(model: Any) -> GenerationConfig:
    """Return settings with which a network writes the likeliest tokens."""
    own, marks = model.generation_config, [placeholder(model, kind) for kind in PLACEHOLDERS]
    given = {key: getattr(own, key, None) for key in ("bos_token_id", "eos_token_id", "decoder_start_token_id")}
    return GenerationConfig(
        **given, max_new_tokens=TOKENS, do_sample=False, num_beams=1, pad_token_id=padding_of(model),
        suppress_tokens=[mark for mark in marks if mark is not None] or None,  # which would need an image, too
    )  # fmt: skip


def padding_of(model: Any) -> int:
    """Return the token behind the end of a text."""
    found, ends = (getattr(model.generation_config, name, None) for name in ("pad_token_id", "eos_token_id"))
    ends = ends[0] if isinstance(ends, list) and ends else ends
    return int(next((each for each in (found, ends) if isinstance(each, int)), 0))


def text_of(model: Any) -> tuple[str, str]:
    """Return the arguments of the text that a network continues, and of its mask."""
    decodes = bool(model.config.is_encoder_decoder)
    return ("decoder_input_ids", "decoder_attention_mask") if decodes else ("input_ids", "attention_mask")
