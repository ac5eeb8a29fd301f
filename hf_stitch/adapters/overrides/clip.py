"""Text encoders of CLIP, whose oldest configs contain a wrong id for the end of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_stitch.adapters.overrides.base import Override

WRONG = 2
"""The ``eos_token_id`` of these configs. CLIP then takes the largest id of a text as its end."""


class OfTexts(Override):
    """Override for text encoders whose end of text is the last id of the vocabulary, despite the config."""

    def special_ids(self, model: nn.Module) -> tuple[int, ...]:
        """Return the last id of the vocabulary if the config contains the wrong one."""
        config: Any = model.config
        return (config.vocab_size - 1,) if config.eos_token_id == WRONG else ()

    def example(self, model: nn.Module) -> Mapping[str, Any] | None:
        """Return texts of 6 tokens that end with the last id of the vocabulary."""
        config: Any = model.config
        if config.eos_token_id != WRONG:
            return None
        ids = torch.randint(3, config.vocab_size - 1, (2, 6), generator=torch.Generator().manual_seed(0))
        ids[:, -1] = config.vocab_size - 1
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
