"""Shared parts of the experiments: runs, presets, networks, pages and claims."""

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import study
from dr_frankenstein import base_training, frankenstein, images, networks
from dr_frankenstein.base_training import Base, adapted, recorded_accuracy

import hf_stitch
from hf_stitch.analysis import Score
from hf_stitch.training import TaskLoss
from hf_stitch.training.loop import Schedule
from hf_stitch.training.prepared import Augment

Networks = Mapping[str, hf_stitch.Adapter]


@dataclass(frozen=True)
class Preset:
    """Sizes of an experiment and options of task-loss matching."""

    train: int  # images to match on
    test: int  # held-out images
    epochs: int  # of task-loss matching
    base: tuple[int, int]  # training images and epochs of the base networks, where no published ones are given
    seeds: int = 2  # base networks of each kind
    augment: bool = False
    lr: float = 1e-3
    schedule: Schedule = "step"
    batch: int = 128

    def samples(self, data: str, data_dir: str | None) -> tuple[hf_stitch.Samples, hf_stitch.Samples]:
        """Read the images to match on and the held-out images."""
        sizes = {"train": self.train, "test": self.test}
        train, test = (images.samples(data, split, n, data_dir) for split, n in sizes.items())
        return train, test

    @property
    def steps(self) -> int:
        """Number of optimizer steps of task-loss matching."""
        return self.epochs * math.ceil(self.train / self.batch)

    @property
    def task_loss(self) -> TaskLoss:
        """Task-loss matching with the soft labels of the target."""
        return TaskLoss(epochs=self.epochs, batch_size=self.batch, lr=self.lr, schedule=self.schedule)

    @property
    def augmentation(self) -> Augment | None:
        """Augmentation in task-loss matching, or ``None``."""
        return images.augmented_samples if self.augment else None

    def __str__(self) -> str:
        trained = f"task loss for {self.steps:,} steps of {self.batch} images (Adam, {self.lr:g}, {self.schedule})"
        augmented = "with" if self.augment else "without"
        return f"{self.train:,} training images {augmented} augmentation, {trained}, {self.test:,} test images"


TASK = "task loss"
SHORT: dict[str, Any] = {"lr": 1e-2, "schedule": "cosine"}
"""Larger steps, so that short training converges from any initialisation."""
PAPER = Preset(50_000, 10_000, 30, (50_000, 300), 5, True)
CUTS = {"tiny10": networks.Tiny10.cuts, "resnet20": networks.ResNet20.cuts}
"""Architecture -> layers to stitch at."""
TITLES = {"tiny10": "Tiny-10", "resnet20": "ResNet-20"}
Claim = partial(study.Claim, "1", stand_in=False)
question = partial(study.Claim, study.OWN, stand_in=False)


@dataclass(frozen=True)
class Run:
    """A run of a script from the command line."""

    arguments: argparse.Namespace
    preset: Preset

    @classmethod
    def of(cls, description: str | None, presets: Mapping[str, Preset]) -> "Run":
        """Read the arguments."""
        arguments = study.parser(description, "data-dir", "published", "networks").parse_args()
        return cls(arguments, presets[arguments.preset])

    @property
    def name(self) -> str:
        """Name of the preset."""
        return str(self.arguments.preset)

    def samples(self, data: str = "cifar10") -> tuple[hf_stitch.Samples, hf_stitch.Samples]:
        """Read the images to match on and the held-out images."""
        return self.preset.samples(data, self.arguments.data_dir)

    def networks(self, architecture: str) -> dict[str, hf_stitch.Adapter]:
        """Load the published networks if their folder is given, or else train networks: ascending number -> network."""
        return loaded(architecture, self.arguments, self.preset)

    def kind(self, bases: Sequence[Base], layers: Sequence[str]) -> "Kind":
        """Load or train networks of a kind."""
        found = adapted(bases, self.arguments.networks, self.arguments.data_dir)
        return Kind(found, [recorded_accuracy(base, self.arguments.networks) for base in bases], layers)

    def published(self, architecture: str, count: int, layers: Sequence[str]) -> "Kind":
        """Load published networks as a kind, and measure their accuracies."""
        found = dict(list(self.networks(architecture).items())[:count])
        tested = images.read("cifar10", "test", 10_000, self.arguments.data_dir)
        return Kind(found, [base_training.accuracy(network.model, *tested) for network in found.values()], layers)

    def record(self) -> dict[str, Any]:
        """Begin the record."""
        return {
            "preset": self.preset, "setting": str(self.preset), "networks": origin(self.arguments, self.preset),
            "architectures": {},
        }  # fmt: skip


