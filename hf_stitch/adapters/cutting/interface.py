"""How a model takes its input, and what of it is the content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_stitch.adapters.cutting.surgery import noise

MASK = "attention_mask"


DECODER = "decoder_"
"""How the names of the arguments begin that are for the decoder of an encoder-decoder."""


def mask_of(name: str) -> str:
    """Name of the argument that tells real tokens of an argument of token ids from padding."""
    return DECODER + MASK if name.startswith(DECODER) else MASK


@dataclass(frozen=True)
class Interface:
    """How a model takes its input.

    Attributes:
        content: Names of the arguments that carry the content: pixels or token ids.
        modality: ``image``, ``text`` or ``tensor``.
        shapes: Shape of one sample of each content argument that is not token ids, at the model's native size.
        dtypes: dtype of each of these.
        options: Arguments that every forward gets (``use_cache=False``).
        special_ids: Token ids that a head may look for (padding, end of text); all others are erased from the context.
        filler_id: The id that stands for an erased one.
        pad_id: The id of padding.
        arguments: What else a tokenizer may give that the model accepts (mask, token types).
        max_tokens: Longest text that the model takes; ``None``: no limit.
        given: Arguments beside the content that every input must hold: what the other stack of an encoder-decoder
            reads. They belong to the context.
        start_id: The id with which the text of an encoder-decoder's decoder begins.
    """

    content: tuple[str, ...]
    modality: str
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    special_ids: tuple[int, ...] = ()
    filler_id: int = 0
    pad_id: int | None = None
    arguments: tuple[str, ...] = ()
    max_tokens: int | None = None
    given: tuple[str, ...] = ()
    start_id: int | None = None

    @property
    def mask(self) -> str:
        """Name of the argument that tells real tokens of the content from padding."""
        return mask_of(self.content[0])

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; :meth:`from_dict` gives it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Interface:
        """Read :meth:`to_dict`."""
        lists = {key: tuple(config.get(key, ())) for key in ("content", "special_ids", "arguments", "given")}
        return cls(**{**config, **lists, "shapes": {name: tuple(shape) for name, shape in config["shapes"].items()}})

    def erase(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The context of an input: its arguments with the content erased.

        Values become zeros of the same shape that take no memory; token ids become one filler id, but for the special
        ones.
        """
        context = dict(inputs)
        for name in self.content:
            value = inputs[name]
            if value.is_floating_point():
                context[name] = torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape)
            else:
                special = torch.isin(value, torch.tensor(self.special_ids, dtype=value.dtype, device=value.device))
                context[name] = torch.where(special, value, self.filler_id)
        return context

    def obscure(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """A context with noise in place of values that were erased."""
        erased = {n: context[n] for n in self.content if context[n].is_floating_point()}
        return {**context, **{n: noise(value.shape, value.dtype, value.device) for n, value in erased.items()}}

    def blank(self, batch: int, mask: Tensor | None, device: torch.device) -> dict[str, Any]:
        """A context for representations that come from elsewhere.

        Of ``batch`` samples, for text with this (batch, tokens) mask.
        """
        if self.modality == "text":
            assert mask is not None
            ids = torch.full(mask.shape, self.filler_id, device=device)
            if self.pad_id is not None:
                ids = torch.where(mask, ids, self.pad_id)
            return {**dict.fromkeys(self.content, ids), self.mask: mask.long()}
        return {
            name: torch.zeros((), dtype=getattr(torch, self.dtypes[name]), device=device).expand(
                batch, *self.shapes[name]
            )
            for name in self.content
        }


def size_of_inputs(inputs: Mapping[str, Any], interface: Interface) -> tuple[int, int]:
    """Batch size and, for text, number of tokens of inputs."""
    content = inputs[interface.content[0]]
    return content.shape[0], content.shape[1] if interface.modality == "text" else 0
