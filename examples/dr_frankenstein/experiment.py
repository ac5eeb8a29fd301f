"""Shared parts of the experiments: arguments, presets and output."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import frankenstein
import images
from base_training import Base, adapted, recorded_accuracy
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

import hf_stitch
from hf_stitch.analysis.evaluation import Score
from hf_stitch.training import TaskLoss
from hf_stitch.training.prepared import Augment
from hf_stitch.training.schedule import Schedule


@dataclass(frozen=True)
class Preset:
    """Sizes and hyperparameters of an experiment.

    Attributes:
        train: Number of images to match on.
        test: Number of held-out images.
        epochs: Epochs of task-loss matching.
        base: Number of training images and epochs of the base networks.
        seeds: Number of base networks of each kind.
        augment: Whether task-loss matching augments images.
        lr: Learning rate of task-loss matching.
        schedule: Learning rate schedule of task-loss matching.
    """

    train: int
    test: int
    epochs: int
    base: tuple[int, int]
    seeds: int = 2
    augment: bool = False
    lr: float = 1e-3
    schedule: Schedule = "step"

    def samples(self, data: str, data_dir: str | None) -> tuple[hf_stitch.Samples, hf_stitch.Samples]:
        """Read the images to match on and the held-out images."""
        sizes = {"train": self.train, "test": self.test}
        train, test = (images.samples(data, split, n, data_dir) for split, n in sizes.items())
        return train, test

    @property
    def task_loss(self) -> TaskLoss:
        """Task-loss matching with the soft labels of the target."""
        return TaskLoss(epochs=self.epochs, lr=self.lr, schedule=self.schedule)

    @property
    def augmentation(self) -> Augment | None:
        """Augmentation in task-loss matching, or ``None``."""
        return images.augmented_samples if self.augment else None


TASK = "task loss"
SHORT: dict[str, Any] = {"lr": 1e-2, "schedule": "cosine"}
"""Larger steps, so that short training converges from any initialisation."""
TEST = Preset(150, 60, 1, (150, 1))
"""Preset for a quick test run."""
PAPER = Preset(50_000, 10_000, 30, (50_000, 300), 5, True)


def parser(description: str) -> argparse.ArgumentParser:
    """Create a parser with the arguments shared by all experiments."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--preset",
        choices=("small", "paper", "test"),
        default="small",
        help="small: minutes; paper: days; test: seconds, to check that the script runs",
    )
    made.add_argument("--data-dir", help="local folder of the data sets; default: the Hub")
    made.add_argument(
        "--networks", type=Path, required=True, help="folder of base networks; missing networks are trained"
    )
    made.add_argument("--out", type=Path, help="output folder for scores as JSON and figures as PNG")
    return made


def show(table: Table, name: str, record: Mapping[str, Any], pictures: Mapping[str, Figure], out: Path | None) -> None:
    """Print the table, and write the record and the figures if an output folder is given."""
    Console(width=180).print(table)
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(record, indent=2, default=vars) + "\n")
    for picture, figure in pictures.items():
        figure.savefig(out / f"{picture}.png", dpi=150)


def by_kind(
    title: str,
    kinds: Mapping[str, Sequence[Base]],
    layers: Sequence[str],
    preset: Preset,
    arguments: argparse.Namespace,
) -> tuple[Table, dict[str, Any]]:
    """Stitch the networks of each kind to each other, by least squares and by task loss.

    Args:
        title: Title of the table.
        kinds: Kind -> base networks.
        layers: Layers to stitch at, the same on both sides.
        preset: Sizes and hyperparameters.
        arguments: Parsed command line arguments.

    Returns:
        A table, and a record of all scores with relative accuracies as kind -> method -> score by layer.
    """
    samples = preset.samples("cifar10", arguments.data_dir)
    table = Table(
        "networks", "accuracy", "method", *layers,
        title=f"{title}: relative accuracy of stitched networks on {preset.test} test images, 95% intervals",
    )  # fmt: skip
    relative: dict[str, dict[str, list[Score]]] = {}
    accuracies: dict[str, list[float]] = {}
    for kind, bases in kinds.items():
        loaded = adapted(bases, arguments.networks, arguments.data_dir)
        accuracies[kind] = [recorded_accuracy(base, arguments.networks) for base in bases]
        found = frankenstein.answers(
            loaded, loaded, frankenstein.ring(loaded), layers, *samples, direct={},
            trained={TASK: preset.task_loss}, augment=preset.augmentation,
        )  # fmt: skip
        relative[kind] = {m: [found.relative(layer, m) for layer in layers] for m in (TASK, frankenstein.START)}
        for method, scores in relative[kind].items():
            own = ", ".join(f"{accuracy:.3f}" for accuracy in accuracies[kind])
            table.add_row(kind, own, method, *(Text(str(score)) for score in scores))
    return table, {
        "preset": asdict(preset), "layers": layers, "base_accuracy": accuracies, "relative_accuracy": relative
    }  # fmt: skip


def lines(series: Mapping[str, Sequence[Score]], places: Sequence[str], label: str, title: str) -> Figure:
    """Draw one line with its 95% band for each name over named positions."""
    figure = Figure(figsize=(max(7.5, 0.75 * len(places) + 2.0), 4.5), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, scores) in enumerate(series.items()):
        style = ("-", "--", ":")[number % 3]  # overlapping lines stay visible
        (line,) = axes.plot(places, [score.value for score in scores], style, marker="o", markersize=4, label=name)
        axes.fill_between(
            places, [s.low for s in scores], [s.high for s in scores], color=line.get_color(), alpha=0.2, linewidth=0
        )
    axes.set_ylabel(label)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(title, fontsize="large")
    return figure