def loaded(architecture: str, arguments: argparse.Namespace, preset: Preset) -> dict[str, hf_stitch.Adapter]:
    """Load the published networks if their folder is given, or else train networks: ascending number -> network."""
    if not arguments.published:
        count, epochs = preset.base
        bases = [Base(architecture, epochs, count, seed) for seed in range(preset.seeds)]
        return adapted(bases, arguments.networks, arguments.data_dir)
    found, _ = networks.read_folder(arguments.published / f"drfrankenstein_{architecture}")
    return {str(number): found[f"in{number}"] for number in sorted(int(name[2:]) for name in found)}


def origin(arguments: argparse.Namespace, preset: Preset) -> str:
    """Describe where the networks come from."""
    if arguments.published:
        return "the authors' published networks"
    count, epochs = preset.base
    return f"networks trained for {epochs} epochs on {count:,} images"


def disjoint(names: Iterable[str], count: int) -> list[tuple[str, str]]:
    """Pair the first network with the second, the third with the fourth and so on: no network is in two pairs."""
    ordered = list(names)
    return list(zip(ordered[::2], ordered[1::2], strict=False))[:count]


def pairs_of(names: Iterable[str], count: int) -> list[tuple[str, str]]:
    """Pair networks disjointly, or two networks in both directions."""
    ordered = list(names)
    return disjoint(ordered, count) if len(ordered) > 2 else frankenstein.ring(ordered)[:count]


def counted(pairs: Iterable[str]) -> tuple[str, int]:
    """Return how many pairs such as ``0 → 1`` there are, as text and with both directions counted once."""
    ordered = list(pairs)
    units = len({frozenset(pair.split(" → ")) for pair in ordered})
    return "1 pair, both directions" if (len(ordered), units) == (2, 1) else f"{len(ordered)} pairs", units


def written(page: str, name: str, record: Mapping[str, Any], rows: Sequence[Mapping[str, str]], **fields: Any) -> str:
    """Fill a page: its claims, its footer, and what the record says of networks and setting."""
    known = {key: record[key] for key in ("networks", "setting") if key in record}
    return page.format(**{"footer": footer(name), "verdicts": study.verdicts(rows), **known, **fields})


def footer(name: str, script: str = "") -> str:
    """Return the end of a page: the record and the command of the script, which has the same name by default."""
    options = "--published PUBLISHED --networks NETWORKS --data-dir DATA --out OUT"
    return study.footer(name, f"dr_frankenstein.{script or name}", options)


def scored(record: Mapping[str, float]) -> Score:
    """Read a score from the record."""
    return Score(**record)


@dataclass(frozen=True)
class Kind:
    """Networks of one kind, which are stitched to each other at the same layers, and their accuracies."""

    networks: Networks
    accuracies: Sequence[float]
    layers: Sequence[str]


def by_kind(
    kinds: Mapping[str, Kind], preset: Preset, train: hf_stitch.Samples, test: hf_stitch.Samples
) -> dict[str, dict[str, Any]]:
    """Stitch each network to the next one of its kind, by least squares and by task loss."""
    found = {}
    for name, kind in kinds.items():
        some = kind.networks
        stitched = frankenstein.answers(
            some, some, frankenstein.ring(some), kind.layers, train, test,
            direct={}, trained={TASK: preset.task_loss}, augment=preset.augmentation,
        )  # fmt: skip
        methods = (TASK, frankenstein.START, *frankenstein.BASELINES)
        relative = {method: [stitched.relative(layer, method) for layer in kind.layers] for method in methods}
        found[name] = {"accuracies": kind.accuracies, "layers": kind.layers, "relative_accuracy": relative}
    return found


def table_of_kinds(found: Mapping[str, Mapping[str, Any]], first: str) -> str:
    """Return the table of :func:`by_kind`, with kinds of the same layers."""
    layers, rows = next(iter(found.values()))["layers"], []
    for name, kind in found.items():
        own = ", ".join(f"{accuracy:.3f}" for accuracy in kind["accuracies"])
        for method in (TASK, frankenstein.START, "mean_only"):
            scores = map(scored, kind["relative_accuracy"][method])
            cells = [f"{s.value:.3f}" if method == "mean_only" else str(s) for s in scores]
            rows.append((name, own, method.replace("_", " "), *cells))
    return study.markdown((first, "accuracy of the networks", "method", *layers), rows)
