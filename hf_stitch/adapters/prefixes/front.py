"""The front half of a decoder that reads at each token of another tokenizer the text up to its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from hf_stitch.adapters.cutting.cut import Cut
from hf_stitch.adapters.cutting.halves import Front, Observed
from hf_stitch.adapters.cutting.interface import POSITIONS, Interface
from hf_stitch.adapters.cutting.plan import CutPlan
from hf_stitch.adapters.prefixes.reading import INPUTS, PrefixReader, Reading
from hf_stitch.adapters.preprocess import place_of
from hf_stitch.representation import Representation

__all__ = ["PrefixFront"]


class PrefixFront(Front):
    """The part of a decoder up to a cut, which takes the tokens of another tokenizer.

    At each of them it outputs the activations of the decoder for the text up to the end of that token, and after them
    the embedding of the token itself in the other network if ``own`` is given. See
    :class:`~hf_stitch.adapters.prefixes.PrefixReader`. :meth:`PrefixAdapter.front` returns one.

    Args:
        model: Copy of the decoder; it becomes part of this module and is changed.
        cut: Cut at which the part ends.
        plan: Verified plan with the modules to replace.
        interface: How the decoder takes its input.
        takes: How the network of the other tokenizer takes its input.
        start: Token of the decoder that stands for no text.
        own: Token embedding of that network. Default: none.

    Attributes:
        reader: Computes what the decoder reads; ``None`` without both tokenizers, if that is given to each forward.

    Example:
        >>> import hf_stitch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(vocab_size=20, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
        >>> network = hf_stitch.load(GPT2LMHeadModel(config).eval())
        >>> cut, plan = network.cut("transformer.h.0")
        >>> front = PrefixFront(network.model, cut, plan, network.interface, network.interface, start=0)
        >>> reading = Reading(
        ...     torch.tensor([[3, 5, 7]]), torch.ones(1, 1, 3, 3).tril().bool(), torch.tensor([[0, 1, 2]]),
        ...     torch.tensor([[0, 2]]), torch.tensor([[0, 1, 2]]),
        ... )
        >>> front(input_ids=torch.tensor([[4, 9]]), **reading.to_inputs()).values.shape
        torch.Size([1, 2, 8])
    """

    def __init__(
        self, model: nn.Module, cut: Cut, plan: CutPlan, interface: Interface, takes: Interface, start: int,
        own: nn.Embedding | None = None,
    ) -> None:  # fmt: skip
        """Remove everything after the cut."""
        super().__init__(model, cut, plan, interface)
        self._takes, self.start, self.own = takes, start, own
        self.reader: PrefixReader | None = None

    @property
    def takes(self) -> Interface:
        """How this half takes its input: as the network of the other tokenizer."""
        return self._takes

    def record(self) -> dict[str, Any]:
        """Return as JSON values what beside the record of a half is needed to build this one."""
        own = None if self.own is None else [self.own.num_embeddings, self.own.embedding_dim]
        return {"start": self.start, "own": own}

    def attach(self, source: Tokenizer, target: Tokenizer) -> None:
        """Give both tokenizers to this half.

        Args:
            source: Tokenizer of the decoder.
            target: The other tokenizer.
        """
        self.reader = PrefixReader(source, target, self.start, self.interface.max_tokens)

    def read(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, new: int | None = None, held: int | None = None
    ) -> Reading:
        """Compute what the decoder reads; see :meth:`PrefixReader.read`.

        Args:
            input_ids: (batch, tokens) int64, tokens of the other tokenizer.
            attention_mask: (batch, tokens), 1 for real tokens.
            new: Number of last tokens that are not in a cache.
            held: Number of tokens of the decoder in a cache.

        Raises:
            ValueError: If both tokenizers are missing.
        """
        if self.reader is None:
            raise ValueError(
                f"both tokenizers are missing, so that the tokens of the source must be given: pass {', '.join(INPUTS)}"
            )
        return self.reader.read(input_ids, attention_mask, new, held)

    def forward(self, seen: Observed | None = None, /, **inputs: Any) -> Tensor:
        """Compute the values at the cut for each token of the other tokenizer."""
        ids, mask, reading, options = split(inputs, self.takes)
        if reading is None:
            reading = self.read(ids, mask).to_inputs()
        given = arguments(reading, place_of(self.model)[1]) | options
        found = super()._represent(super().forward(seen, **given), given)
        return gathered(found, reading["alignment"], ids, mask, self.own).values

    def _represent(self, values: Tensor, inputs: Mapping[str, Any]) -> Representation:
        ids, mask, _, _ = split(inputs, self.takes)
        return Representation(values, "bnd", mask=real_tokens(ids, mask).to(values.device))


def split(
    inputs: Mapping[str, Any], interface: Interface
) -> tuple[Tensor, Tensor | None, dict[str, Tensor] | None, dict[str, Any]]:
    """Divide inputs into ids, mask, the tensors of a reading, and further arguments."""
    others = {name: value for name, value in inputs.items() if value is not None}
    ids, mask = others.pop(interface.content[0]), others.pop(interface.mask, None)
    for name in ("token_type_ids", POSITIONS):
        others.pop(name, None)
    reading = {name: others.pop(name) for name in INPUTS if name in others}
    needed = set(INPUTS) - {"source_kept"}
    if reading and (missing := sorted(needed - reading.keys())):
        raise ValueError(f"inputs of the source lack {', '.join(missing)}: give all of them, or none")
    return ids, mask, reading or None, others


def arguments(reading: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a reading as arguments of the decoder; the mask is a number to add to its logits."""
    attends = reading["source_attention_mask"].bool()
    least = torch.finfo(dtype).min
    return {
        "input_ids": reading["source_input_ids"],
        "attention_mask": torch.zeros(attends.shape, dtype=dtype, device=attends.device).masked_fill(~attends, least),
        "position_ids": reading["source_position_ids"],
    }


def gathered(
    found: Representation, alignment: Tensor, ids: Tensor, mask: Tensor | None, own: nn.Embedding | None
) -> Representation:
    """Take the activations that each token of the other tokenizer reads; an ``own`` embedding of it is appended."""
    values = found.values.gather(1, alignment[..., None].expand(-1, -1, found.values.shape[-1]))
    if own is not None:
        values = torch.cat([values, own(ids).to(values.dtype)], -1)
    return Representation(values, "bnd", mask=real_tokens(ids, mask))


def real_tokens(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return which of the tokens are no padding; a mask may cover the past too."""
    return torch.ones_like(ids, dtype=torch.bool) if mask is None else mask[:, -ids.shape[1] :].bool()
