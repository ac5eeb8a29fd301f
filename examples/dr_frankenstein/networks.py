"""The networks of Csiszárik et al. 2021, as ordinary modules."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)

TINY10 = (
    (3, 16, 3, 1),
    (16, 16, 3, 1),
    (16, 32, 3, 2),
    (32, 32, 3, 1),
    (32, 32, 3, 1),
    (32, 64, 3, 2),
    (64, 64, 3, 1),
    (64, 64, 1, 1),
)
"""Channels in and out, kernel and stride of the eight convolutions."""


class Tiny10(nn.Module):
    """Eight convolutions without padding, each with BatchNorm and ReLU; mean over space; one linear layer.

    86,778 parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        for i, (channels_in, channels_out, kernel, stride) in enumerate(TINY10, 1):
            self.add_module(f"conv{i}", nn.Conv2d(channels_in, channels_out, kernel, stride))
            self.add_module(f"bn{i}", nn.BatchNorm2d(channels_out))
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, 3, 32, 32) to logits (batch, 10)."""
        for i in range(1, len(TINY10) + 1):
            x = functional.relu(self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(x)))
        return self.fc(x.mean((2, 3)))

    @classmethod
    def from_file(cls, path: str | Path) -> "Tiny10":
        """Trained weights from a safetensors file, in eval mode."""
        network = cls()
        network.load_state_dict(load_file(path))
        return network.eval()


def normalise(image: Image.Image) -> Tensor:
    """A CIFAR image as the networks were trained on it: (3, 32, 32)."""
    values = torch.from_numpy(np.asarray(image.convert("RGB"), dtype=np.float32) / 255).permute(2, 0, 1)
    return (values - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
