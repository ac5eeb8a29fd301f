"""Images for the experiments, decoded once."""

import sys

import numpy as np
import torch
from dr_frankenstein import networks
from torch import Tensor
from tqdm.auto import tqdm

import hf_stitch
from hf_stitch.data import read_data

DATA = {"cifar10": "uoft-cs/cifar10", "fashion_mnist": "zalando-datasets/fashion_mnist"}
"""Name -> data set on the Hub."""


def read(name: str, split: str, count: int, data_dir: str | None) -> tuple[Tensor, Tensor]:
    """Read the first images of a data set in :data:`DATA`, from a local folder or the Hub, and their labels."""
    samples = hf_stitch.Samples.of(read_data(DATA[name], data_dir=data_dir, split=split))
    samples = samples.take(min(count, len(samples)))
    pixels = torch.zeros(len(samples), 3, 32, 32, dtype=torch.uint8)
    start = 0
    for batch in tqdm(samples.batches(500), f"{name} {split}", delay=3, disable=not sys.stderr.isatty()):
        arrays = np.stack([np.asarray(image.convert("RGB")) for image in batch.samples])
        frame = (32 - arrays.shape[1]) // 2
        inside = slice(frame, 32 - frame)
        pixels[start : start + len(arrays), :, inside, inside] = torch.from_numpy(arrays).permute(0, 3, 1, 2)
        start += len(arrays)
    return pixels, torch.tensor(samples.labels)


def samples(name: str, split: str, count: int, data_dir: str | None) -> hf_stitch.Samples:
    """Read images as samples of normalised tensors ``(3, 32, 32)``, with the arguments of :func:`read`."""
    pixels, labels = read(name, split, count, data_dir)
    return hf_stitch.Samples.of(networks.normalised(pixels), label=labels.tolist())


def noise(count: int) -> hf_stitch.Samples:
    """Draw images of uniform noise, as samples of normalised tensors ``(3, 32, 32)``."""
    pixels = torch.randint(0, 256, (count, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    return hf_stitch.Samples.of(networks.normalised(pixels))


def augmented(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Flip images ``(n, 3, 32, 32)`` at random and crop them after padding with 4 zeros."""
    n = len(pixels)
    rows, columns = torch.randint(0, 9, (2, n, 1), generator=generator) + torch.arange(32)
    columns = torch.where(torch.rand(n, 1, generator=generator) < 0.5, columns.flip(1), columns)
    padded = torch.nn.functional.pad(pixels, (4, 4, 4, 4))
    # Advanced indices around a slice come first: (n, 32, 32, 3).
    chosen = padded[torch.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return chosen.permute(0, 3, 1, 2)


def augmented_samples(samples: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Augment normalised samples, for the argument ``augment`` of :meth:`hf_stitch.training.TaskLoss.fit`."""
    black = networks.normalised(torch.zeros(3, 32, 32))
    return list(augmented(torch.stack(samples) - black, generator) + black)
