"""Options that several commands share, and how the samples they describe are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hf_stitch.data import Samples

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and everything else on stderr.")]
Data = Annotated[str, typer.Option(help="Data set: a Hub id, a local folder, or sklearn:digits.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder that holds a copy of the data set as <name>/<split>.parquet.")
]
Split = Annotated[str | None, typer.Option(help="Split of the data set; may be left out where there is one only.")]
Count = Annotated[
    int | None, typer.Option("--max-samples", min=1, help="Use this many samples, drawn at random. [default: all]")
]
Seed = Annotated[int, typer.Option(help="Of every random choice.")]
Task = Annotated[
    str | None, typer.Option(help="Head to load where the model's config does not say it, as image-classification.")
]


def read_samples(data: str, data_dir: Path | None, split: str | None, count: int | None, seed: int) -> Samples:
    """The samples that the options describe; classes keep their proportions when some are drawn.

    Raises:
        FileNotFoundError: If there is no such data set.
        ValueError: If it has no such split, or fewer samples.
    """
    from hf_stitch.data import Samples, read_data

    return draw(Samples.of(read_data(data, data_dir=data_dir, split=split)), count, seed, data)


def draw(samples: Samples, count: int | None, seed: int, data: str) -> Samples:
    """Some of the samples, classes in proportion; all of them where no number is given.

    Raises:
        ValueError: If there are fewer.
    """
    if count is not None and count > len(samples):
        raise ValueError(f"--max-samples must be at most {len(samples)}, the number of samples of {data}, got {count}")
    return samples if count in (None, len(samples)) else samples.split(count, seed)[1]
