"""Shared parts of the experiments: sizes, networks, pages and counts."""

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import study
from dr_frankenstein import frankenstein, images, networks
from dr_frankenstein.base_training import Base, adapted

from hf_stitch import Adapter, Samples
from hf_stitch.analysis import Score
from hf_stitch.training import TaskLoss
from hf_stitch.training.loop import Schedule

Networks = Mapping[str, Adapter]
TASK = "task loss"
SHORT: dict[str, Any] = {"lr": 1e-2, "schedule": "cosine"}
"""Larger steps that let short training converge from any initialisation."""
CUTS = {"tiny10": networks.Tiny10.cuts, "resnet20": networks.ResNet20.cuts}
"""Architecture -> layers to stitch at."""
TITLES = {"tiny10": "Tiny-10", "resnet20": "ResNet-20"}
IMAGES, EPOCHS = 10_000, 6
"""Training images and epochs of the networks if the published ones are not given."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of an experiment and options of task-loss matching."""

    train: int  # images to match on
    test: int  # held-out images
    epochs: int = 0  # of task-loss matching
    lr: float = 1e-3
    schedule: Schedule = "step"
    batch: int = 128

    def samples(self, data_dir: str | None) -> list[Samples]:
        """Read the images of CIFAR-10 to match on, and the held-out images."""
        return [images.samples("cifar10", split, getattr(self, split), data_dir) for split in ("train", "test")]

    @property
    def task_loss(self) -> TaskLoss:
        """Task-loss matching with the soft labels of the target."""
        return TaskLoss(epochs=self.epochs, batch_size=self.batch, lr=self.lr, schedule=self.schedule)

    def __str__(self) -> str:
        steps = self.epochs * math.ceil(self.train / self.batch)
        trained = f"task loss for {steps:,} steps of {self.batch} images (Adam, {self.lr:g}, {self.schedule})"
        return f"{self.train:,} training images without augmentation, {trained}, {self.test:,} test images"


def read(description: str | None) -> argparse.Namespace:
    """Read the command line."""
    return study.parser(description, "data-dir", "published", "networks").parse_args()


def started(arguments: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """Return the beginning of a record."""
    return {"preset": sizes, "setting": str(sizes), "networks": origin(arguments), "architectures": {}}


def loaded(architecture: str, arguments: argparse.Namespace, seeds: int = 2) -> dict[str, Adapter]:
    """Load the published networks if their folder is given, otherwise train networks: ascending number -> network."""
    if not arguments.published:
        bases = [Base(architecture, EPOCHS, IMAGES, seed) for seed in range(seeds)]
        return adapted(bases, arguments.networks, arguments.data_dir)
    published, _ = networks.read_folder(arguments.published / f"drfrankenstein_{architecture}")
    return {str(number): published[f"in{number}"] for number in sorted(int(name[2:]) for name in published)}


def origin(arguments: argparse.Namespace) -> str:
    trained = f"networks trained for {EPOCHS} epochs on {IMAGES:,} images"
    return "the authors' published networks" if arguments.published else trained


def disjoint(names: Iterable[str], count: int) -> list[tuple[str, str]]:
    """Pair the first network with the second, the third with the fourth, and so on, so that pairs are disjoint."""
    ordered = list(names)
    return list(zip(ordered[::2], ordered[1::2], strict=False))[:count]


def pairs_of(names: Iterable[str], count: int) -> list[tuple[str, str]]:
    """Pair networks disjointly, or two networks in both directions."""
    ordered = list(names)
    return disjoint(ordered, count) if len(ordered) > 2 else frankenstein.ring(ordered)[:count]


def counted(pairs: Iterable[str]) -> tuple[str, int]:
    """Count pairs such as ``0 → 1``: as text, and as a number that counts both directions once."""
    ordered = list(pairs)
    units = len({frozenset(pair.split(" → ")) for pair in ordered})
    return "1 pair, both directions" if (len(ordered), units) == (2, 1) else f"{len(ordered)} pairs", units


def written(script: str, record: Mapping[str, Any], rows: Sequence[Mapping[str, str]], **figures: Any) -> str:
    """Fill a page with its claims, its footer, and the networks and setting of the record."""
    stated = {key: record[key] for key in ("networks", "setting") if key in record}
    options = "--published PUBLISHED --networks NETWORKS --data-dir DATA --out OUT"
    return study.filled(script, rows, options, **{**stated, **figures})


def scored(record: Mapping[str, float]) -> Score:
    return Score(**record)
