"""Options shared by several commands, and the functions that read the samples they select."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hf_stitch.data import Samples

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and everything else on stderr.")]
Data = Annotated[str, typer.Option(help="Data set: a Hub id, a local folder, or sklearn:digits.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder with a local copy of the data set as <name>/<split>.parquet.")
]
Split = Annotated[str | None, typer.Option(help="Split of the data set. Optional if there is only one.")]
Count = Annotated[
    int | None, typer.Option("--max-samples", min=1, help="Number of samples, drawn at random. [default: all]")
]
Label = Annotated[str | None, typer.Option(help="Column of the labels. [default: found by its type or name]")]
Text = Annotated[str | None, typer.Option(help="Column of the texts. [default: found by its type]")]
TextPair = Annotated[str | None, typer.Option(help="Column of the second texts, for pairs. Requires --text.")]
Image = Annotated[str | None, typer.Option(help="Column of the images. [default: found by its type]")]
BatchSize = Annotated[int, typer.Option(min=1, help="Samples per forward pass.")]
Seed = Annotated[int, typer.Option(help="Seed of all random choices.")]
Task = Annotated[
    str | None, typer.Option(help="Head to load if the config does not name one, e.g. image-classification.")
]


def read_samples(
    data: str, data_dir: Path | None, split: str | None, count: int | None, seed: int, **columns: str | None
) -> Samples:
    """Read the samples that the command line options select.

    Args:
        data: Hub id, local folder, or ``sklearn:digits``.
        data_dir: Folder with a local copy of the data set. ``None``: the Hub.
        split: Split of the data set. ``None``: the only one.
        count: Number of samples, drawn with stratification by class. ``None``: all.
        seed: Seed of the draw.
        **columns: Columns of the data set by role (``label``, ``text``, ``text_pair``, ``image``). ``None``: found.

    Returns:
        The samples.

    Raises:
        FileNotFoundError: If the data set does not exist.
        ValueError: If the split does not exist or has fewer than ``count`` samples.
    """
    from hf_stitch.data import Samples, read_data

    return draw(Samples.of(read_data(data, data_dir=data_dir, split=split), **columns), count, seed, data)


def draw(samples: Samples, count: int | None, seed: int, data: str) -> Samples:
    """Draw some of the samples at random, stratified by class.

    Args:
        samples: The samples to draw from.
        count: Number of samples. ``None``: all.
        seed: Seed of the draw.
        data: Name of the data set, for the error message.

    Returns:
        The drawn samples.

    Raises:
        ValueError: If there are fewer than ``count`` samples.
    """
    if count is not None and count > len(samples):
        raise ValueError(f"--max-samples must be at most {len(samples)}, the number of samples of {data}, got {count}")
    return samples if count in (None, len(samples)) else samples.split(count, seed)[1]
