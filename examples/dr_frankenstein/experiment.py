"""What the experiments share: their arguments, how much they do, and what they leave behind."""

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
    """How much of everything.

    Attributes:
        train: Images to match on.
        test: Held-out images.
        epochs: Of task-loss matching.
        base: Images and epochs of the base networks.
        seeds: Base networks of each kind.
        augment: Whether images are augmented in task-loss matching.
        lr: Learning rate of task-loss matching.
        schedule: Its schedule.
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
        """The images to match on, and those held out."""
        sizes = {"train": self.train, "test": self.test}
        train, test = (images.samples(data, split, n, data_dir) for split, n in sizes.items())
        return train, test

    @property
    def task_loss(self) -> TaskLoss:
        """Task-loss matching with the target's answers as labels."""
        return TaskLoss(epochs=self.epochs, lr=self.lr, schedule=self.schedule)

    @property
    def augmentation(self) -> Augment | None:
        """What changes the images in task-loss matching."""
        return images.augmented_samples if self.augment else None


TASK = "task loss"
SHORT: dict[str, Any] = {"lr": 1e-2, "schedule": "cosine"}
"""By larger steps, so that a short training comes from any start to its end."""
TEST = Preset(150, 60, 1, (150, 1))
"""To see that everything runs."""
PAPER = Preset(50_000, 10_000, 30, (50_000, 300), 5, True)


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the arguments that every experiment has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--preset",
        choices=("small", "paper", "test"),
        default="small",
        help="minutes, days, seconds to see that it runs",
    )
    made.add_argument("--data-dir", help="local folder of the data sets; default: the Hub")
    made.add_argument(
        "--networks", type=Path, required=True, help="folder of base networks; those not there are trained"
    )
    made.add_argument("--out", type=Path, help="folder for figures as JSON and PNG")
    return made


def show(table: Table, name: str, record: Mapping[str, Any], pictures: Mapping[str, Figure], out: Path | None) -> None:
    """Print the table; write the record and the pictures, if there is a folder."""
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
    """Networks of one kind after another, stitched to each other by least squares and by task loss.

    Returns:
        A table, and a record of all figures: those of stitching are kind -> method -> score by layer.
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
    """A line with its band for each name, over named places."""
    figure = Figure(figsize=(max(7.5, 0.75 * len(places) + 2.0), 4.5), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, scores) in enumerate(series.items()):
        style = ("-", "--", ":")[number % 3]  # a line that lies on another lets it show
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
