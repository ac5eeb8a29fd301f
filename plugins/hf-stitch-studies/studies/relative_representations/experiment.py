"""Shared parts of the experiments: arguments, presets and output."""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from hf_stitch.storage.files import write_whole

CHECK = "mechanism check, not a reproduction: the encoders are small and trained from scratch on the available data"


@dataclass(frozen=True)
class Preset:
    """Sizes and hyperparameters of an experiment. Numbers of samples are upper limits.

    Attributes:
        train: Number of samples for training heads.
        test: Number of test samples.
        anchors: Number of anchors.
        epochs: Training epochs of a head.
        batch: Batch size for training a head.
        learning_rate: Learning rate of a head.
        seeds: Number of seeds for heads and anchors.
        corpus: Number of samples for training local encoders.
        pretraining: Training epochs of local encoders.
    """

    train: int
    test: int
    anchors: int
    epochs: int
    batch: int
    learning_rate: float
    seeds: int
    corpus: int
    pretraining: int


def parser(description: str) -> argparse.ArgumentParser:
    """Create a parser with the arguments shared by all experiments."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--preset", choices=("small", "paper", "test"), default="small",
        help="small: minutes; paper: the sizes of the paper; test: seconds, to check that the script runs",
    )  # fmt: skip
    made.add_argument("--data-dir", help="local folder of the data sets; default: the Hub")
    made.add_argument("--cache", type=Path, required=True, help="folder for trained networks and encoded samples")
    made.add_argument("--out", type=Path, help="output folder for scores as JSON and figures as PNG")
    return made


def with_encoders(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the choice of encoders to a parser."""
    made.add_argument(
        "--encoders", choices=("hub", "local"), default="hub",
        help="pretrained encoders from the Hub, or small encoders of the same families trained on the available data",
    )  # fmt: skip
    return made


def with_published(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the folder of published image networks to a parser."""
    made.add_argument(
        "--published", type=Path,
        help="folder that contains drfrankenstein_tiny10 and drfrankenstein_resnet20, published networks trained on "
        "CIFAR-10; without it, small encoders are trained",
    )  # fmt: skip
    return made


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Format values as mean ± standard deviation."""
    series = pd.Series(values)
    return f"{series.mean():.{digits}f}" + (f" ± {series.std(ddof=1):.{digits}f}" if len(series) > 1 else "")


def markdown(rows: Sequence[Sequence[Any]], header: Sequence[str]) -> str:
    """Format a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def leave(name: str, text: str, record: Mapping[str, Any], pictures: Mapping[str, Figure], out: Path | None) -> None:
    """Print the text, and write text, record and figures if an output folder is given."""
    print(text)
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(text + "\n")
    (out / f"{name}.json").write_text(json.dumps(record, indent=2, default=vars) + "\n")
    for picture, figure in pictures.items():
        figure.savefig(out / f"{picture}.png", dpi=120)


def written(
    name: str,
    record: Mapping[str, Any],
    page: Callable[[dict[str, Any]], str],
    pictures: Mapping[str, Figure],
    out: Path | None,
) -> None:
    """Print the page of a record, and write record, page and figures if an output folder is given.

    Args:
        name: Name of the files.
        record: All figures of the experiment.
        page: Function that writes the page from the record, as it is read from JSON.
        pictures: Name -> figure.
        out: The folder.
    """
    lines = ",\n".join(f" {json.dumps(key)}: {_lines(value)}" for key, value in record.items())
    stored = f"{{\n{lines}\n}}\n"
    if out is not None:
        write_whole(out / f"{name}.json", lambda path: path.write_text(stored))
    text = page(json.loads(stored))
    print(text)
    if out is None:
        return
    write_whole(out / f"{name}.md", lambda path: path.write_text(text))
    for picture, figure in pictures.items():
        write_whole(out / f"{picture}.png", partial(figure.savefig, dpi=120, format="png"))


def _lines(value: Any) -> str:
    """Write a value as JSON, with one line for each entry of a list of mappings."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n  " + ",\n  ".join(json.dumps(entry, default=vars) for entry in value) + "\n ]"
    return json.dumps(value, default=vars)
