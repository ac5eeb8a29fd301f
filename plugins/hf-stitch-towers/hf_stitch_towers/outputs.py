"""How far the outputs of a network are from its own if modules read other features of a tower."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig

from hf_stitch.tasks.heads import divergence
from hf_stitch_towers.examples import placeholder
from hf_stitch_towers.result import CLOSENESS, DECIDED, DECIDED_AGREEMENT, FIGURES, KL, MEAN

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
    """

    figures: tuple[str, ...]

    def __init__(self, model: Any, part: str) -> None:
        self.model, self.part = model, part

    @classmethod
    def of(cls, model: Any, part: str) -> Outputs:
        """Return what is compared: captions of a network that writes, embeddings of one that has two towers."""
        writes = getattr(model, "can_generate", lambda: False)() and not type(model).__name__.endswith(TRANSDUCERS)
        return (Captions if writes else Embeddings)(model, part)

    def plain(self, output: Any) -> Tensor:
        """Return the tensor of an output that is compared.

        Raises:
            ValueError: If the output has none.
        """
        name = "logits" if isinstance(self, Captions) else EMBEDDINGS[self.part]
        found = output.get(name) if isinstance(output, Mapping) else None
        if not isinstance(found, Tensor):
            raise ValueError(
                f"{type(self.model).__name__} neither writes texts nor has {name} among its outputs, so that nothing "
                f"tells whether it is as good as before; outputs: {', '.join(output) if output else 'none'}"
            )
        return found

    @abstractmethod
    def context(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the forward that is compared, and remember what it should output."""

    @abstractmethod
    def measures(self, rows: Mapping[str, Tensor]) -> Measures:
        """Compare the outputs of rows, which include the mean, with those of the original under ``""``."""

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

    def context(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Let the original write captions."""
        full, self.wanted, self.counted = with_captions(self.model, inputs)
        return full

    def measures(self, rows: Mapping[str, Tensor]) -> Measures:
        """Return divergence, agreement and likelihood of each sample, the latter also of decided tokens."""
        logs = {name: self._logs(logits) for name, logits in rows.items()}
        own = logs[""]
        for name, values in logs.items():
            if bool(values[self.counted].isnan().any()):
                raise ValueError(f"outputs of the row {name or 'original'!r} are NaN: try another dtype, or leave out")
        decided = self.counted & (logs[MEAN].argmax(-1) != own.argmax(-1))
        found: dict[str, dict[str, Tensor]] = {}
        for name, values in logs.items():
            same = (values.argmax(-1) == own.argmax(-1)).double()
            written = (values - own).gather(-1, self.wanted[..., None])[..., 0]
            measured = divergence(values, own), same, written, written, same
            found[name] = {
                figure: ((each * tokens).sum(1) / tokens.sum(1)).cpu()
                for figure, each in zip(self.figures, measured, strict=True)
                for tokens in [decided if figure in (DECIDED, DECIDED_AGREEMENT) else self.counted]
            }
        return found

    def _logs(self, logits: Tensor) -> Tensor:
        """Return the log-probabilities of the tokens of captions."""
        return logits[:, -self.wanted.shape[1] :].double().log_softmax(-1)

    def figures_of(self, measured: Measures) -> dict[str, dict[str, np.ndarray]]:
        """Return the measures, which are figures."""
        return {name: {figure: each.numpy() for figure, each in row.items()} for name, row in measured.items()}

    def chosen_by(self, found: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, float]:
        """Return the likelihood of decided tokens, or else the negative divergence."""
        figure, sign = (DECIDED, 1) if np.isfinite(found[MEAN][DECIDED]).any() else (KL, -1)
        return {name: sign * float(np.nanmean(row[figure])) for name, row in found.items()}


class Embeddings(Outputs):
    """Embeddings of a network of two towers: how near they are to the original's, and whether none is nearer."""

    figures = FIGURES[-2:]

    def context(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs."""
        return dict(inputs)

    def measures(self, rows: Mapping[str, Tensor]) -> Measures:
        """Return the embeddings, of length 1."""
        return {name: {"": functional.normalize(each.double(), dim=-1).cpu()} for name, each in rows.items()}

    def figures_of(self, measured: Measures) -> dict[str, dict[str, np.ndarray]]:
        """Return the cosine with the original's embedding, and whether it is the nearest of the original's."""
        own = measured[""][""]
        found = {}
        for name, row in measured.items():
            cosines = row[""] @ own.T
            nearest = (cosines.argmax(1) == torch.arange(len(own))).double()
            found[name] = dict(zip(self.figures, (cosines.diagonal().numpy(), nearest.numpy()), strict=True))
        return found

    def chosen_by(self, found: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, float]:
        """Return the mean cosine."""
        return {name: float(row[CLOSENESS].mean()) for name, row in found.items()}


def with_captions(model: Any, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Return inputs with the captions that a network writes, their tokens, and which of them count.

    Args:
        model: A network that generates.
        inputs: All arguments of a forward.

    Returns:
        The arguments of a forward over the captions; the next tokens, (samples, tokens); and which tokens count, up to
        the end of each caption.
    """
    begun, new, counted = written(model, inputs)
    name, mask, mark = *_text_of(model), placeholder(model, "image")
    beside = [key for key, value in inputs.items()
              if key != name and isinstance(value, Tensor) and value.shape == inputs[name].shape]  # fmt: skip
    length = begun.shape[1] + new.shape[1] - 1
    for types in (0, 1):  # what types of tokens are: PaliGemma counts what it writes as 1, others as 0
        full = {**inputs, name: torch.cat([begun, new], 1)[:, :length]}
        for key in beside:
            value, fill = inputs[key], 1 if key == mask else types
            ahead = value[:, :1].expand(-1, max(begun.shape[1] - value.shape[1], 0))  # for the decoder's first token
            own = torch.cat([ahead, value], 1)[:, : begun.shape[1]]
            full[key] = torch.cat([own, own.new_full((len(own), length - own.shape[1]), fill)], 1)
        logits = model(**full).logits[:, -new.shape[1] :].clone()
        if mark is not None:
            logits[..., mark] = -torch.inf
        if float((logits.argmax(-1) == new)[counted].double().mean()) > GREEDY:
            break
    else:
        raise ValueError(
            f"what {type(model).__name__} writes is not what it predicts from its own words, so that captions cannot "
            "tell whether it is as good as before"
        )
    return full, new, counted


def written(model: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a network writes behind its inputs, each token the likeliest.

    Args:
        model: A network that generates.
        inputs: All arguments of a forward.

    Returns:
        The text that it continues, which is not always what it was given; the new tokens, (samples, tokens); and which
        of these belong to a caption.

    Raises:
        ValueError: If texts are padded behind, or the network writes nothing.
    """
    name, mask = _text_of(model)
    if mask in inputs and not bool(inputs[mask][:, -1].all()):
        raise ValueError("texts are padded behind: set processor.tokenizer.padding_side = 'left', as generating needs")
    own, mark = model.generation_config, placeholder(model, "image")
    given = {key: getattr(own, key, None) for key in ("bos_token_id", "eos_token_id", "decoder_start_token_id")}
    padding = getattr(own, "pad_token_id", None)
    plain = GenerationConfig(
        **given, max_new_tokens=TOKENS, do_sample=False, num_beams=1, pad_token_id=0 if padding is None else padding,
        suppress_tokens=None if mark is None else [mark],  # a caption with the mark of an image would need one
    )  # fmt: skip
    model.generation_config = plain  # else what it leaves open comes from the network's own
    try:
        masks = {mask: torch.ones_like(inputs[name])} if mask == "attention_mask" else {}  # else one is guessed
        ids = model.generate(**{**masks, **inputs})
    finally:
        model.generation_config = own
    begun, new = _divided(ids, inputs[name])
    if not new.shape[1]:
        raise ValueError(f"{type(model).__name__} writes nothing about these images")
    ends = plain.eos_token_id
    ended = torch.isin(new, torch.tensor([ends] if isinstance(ends, int) else ends or [], device=new.device))
    return begun, new, (ended.cumsum(1) - ended.long()) == 0


def _divided(ids: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """Return the text that a network continued, and what it wrote behind it."""
    count = given.shape[1]
    if torch.equal(ids[:, :count], given):
        return given, ids[:, count:]
    if torch.equal(ids[:, 1 : count + 1], given):  # a first token of the decoder was put before it
        return ids[:, : count + 1], ids[:, count + 1 :]
    if count > 1 and torch.equal(ids[:, : count - 1], given[:, :-1]):  # BLIP continues the text without its end
        return ids[:, : count - 1], ids[:, count - 1 :]
    return given, ids  # the new tokens alone


def _text_of(model: Any) -> tuple[str, str]:
    """Return the arguments of the text that a network continues, and of its mask."""
    decodes = bool(model.config.is_encoder_decoder)
    return ("decoder_input_ids", "decoder_attention_mask") if decodes else ("input_ids", "attention_mask")
