"""SigLIP 2, which takes images as lists of patches, padded to one length, with the grid size of each image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_stitch.adapters.overrides.base import Override


class OfPatches(Override):
    """Override for the image classifier of SigLIP 2."""

    def example(self, model: nn.Module) -> Mapping[str, Any]:
        """Return two random images of 4 × 4 patches, with mask and grid sizes."""
        config: Any = getattr(model.config, "vision_config", model.config)
        pixels = config.num_channels * config.patch_size**2
        return {
            "pixel_values": torch.randn(2, 16, pixels, generator=torch.Generator().manual_seed(0)),
            "pixel_attention_mask": torch.ones(2, 16, dtype=torch.int32),
            "spatial_shapes": torch.full((2, 2), 4),
        }
