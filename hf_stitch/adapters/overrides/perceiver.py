"""Perceiver, whose one argument ``inputs`` takes texts, images or anything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_stitch.adapters.overrides.base import Override


class OfTexts(Override):
    """The heads that take texts."""

    def example(self, model: nn.Module) -> Mapping[str, Any]:
        """Token ids and their mask."""
        config: Any = model.config
        ids = torch.randint(6, config.vocab_size, (2, 6), generator=torch.Generator().manual_seed(0))
        return {"inputs": ids, "attention_mask": torch.ones_like(ids)}


class OfImages(Override):
    """The head that takes images, with learned positions."""

    def example(self, model: nn.Module) -> Mapping[str, Any]:
        """Images of the size that it has positions for."""
        config: Any = model.config
        size = (2, 3, config.image_size, config.image_size)
        return {"inputs": torch.randn(size, generator=torch.Generator().manual_seed(0))}
