"""Perceiver, whose only argument ``inputs`` takes texts, images or other data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_stitch.adapters.overrides.base import Override


class OfTexts(Override):
    """Override for the heads that take texts."""

    def example(self, model: nn.Module) -> Mapping[str, Any]:
        """Return random token ids, shape (2, 6), and their mask."""
        config: Any = model.config
        ids = torch.randint(6, config.vocab_size, (2, 6), generator=torch.Generator().manual_seed(0))
        return {"inputs": ids, "attention_mask": torch.ones_like(ids)}


class OfImages(Override):
    """Override for the head that takes images, with learned position embeddings."""

    def example(self, model: nn.Module) -> Mapping[str, Any]:
        """Return random images of the size for which the model has position embeddings."""
        config: Any = model.config
        size = (2, 3, config.image_size, config.image_size)
        return {"inputs": torch.randn(size, generator=torch.Generator().manual_seed(0))}
