"""Networks with a common start and common coefficients, with atoms trained on tasks of CIFAR-100, and comparisons."""

import argparse
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import study
import torch
from dr_frankenstein.networks import Tiny10
from filter_atoms import networks
from filter_atoms.networks import Images, Recipe
from filter_atoms.pairwise import symmetric
from hf_stitch_filter_atoms import atomize, train_atoms_only
from numpy.typing import NDArray
from torch import Tensor, nn

from hf_stitch.metrics import WeightMetric, linear_cka

Array = NDArray[np.float64]
Task = tuple[int, ...]
PER_TASK = 10  # classes of a task
PUBLISHED_STARTS = (0, 1, 2, 3, 4, 6, 7, 8, 10, 11)  # numbers of the published networks


BASE, BASE_IMAGES = Recipe(6, 0.05, 128, augment=True, weight_decay=1e-4), 50_000
"""Training of the common start on CIFAR-10 if no published network is given."""
TUNED = Recipe(epochs=30, lr=0.05, augment=True)
"""Training of atoms and head on a task: atoms move, and networks improve on their start with a new head."""
SIZES = {"tasks": 10, "probe": 500, "positions": 8}
"""Tasks, images for comparing activations, and random positions per image."""


def disjoint_tasks(count: int, seed: int) -> list[Task]:
    """Split the 100 classes at random into tasks of ten, and return the first ``count`` tasks."""
    order = np.random.default_rng(seed).permutation(100).tolist()
    return [tuple(order[PER_TASK * i : PER_TASK * (i + 1)]) for i in range(count)]


def overlapping_tasks(count: int, seed: int) -> list[Task]:
    """Draw tasks of ten classes out of 25 random classes: two tasks share four classes on average."""
    draw = np.random.default_rng(seed)
    pool = draw.permutation(100)[:25]
    return [tuple(draw.choice(pool, PER_TASK, replace=False).tolist()) for _ in range(count)]


def overlap(first_task: Task, second_task: Task, groups: Mapping[int, int] | None = None) -> float:
    """Return the share of classes of two tasks that are equal or in the same group."""
    first, second = ([groups[c] for c in task] if groups else list(task) for task in (first_task, second_task))
    return sum(min(first.count(label), second.count(label)) for label in set(first)) / PER_TASK


@dataclass(frozen=True, eq=False)
class Cifar100:
    """CIFAR-100 with the 20 superclasses of its classes."""

    train: Images
    test: Images
    superclasses: Mapping[int, int]

    @classmethod
    def read(cls, data_dir: str | None) -> "Cifar100":
        train, test = (networks.read("cifar100_fine", split, data_dir) for split in ("train", "test"))
        coarse = networks.read("cifar100", "train", data_dir).labels.tolist()
        return cls(train, test, dict(zip(train.labels.tolist(), coarse, strict=True)))

    def probe(self, tasks: Sequence[Task], count: int) -> Images:
        """Return test images of the classes of all tasks, in random order."""
        images = self.test.of_classes(sorted({label for task in tasks for label in task}))
        return images.select(torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:count])


def start(arguments: argparse.Namespace, number: int) -> nn.Module:
    """Return the common start: a published network, or a network trained on CIFAR-10."""
    if arguments.published:
        return networks.published(arguments.published, PUBLISHED_STARTS[number])
    path = arguments.networks / f"tiny10-cifar10-{BASE_IMAGES}x{BASE.epochs}-{number}.safetensors"

    def fit(network: nn.Module) -> None:
        images = networks.read("cifar10", "train", arguments.data_dir, BASE_IMAGES)
        networks.train(network, images, BASE, number, name=f"start {number}")

    return networks.load_or_train(path, networks.seeded(Tiny10, number), fit)


def origin(arguments: argparse.Namespace) -> str:
    trained = f"a Tiny-10 trained on {BASE_IMAGES:,} images of CIFAR-10 for {BASE}"
    return "a published Tiny-10, trained on CIFAR-10" if arguments.published else trained


