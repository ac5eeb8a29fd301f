"""Networks of Csiszárik et al. 2021 as plain modules."""

from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

import hf_stitch
from hf_stitch import Adapter

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)

TINY10 = (
    (3, 16, 3, 1), (16, 16, 3, 1), (16, 32, 3, 2), (32, 32, 3, 1), (32, 32, 3, 1), (32, 64, 3, 2), (64, 64, 3, 1),
    (64, 64, 1, 1),
)  # fmt: skip
"""Input channels, output channels, kernel size and stride of the eight convolutions."""


class Tiny10(nn.Module):
    """Tiny-10: eight convolutions without padding, each with BatchNorm and ReLU, mean pooling and one linear layer.

    86,778 parameters. Stitched at ``bn1`` to ``bn8``.
    """

    cuts = tuple(f"bn{i}" for i in range(1, len(TINY10) + 1))

    def __init__(self) -> None:
        super().__init__()
        for i, (channels_in, channels_out, kernel, stride) in enumerate(TINY10, 1):
            self.add_module(f"conv{i}", nn.Conv2d(channels_in, channels_out, kernel, stride))
            self.add_module(f"bn{i}", nn.BatchNorm2d(channels_out))
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``(batch, 3, 32, 32)`` to logits ``(batch, 10)``."""
        for i in range(1, len(TINY10) + 1):
            x = functional.relu(self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(x)))
        return self.fc(x.mean((2, 3)))


class Block(nn.Module):
    """Two 3×3 convolutions with BatchNorm and a shortcut (a 1×1 convolution if the shape changes)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            convolution = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(channels_out))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, channels, height, width)`` to the output channels of the block, downsampled by its stride."""
        inner = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(inner + self.shortcut(x))


class ResNet20(nn.Module):
    """ResNet-20: 3×3 stem without pooling, three stages of three blocks, mean pooling, linear layer (He et al. 2016).

    272,474 parameters at width 1. Stitched at ``conv1`` and at the outputs of blocks.
    """

    cuts = ("conv1", *(f"layer{stage}.{block}" for stage in (1, 2, 3) for block in range(3)))

    def __init__(self, width: float = 1) -> None:
        super().__init__()
        channels = round(16 * width)
        self.conv1 = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        for stage, (channels_out, stride) in enumerate(((16, 1), (32, 2), (64, 2)), 1):
            wide = round(channels_out * width)
            blocks = Block(channels, wide, stride), Block(wide, wide, 1), Block(wide, wide, 1)
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
            channels = wide
        self.fc = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``(batch, 3, 32, 32)`` to logits ``(batch, 10)``."""
        x = functional.relu(self.bn1(self.conv1(x)))
        for stage in (1, 2, 3):
            x = self.get_submodule(f"layer{stage}")(x)
        return self.fc(x.mean((2, 3)))


VIT_CUTS = tuple(f"blocks.{i}" for i in range(6))
"""Layers of :func:`small_vit`."""


def small_vit() -> VisionTransformer:
    """Create a vision transformer for CIFAR: patches of 8×8, 96 features, 6 blocks with 4 heads; 692,458 parameters."""
    return VisionTransformer(img_size=32, patch_size=8, embed_dim=96, depth=len(VIT_CUTS), num_heads=4, num_classes=10)


def read(path: str | Path) -> tuple[nn.Module, tuple[str, ...]]:
    """Load a trained Tiny-10, ResNet-20 or small ViT from a safetensors file, in eval mode."""
    weights = {name.replace("downsample", "shortcut"): value for name, value in load_file(path).items()}
    network: nn.Module
    cuts: tuple[str, ...]
    if "pos_embed" in weights:
        network, cuts = small_vit(), VIT_CUTS
    elif "layer1.0.conv1.weight" in weights:
        network, cuts = ResNet20(weights["conv1.weight"].shape[0] / 16), ResNet20.cuts
    else:
        network, cuts = Tiny10(), Tiny10.cuts
    network.load_state_dict(weights)
    return network.eval(), cuts


def read_folder(folder: str | Path) -> tuple[dict[str, Adapter], tuple[str, ...]]:
    """Load all trained networks of a folder; they must share one architecture."""
    adapters, cuts = {}, tuple[str, ...]()
    for path in sorted(Path(folder).glob("*.safetensors")):
        network, cuts = read(path)
        adapters[path.stem.split("-")[0] if path.stem.startswith("in") else path.stem.split("-")[-1]] = adapted(network)
    if not adapters:
        raise FileNotFoundError(f"{folder} contains no safetensors files of trained networks")
    return adapters, cuts


def normalised(pixels: Tensor) -> Tensor:
    """Normalise images ``(…, 3, 32, 32)`` uint8 like in training."""
    return (pixels / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def adapted(network: nn.Module, processor: Callable[[Image.Image], Tensor] | None = None) -> Adapter:
    """Load a trained network as an adapter. Without a processor it accepts normalised tensors."""
    return hf_stitch.load(network.eval(), example_inputs=torch.randn(2, 3, 32, 32), processor=processor)
