"""Images for the experiments, decoded once."""

import numpy as np
import torch
from dr_frankenstein import networks
from torch import Tensor
from torch.nn import functional

from hf_stitch import Samples
from hf_stitch.data import read_data

DATA = {
    "cifar10": ("uoft-cs/cifar10", "label"),
    "cifar100": ("uoft-cs/cifar100", "coarse_label"),
    "cifar100_fine": ("uoft-cs/cifar100", "fine_label"),
    "fashion_mnist": ("zalando-datasets/fashion_mnist", "label"),
    "mnist": ("ylecun/mnist", "label"),
}
"""Name -> dataset on the Hub and its label column."""


def raw(name: str, split: str, count: int | None, data_dir: str | None) -> Samples:
    """Read the first images of a dataset in :data:`DATA`, or all images, from a local folder or the Hub."""
    source, label = DATA[name]
    samples = Samples.of(read_data(source, data_dir=data_dir, split=split), label=label)
    return samples if count is None else samples.take(min(count, len(samples)))


def pixels(samples: Samples) -> Tensor:
    """Return unmodified images, ``(n, channels, height, width)`` uint8."""
    arrays = [np.asarray(image) for batch in samples.batches(500, progress="reading") for image in batch.samples]
    stacked = torch.from_numpy(np.stack(arrays))
    return stacked.permute(0, 3, 1, 2).contiguous() if stacked.ndim == 4 else stacked[:, None]


def squares(samples: Samples) -> Tensor:
    """Return images as RGB of 32 × 32 pixels ``(n, 3, 32, 32)`` uint8, with a black frame around smaller images."""
    stacked = pixels(samples)
    return functional.pad(stacked, [(32 - stacked.shape[-1]) // 2] * 4).expand(-1, 3, -1, -1).contiguous()


def read(name: str, split: str, count: int | None, data_dir: str | None) -> tuple[Tensor, Tensor]:
    """Read images of a dataset as :func:`squares`, and their labels."""
    split_samples = raw(name, split, count, data_dir)
    return squares(split_samples), torch.tensor(split_samples.labels)


def samples(name: str, split: str, count: int, data_dir: str | None) -> Samples:
    """Read images as samples of normalised tensors ``(3, 32, 32)``, with the arguments of :func:`read`."""
    pixels, labels = read(name, split, count, data_dir)
    return Samples.of(networks.normalised(pixels), label=labels.tolist())


def noise(count: int) -> Samples:
    """Draw images of uniform noise, as samples of normalised tensors ``(3, 32, 32)``."""
    pixels = torch.randint(0, 256, (count, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    return Samples.of(networks.normalised(pixels))


def augmented(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Flip images ``(n, 3, 32, 32)`` at random and crop them after padding with 4 zeros."""
    n = len(pixels)
    rows, columns = torch.randint(0, 9, (2, n, 1), generator=generator) + torch.arange(32)
    columns = torch.where(torch.rand(n, 1, generator=generator) < 0.5, columns.flip(1), columns)
    padded = torch.nn.functional.pad(pixels, (4, 4, 4, 4))
    # Advanced indices around a slice come first: (n, 32, 32, 3).
    return padded[torch.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