def on_task(
    common: nn.Module, images: Images, recipe: Recipe, seed: int, path: Path, *, head_only: bool = False
) -> nn.Module:
    """Train the atoms and a fresh head (or only the head) of an atomic network on a task, or load it from the cache."""
    network = copy.deepcopy(common)
    networks.fresh_head(network, PER_TASK, seed)

    def fit(model: nn.Module) -> None:
        train_atoms_only(model, also=("fc",))
        if head_only:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.startswith("fc."))
        chosen = replace(recipe, frozen_statistics=True) if head_only else recipe
        networks.train(model, images, chosen, seed, name=path.stem)

    return networks.load_or_train(path, network, fit)


def atomic(common: nn.Module, atoms: int | None = None) -> tuple[nn.Module, float]:
    """Return an atomic copy of a network, and the relative error of its worst layer."""
    network = copy.deepcopy(common)
    return network, atomize(network, atoms).worst


def spatial(network: nn.Module) -> list[str]:
    """Return the names of all convolutions that are larger than 1×1."""
    return [n for n, m in network.named_modules() if isinstance(m, nn.Conv2d) and max(m.kernel_size) > 1]


@torch.no_grad()
def features(network: nn.Module, layers: Sequence[str], probe: Images) -> dict[str, Tensor]:
    """Return outputs of convolutions at shared random positions: ``(images · positions, channels)``."""
    rows_of: dict[str, list[Tensor]] = {layer: [] for layer in layers}
    draws = {layer: torch.Generator().manual_seed(0) for layer in layers}

    def keep(layer: str, output: Tensor) -> None:
        images, channels, height, width = output.shape
        rows, columns = torch.rand(2, images, 1, SIZES["positions"], generator=draws[layer])
        places = (rows * height).long() * width + (columns * width).long()
        chosen = output.flatten(2).gather(2, places.expand(-1, channels, -1))
        rows_of[layer].append(chosen.movedim(1, 2).flatten(0, 1))

    with study.watched({layer: network.get_submodule(layer) for layer in layers}, keep):
        networks.logits(network, probe)
    return {layer: torch.cat(parts).double() for layer, parts in rows_of.items()}


def probed(models: Sequence[nn.Module], probe: Images) -> dict[str, list[Array]]:
    """Compare activations of all pairs of models: ``cka`` (debiased) and ``cca`` (the paper's) -> matrix by layer."""
    layers = spatial(models[0])
    rows = [features(model, layers, probe) for model in models]
    matrices: dict[str, list[Array]] = {"cka": [], "cca": []}
    for layer in layers:
        bases = [basis(network_rows[layer]) for network_rows in rows]
        pair = {
            "cka": lambda i, j, layer=layer: float(linear_cka(rows[i][layer], rows[j][layer], debiased=True)),
            "cca": lambda i, j, bases=bases: canonical(bases[i], bases[j]),
        }
        for name, value in pair.items():
            matrices[name].append(symmetric(len(models), value))
    return matrices


def basis(rows: Tensor) -> Tensor:
    """Return an orthonormal basis of the centred channels of activations ``(n, channels)``.

    Grey images span only some directions of the first layers: directions with less than 1e-5 of the largest singular
    value are left out.
    """
    left, values, _ = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    return left[:, values > 1e-5 * values[0]]


def canonical(first: Tensor, second: Tensor) -> float:
    """Compute S_CCA of the paper, the root mean square canonical correlation, from the bases of two sides."""
    return float((first.T @ second).norm()) / min(first.shape[1], second.shape[1]) ** 0.5


def by_weights(models: Sequence[nn.Module], metric: WeightMetric) -> list[Array]:
    """Compare the weights of all pairs of models: one matrix ``(models, models)`` per convolution larger than 1×1."""
    read = [metric.read(model) for model in models]
    return [
        symmetric(len(models), partial(lambda layer, i, j: metric.value(read[i][layer], read[j][layer]), layer))
        for layer in spatial(models[0])
    ]
