"""What the experiments share: their arguments, how much they do, and what they leave behind."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

CHECK = "mechanism check, not a reproduction: the encoders are small and trained from scratch on the data at hand"


@dataclass(frozen=True)
class Preset:
    """How much of everything.

    Attributes:
        train: Samples that heads are trained on; of fewer, all.
        test: Samples to score on; of fewer, all.
        anchors: Number of anchors.
        epochs: Of a head.
        batch: Samples in a batch of a head's training.
        learning_rate: Of a head.
        seeds: Of heads and anchors.
        corpus: Samples that local encoders are trained on; of fewer, all.
        pretraining: Epochs of local encoders.
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
    """A parser with the arguments that every experiment has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--preset", choices=("small", "paper", "test"), default="small",
        help="minutes, the sizes of the paper, seconds to see that it runs",
    )  # fmt: skip
    made.add_argument("--data-dir", help="local folder of the data sets; default: the Hub")
    made.add_argument("--cache", type=Path, required=True, help="folder of trained networks and of what they say")
    made.add_argument("--out", type=Path, help="folder for figures as JSON and PNG")
    return made


def with_encoders(made: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser with a choice of encoders."""
    made.add_argument(
        "--encoders", choices=("hub", "local"), default="hub",
        help="pretrained ones of the Hub, or small ones of the same families, trained on the data at hand",
    )  # fmt: skip
    return made


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Mean ± standard deviation."""
    series = pd.Series(values)
    return f"{series.mean():.{digits}f}" + (f" ± {series.std(ddof=1):.{digits}f}" if len(series) > 1 else "")


def markdown(rows: Sequence[Sequence[Any]], header: Sequence[str]) -> str:
    """A table as it stands in a page."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def leave(name: str, text: str, record: Mapping[str, Any], pictures: Mapping[str, Figure], out: Path | None) -> None:
    """Print the text; write it, the record and the pictures, if there is a folder."""
    print(text)
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(text + "\n")
    (out / f"{name}.json").write_text(json.dumps(record, indent=2, default=vars) + "\n")
    for picture, figure in pictures.items():
        figure.savefig(out / f"{picture}.png", dpi=120)
