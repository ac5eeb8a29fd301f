"""CLIP's encoders of texts, whose oldest configs name a wrong end of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_stitch.adapters.overrides.base import Override

WRONG = 2
"""The ``eos_token_id`` of these configs, with which CLIP looks for the largest id of a text: the tokenizer's end."""


class OfTexts(Override):
    """Where the end of text is the last id of the vocabulary, whatever the config says."""

    def special_ids(self, model: nn.Module) -> tuple[int, ...]:
        """The end of text."""
        config: Any = model.config
        return (config.vocab_size - 1,) if config.eos_token_id == WRONG else ()

    def example(self, model: nn.Module) -> Mapping[str, Any] | None:
        """Texts that end so."""
        config: Any = model.config
        if config.eos_token_id != WRONG:
            return None
        ids = torch.randint(3, config.vocab_size - 1, (2, 6), generator=torch.Generator().manual_seed(0))
        ids[:, -1] = config.vocab_size - 1
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
