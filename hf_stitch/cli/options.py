"""Options shared by several commands, and functions to read samples."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_stitch.cli import functions
from hf_stitch.registry import registries

if TYPE_CHECKING:
    import torch

    from hf_stitch.adapters import Adapter
    from hf_stitch.data import Samples

NAMES = "a Hub id (org/name, org/name@revision, timm/…), timm:name, a local folder, or file.py:function"
"""Forms of the name of a network."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and everything else on stderr.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder with a local copy of the dataset as <name>/<split>.parquet.")
]
Device = Annotated[str | None, typer.Option(help="Device of the networks: cpu, cuda, cuda:1, mps.", show_default="cpu")]
Dtype = Annotated[
    str | None,
    typer.Option(help="dtype of the weights: float32, float64, bfloat16 or float16.", show_default="as saved"),
]
Task = Annotated[
    str | None, typer.Option(help="Head to load if the config does not name one, e.g. image-classification.")
]
Seed = Annotated[int, typer.Option(help="Seed of all random choices.")]


def _writable(path: Path | None) -> Path | None:
    if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise typer.BadParameter(f"the folder {path.parent} does not exist or cannot be written")
    return path


Report = Annotated[
    Path | None,
    typer.Option(help="Write the result as one HTML page, which opens offline.", dir_okay=False, callback=_writable),
]


@dataclass(frozen=True)
class Shared:
    """Options of all commands that run networks on samples, in addition to the options of a verb."""

    data: Annotated[
        str | None,
        typer.Option(
            help="Dataset: a Hub id, a local folder (train.parquet, …, or a subfolder of images per class), or "
            "NAME:PLACE of another source (hf-stitch list data), for example sklearn:digits."
        ),
    ] = None
    data_dir: DataDir = None
    split: Annotated[str | None, typer.Option(help="Split of the dataset. Optional for a single split.")] = None
    max_samples: Annotated[
        int | None, typer.Option(min=1, help="Number of randomly drawn samples.", show_default="all")
    ] = None
    label: Annotated[
        str | None, typer.Option(help="Column of the labels.", show_default="found by its type or name")
    ] = None
    text: Annotated[str | None, typer.Option(help="Column of the texts.", show_default="found by its type")] = None
    text_pair: Annotated[str | None, typer.Option(help="Column of the second texts, for pairs. Requires --text.")] = (
        None
    )
    image: Annotated[str | None, typer.Option(help="Column of the images.", show_default="found by its type")] = None
    task: Task = None
    device: Device = None
    dtype: Dtype = None
    out: Annotated[
        Path | None, typer.Option(help="Output folder. Existing files are overwritten.", file_okay=False)
    ] = None
    report: Report = None
    plan: Annotated[
        bool, typer.Option("--plan", help="Estimate time, memory and files from a few batches, then stop.")
    ] = False
    json: AsJson = False

    def load(self, name: str) -> Adapter:
        """Load a network: :func:`load_network` with these options."""
        return load_network(name, self.device, self.dtype, self.task)

    def given(self, name: str | None) -> Adapter | str | None:
        """Load a network from a function in a file, and return other names unchanged."""
        return load_network(name, self.device) if name is not None and functions.is_function(name) else name

    def read(self, split: str | None, count: int | None, seed: int) -> Samples:
        """Read samples from a split of the dataset."""
        from hf_stitch.data import Samples, read_data

        data = str(self.data)
        samples = Samples.of(read_data(data, data_dir=self.data_dir, split=split), **self._columns)
        return draw(samples, count, seed, data)

    def read_other(self, data: str, count: int | None, seed: int) -> Samples:
        """Read at most ``count`` samples of another dataset, ``name`` or ``name:split``; columns may be absent."""
        from hf_stitch.data import Samples, read_data

        name, split = data, None
        source, _, place = data.partition(":")
        if not Path(data).exists() and ":" in (place if source in registries.data else data):
            name, _, split = data.rpartition(":")
        table = read_data(name, data_dir=self.data_dir, split=split)
        columns = {role: column for role, column in self._columns.items() if column in table.column_names}
        samples = Samples.of(table, **columns)
        return samples if count is None else draw(samples, min(count, len(samples)), seed, name)

    @property
    def _columns(self) -> dict[str, str | None]:
        return {"label": self.label, "text": self.text, "text_pair": self.text_pair, "image": self.image}


def load_network(name: str, device: str | None = None, dtype: str | None = None, task: str | None = None) -> Adapter:
    """Load a network onto a device."""
    import hf_stitch

    torch_device, options = check_place(device, dtype)
    in_file = functions.is_function(name)
    adapter = functions.load(name, task, options) if in_file else hf_stitch.load(name, task=task, **options)
    if torch_device is not None:
        adapter.model.to(torch_device)
    return adapter


def check_place(device: str | None, dtype: str | None) -> tuple[torch.device | None, dict[str, Any]]:
    """Check ``--device`` and ``--dtype``; return the device, and the dtype as an option of :func:`hf_stitch.load`."""
    import torch

    torch_device = None
    if device is not None:
        try:
            torch_device = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # depends on the build of torch
            reason = str(error).splitlines()[0]
            raise typer.BadParameter(
                f"torch cannot use device {device!r} on this machine: {reason}", param_hint="--device"
            ) from error
    if dtype is not None and not getattr(getattr(torch, dtype, None), "is_floating_point", False):
        raise typer.BadParameter(
            f"must be a floating-point dtype of torch (float32, float64, bfloat16, float16), got {dtype!r}",
            param_hint="--dtype",
        )
    return torch_device, {} if dtype is None else {"dtype": dtype}


def draw(samples: Samples, count: int | None, seed: int, data: str) -> Samples:
    """Draw samples at random, stratified by class."""
    if count is not None and count > len(samples):
        raise ValueError(f"--max-samples must be at most {len(samples)}, the number of samples of {data}, got {count}")
    return samples if count in (None, len(samples)) else samples.split(count, seed)[1]
