"""Classifiers of activations: a ResNet for grids, and transformer blocks for tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_stitch.representation import Representation

HEAD_WIDTH = 64
"""Features of an attention head, as in ViT-Ti."""


class GridClassifier(nn.Module):
    """ResNet-18 for small images; its input channels are the channels of the activations (Balogh and Jelasity 2025)."""

    def __init__(self, channels: int, classes: int, width: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.stem = nn.Sequential(nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        stages, out_channels = list[nn.Module](), width
        for stage in range(4):
            in_channels, out_channels = out_channels, width * 2**stage
            stages += [_Block(in_channels, out_channels, 1 if stage == 0 else 2), _Block(out_channels, out_channels, 1)]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(out_channels, classes)

    def forward(self, activations: Representation) -> Tensor:
        """Return the logits, ``(batch, classes)`` float32."""
        grids = activations.to_layout("bchw").values.float()
        if grids.shape[2:] != (self.size, self.size):
            grids = functional.interpolate(grids, size=(self.size, self.size), mode="bilinear", align_corners=False)
        logits: Tensor = self.head(self.stages(self.stem(grids)).mean((2, 3)))
        return logits


class _Block(nn.Module):
    """Residual block: two 3×3 convolutions with BatchNorm and a shortcut (He et al. 2016)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False), nn.BatchNorm2d(channels_out), nn.ReLU()
        )
        self.second = nn.Sequential(
            nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False), nn.BatchNorm2d(channels_out)
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, channels, height, width)`` to the output channels of the block."""
        return functional.relu(self.second(self.first(x)) + self.shortcut(x))


class TokenClassifier(nn.Module):
    """Blocks of a ViT without its embedding, with a head on the class token or on the mean of all tokens."""

    def __init__(self, width: int, classes: int, blocks: int) -> None:
        super().__init__()
        heads = max(count for count in range(1, max(1, width // HEAD_WIDTH) + 1) if width % count == 0)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, blocks, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, activations: Representation) -> Tensor:
        """Return the logits, ``(batch, classes)`` float32."""
        values = activations.values.float()
        tokens = values[:, None] if activations.layout == "bd" else values
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        if activations.mask is not None:
            mask = activations.mask
        hidden = self.blocks(torch.where(mask[..., None], tokens, 0), src_key_padding_mask=~mask)
        if activations.prefix_tokens:
            pooled = hidden[:, 0]
        else:
            pooled = torch.where(mask[..., None], hidden, 0).sum(1) / mask.sum(1, keepdim=True)
        logits: Tensor = self.head(pooled)
        return logits
