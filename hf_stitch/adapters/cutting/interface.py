"""Interface of a model's forward: the arguments with the content, and the arguments of the context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from hf_stitch.adapters.cutting.surgery import noise
from hf_stitch.options import Count
from hf_stitch.records import Dtype, Record

MASK = "attention_mask"

POSITIONS = "position_ids"

PROMPT = "prompt_mask"
"""Argument that marks the tokens of the prompt before each text."""

Side = Literal["right", "left"]

DECODER = "decoder_"
"""Prefix of the decoder arguments of an encoder-decoder model."""


def mask_of(name: str) -> str:
    """Return the name of the attention mask that belongs to an argument of token ids."""
    return DECODER + MASK if name.startswith(DECODER) else MASK


def positions_of(mask: Tensor) -> Tensor:
    """Return the positions of tokens, counted from the first real one, for a mask: both (batch, tokens), int64.

    >>> positions_of(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])).tolist()
    [[0, 0, 0, 1], [0, 1, 2, 3]]
    """
    start = mask.int().argmax(1, keepdim=True)
    return (torch.arange(mask.shape[1], device=mask.device) - start).clamp(min=0)


@dataclass(frozen=True)
class Interface(Record):
    """Interface of a model's forward: the arguments with the content, and the arguments of the context.

    The content reaches the back half only through the cut; the context goes to both halves. Values in parentheses are
    from a small Qwen2-VL with images as the content: its forward requires images as rows of patches, and a text.

    Attributes:
        content: Arguments with the content (``("pixel_values",)``); for texts, the token ids.
        modality: ``image``, ``text`` or ``tensor`` (``"image"``).
        shapes: Shape of one sample by content argument, at the native image size (``{"pixel_values": (16, 48)}``: 16
            patches of 48 values); empty for token ids.
        dtypes: Dtype by content argument in ``shapes`` (``{"pixel_values": "float32"}``).
        options: Arguments passed to every forward (``{"use_cache": False}``).
        special_ids: Token ids to keep in the context, because the model searches for them (38 and 39, the video and
            image placeholder tokens; in a text classifier, padding and end of text). All other ids are erased.
        filler_id: Token id that replaces erased ids (0).
        pad_id: Token id of padding (0); ``None`` without padding.
        arguments: Optional arguments of texts (``("attention_mask", "mm_token_type_ids")``).
        sides: Padding sides that leave the activations of a text unchanged (both). If empty, only texts of equal length
            run in a batch.
        max_tokens: Maximum number of tokens of a text (64); ``None`` without a limit.
        given: Required arguments of the context (``("input_ids",)``: the text with the images; in an encoder-decoder
            model, the tokens of the other stack).
        beside: Argument in ``given`` that is a text of any length (``"input_ids"``), or ``None``.
        prompt: Context of one sample, as nested lists, for samples without a context (``{}``; set for a fixed prompt:
            ``{"input_ids": [39, 39, 39, 39, 5]}``).
        packed: Arguments with several rows per sample on the first axis (``("pixel_values",)``: patches).
        grids: Row-by-row grids of positions on the first axis (``((2, 2),)``: 16 patches merged into 2 x 2).
        outputs: Outputs to keep (``("logits",)``). Outputs that bypass the cuts, such as image features, are dropped;
            if empty, all outputs are kept.
        prefix: Prompt before each text (``""``; ``"query: "`` in some text encoders).
        prefix_tokens: Number of tokens of ``prefix``, with a preceding special token (0).
        start_id: First token id of the decoder text of an encoder-decoder model, otherwise ``None``.

    Example:
        >>> import torch
        >>> interface = Interface(("input_ids",), "text", special_ids=(0, 2), filler_id=1, pad_id=0)
        >>> interface.mask
        'attention_mask'
        >>> interface.erase({"input_ids": torch.tensor([[7, 8, 2, 0]])})["input_ids"].tolist()
        [[1, 1, 2, 0]]
    """

    content: tuple[str, ...]
    modality: str
    shapes: Mapping[str, tuple[Count, ...]] = field(default_factory=dict)
    dtypes: Mapping[str, Dtype] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    special_ids: tuple[int, ...] = ()
    filler_id: int = 0
    pad_id: int | None = None
    arguments: tuple[str, ...] = ()
    sides: tuple[Side, ...] = ("right", "left")
    max_tokens: Count | None = None
    given: tuple[str, ...] = ()
    start_id: int | None = None
    beside: str | None = None
    prompt: Mapping[str, Any] = field(default_factory=dict)
    packed: tuple[str, ...] = ()
    grids: tuple[tuple[int, int], ...] = ()
    outputs: tuple[str, ...] = ()
    prefix: str = ""
    prefix_tokens: int = 0

    @property
    def text(self) -> str | None:
        """Name of the argument with the token ids of a text: the content or :attr:`beside`; ``None`` without text."""
        return self.content[0] if self.modality == "text" else self.beside

    @property
    def mask(self) -> str:
        """Name of the attention mask that belongs to the text."""
        return mask_of(self.text or self.content[0])

    @property
    def padding(self) -> str:
        """Sides where texts are padded, in words; empty for other modalities."""
        sides = " or ".join(self.sides) or "none: texts run in groups of equal length"
        suffix = ", with position_ids" if "left" in self.sides and POSITIONS in self.arguments else ""
        return sides + suffix if self.modality == "text" else ""

    @property
    def tiles(self) -> bool:
        """Whether a sample has several images in one tensor; images of zeros are padding."""
        return any(len(shape) == 4 and name not in self.packed for name, shape in self.shapes.items())

    def shape(self, inputs: Mapping[str, Any], name: str) -> tuple[int, ...]:
        """Return the shape of one sample of a content argument."""
        rows, *rest = inputs[name].shape
        return (rows // size_of_inputs(inputs, self)[0], *rest) if name in self.packed else tuple(rest)

    def complete(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Add the :attr:`prompt` to inputs that contain none of its arguments."""
        content = inputs.get(self.content[0])
        if not self.prompt or content is None or self.prompt.keys() & inputs.keys():
            return dict(inputs)
        batch = len(content) // (self.shapes[self.content[0]][0] if self.content[0] in self.packed else 1)
        return {**inputs, **{n: torch.tensor([row] * batch, device=content.device) for n, row in self.prompt.items()}}

    def kept(self, output: Any) -> Any:
        """Return an output of the network, restricted to :attr:`outputs`."""
        names = [name for name in self.outputs if isinstance(output, Mapping) and name in output]
        return type(output)(**{name: output[name] for name in names}) if names else output

    def erase(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the context of an input: its arguments with the content erased.

        Floating-point content becomes zeros of the same shape, expanded from one element. If a sample has several
        images, they become ones; images of zeros, which networks treat as padding, stay zeros. Token ids become
        :attr:`filler_id`, except for :attr:`special_ids`.
        """
        context = dict(inputs)
        for name in self.content:
            value = inputs[name]
            if value.is_floating_point() and value.dim() == 5:
                present = value.detach().flatten(2).any(2).to(value.dtype)
                context[name] = present[..., None, None, None].expand(value.shape)
            elif value.is_floating_point():
                context[name] = torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape)
            else:
                special = torch.isin(value, torch.tensor(self.special_ids, dtype=value.dtype, device=value.device))
                context[name] = torch.where(special, value, self.filler_id)
        return context

    def obscure(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """Replace erased floating-point content of a context by noise."""
        erased = {n: context[n] for n in self.content if context[n].is_floating_point()}
        noisy = {n: noise(value.shape, value.dtype, value.device) for n, value in erased.items()}
        return {**context, **{n: erased[n] * value if value.dim() == 5 else value for n, value in noisy.items()}}

    def prompted(self, mask: Tensor) -> Tensor:
        """Return the mask of the prompt: 1 for real tokens of the prompt, 0 for other tokens."""
        return mask.long() * (mask.cumsum(1) <= self.prefix_tokens)

    def blank(self, batch: int, mask: Tensor | None, device: torch.device) -> dict[str, Any]:
        """Create a context for representations of another network.

        For texts, the mask is (batch, tokens) bool, ``True`` for real tokens.
        """
        if self.modality == "text":
            assert mask is not None
            ids = torch.full(mask.shape, self.filler_id, device=device)
            if self.pad_id is not None:
                ids = torch.where(mask, ids, self.pad_id)
            has_prompt = mask.sum(1, True) > self.prefix_tokens  # a pooled representation has no prompt
            optional = {self.mask: mask.long(), POSITIONS: positions_of(mask), PROMPT: self.prompted(mask & has_prompt)}
            return dict.fromkeys(self.content, ids) | {n: v for n, v in optional.items() if n in self.arguments}
        blank = {}
        for name, shape in self.shapes.items():
            size = (batch * shape[0], *shape[1:]) if name in self.packed else (batch, *shape)
            blank[name] = torch.full(
                (), float(len(size) == 5), dtype=getattr(torch, self.dtypes[name]), device=device
            ).expand(size)
        return blank | {name: torch.tensor([row] * batch, device=device) for name, row in self.prompt.items()}


def size_of_inputs(inputs: Mapping[str, Any], interface: Interface) -> tuple[int, int]:
    """Return the batch size and the number of tokens of inputs."""
    shape = inputs[interface.text or interface.content[0]].shape
    return shape[0], shape[1] if interface.text and len(shape) > 1 else 0
