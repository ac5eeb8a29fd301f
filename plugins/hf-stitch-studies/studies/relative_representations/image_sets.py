"""Images to train and test small networks on, with MNIST split in two."""

from relative_representations import images
from relative_representations.images import read

import hf_stitch
from hf_stitch.data import read_data

MNIST = "ylecun/mnist"
SETS = ("mnist", "fashion_mnist", "cifar10", "cifar100")
"""Data sets of Moschella et al. 2023, sections 4 and 5.1."""
TITLES = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
MNIST_TRAIN = 2_000
"""Test images of MNIST that networks are trained on, because its training images are not at hand."""


def parts(name: str, train: int, test: int, data_dir: str | None) -> tuple[hf_stitch.Samples, hf_stitch.Samples]:
    """Read the first training and test images of a data set.

    MNIST is read from its test images: the first two thousand for training, those after them for testing.

    Args:
        name: Name of the data set.
        train: Number of training images, at most.
        test: Number of test images, at most.
        data_dir: Local folder of the data sets. ``None``: the Hub.

    Returns:
        Training and test images with their classes (of CIFAR-100, the 20 coarse classes).
    """
    if name in images.DATA:
        return read(name, "train", train, data_dir), read(name, "test", test, data_dir)
    samples = hf_stitch.Samples.of(read_data(MNIST, data_dir=data_dir, split="test"), label="label")
    held = range(MNIST_TRAIN, min(MNIST_TRAIN + test, len(samples)))
    return samples.take(min(train, MNIST_TRAIN)), samples.select(held)
