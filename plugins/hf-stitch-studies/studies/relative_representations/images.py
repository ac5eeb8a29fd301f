"""Images for the experiments, decoded once."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

import hf_stitch
from hf_stitch.data import read_data

DATA = {
    "cifar10": ("uoft-cs/cifar10", "label"),
    "cifar100": ("uoft-cs/cifar100", "coarse_label"),
    "fashion_mnist": ("zalando-datasets/fashion_mnist", "label"),
}
"""Name -> data set on the Hub and its label column."""


def read(name: str, split: str, count: int, data_dir: str | None) -> hf_stitch.Samples:
    """Read the first ``count`` images of a data set, or all if there are fewer."""
    source, label = DATA[name]
    samples = hf_stitch.Samples.of(read_data(source, data_dir=data_dir, split=split), label=label)
    return samples.take(min(count, len(samples)))


def parts(name: str, train: int, test: int, data_dir: str | None) -> tuple[hf_stitch.Samples, hf_stitch.Samples]:
    """Read the first training and test images of a data set."""
    return read(name, "train", train, data_dir), read(name, "test", test, data_dir)


def squares(samples: hf_stitch.Samples) -> Tensor:
    """Return the images as RGB of 32 × 32 pixels ``(n, 3, 32, 32)`` uint8; smaller ones get a black frame."""
    stacked = pixels(samples)
    border = (32 - stacked.shape[-1]) // 2
    return functional.pad(stacked, [border] * 4).expand(-1, 3, -1, -1).contiguous()


def pixels(samples: hf_stitch.Samples) -> Tensor:
    """Return the images as a tensor ``(n, channels, height, width)`` uint8."""
    arrays = [np.asarray(image) for batch in samples.batches(500, progress="reading") for image in batch.samples]
    stacked = torch.from_numpy(np.stack(arrays))
    return stacked.permute(0, 3, 1, 2).contiguous() if stacked.ndim == 4 else stacked[:, None]
