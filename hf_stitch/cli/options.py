"""Options shared by several commands, and the functions that read the samples they select."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_type_hints

import typer

from hf_stitch.cli import functions

if TYPE_CHECKING:
    import torch

    from hf_stitch.adapters import Adapter
    from hf_stitch.data import Samples
    from hf_stitch.representation import Pooling

NAMES = "a Hub id (org/name, org/name@revision, timm/…), timm:name, a local folder, or file.py:function"
"""What names a network."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and everything else on stderr.")]
Data = Annotated[
    str,
    typer.Option(
        help="Data set: a Hub id, a local folder (of train.parquet, …, or one of images per class), or NAME:PLACE of "
        "another source (hf-stitch list data), as sklearn:digits."
    ),
]
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
Device = Annotated[str | None, typer.Option(help="Device of the networks: cpu, cuda, cuda:1, mps. [default: cpu]")]
Dtype = Annotated[
    str | None, typer.Option(help="dtype of the weights: float32, float64, bfloat16 or float16. [default: as saved]")
]
Seed = Annotated[int, typer.Option(help="Seed of all random choices.")]
Detectors = Annotated[
    list[str] | None,
    typer.Option(
        "--detector", help="Detector of strange activations, e.g. knn:k=5. Repeatable. See hf-stitch list detectors."
    ),
]
AlignTexts = Annotated[str, typer.Option(help="tokens; or prefix, for two decoders with different tokenizers.")]
Own = Annotated[
    bool, typer.Option("--own", help="With --align prefix: the map also takes the token embedding of the target.")
]
FarData = Annotated[
    str | None,
    typer.Option(
        help="Data set unlike --data, as NAME or NAME:SPLIT: a control for detectors. At most --max-samples of it are "
        "drawn; --image and --text apply where it has such columns."
    ),
]
AuxiliaryData = Annotated[
    str | None,
    typer.Option(
        help="Data set of other samples to which detectors such as energy are fitted, as NAME or NAME:SPLIT. Read as "
        "--far-data is."
    ),
]
Task = Annotated[
    str | None, typer.Option(help="Head to load if the config does not name one, e.g. image-classification.")
]
CutPooling = Annotated[
    str, typer.Option(help="Pooling of activations before the stitching layer: none, flatten, mean, cls or last.")
]
TestSize = Annotated[float, typer.Option(help="Held-out samples for scoring: a share below 1, or a number.", min=0.0)]
Report = Annotated[
    Path | None,
    typer.Option(help="Write the result as one HTML page, which opens from the disk.", dir_okay=False),
]
Planned = Annotated[bool, typer.Option("--plan", help="Estimate time, memory and files from a few batches, then stop.")]
CheckpointDir = Annotated[Path | None, typer.Option(help="Folder for checkpoints. An interrupted run resumes from it.")]


@dataclass(frozen=True)
class Inputs:
    """The options of every command that runs networks on samples; :func:`grouped` adds them to the command."""

    label: Label = None  # column of the labels
    text: Text = None  # column of the texts
    text_pair: TextPair = None  # column of the second texts
    image: Image = None  # column of the images
    batch_size: BatchSize = 64  # samples per forward pass
    device: Device = None  # device of the networks
    dtype: Dtype = None  # dtype of the weights

    def load(self, name: str, task: str | None = None) -> Adapter:
        """Load a network: :func:`load_network` with these options."""
        return load_network(name, self.device, self.dtype, task)

    def given(self, name: str | None) -> Adapter | str | None:
        """Load a network of a file, and leave other names to what takes them and has options of its own."""
        return load_network(name, self.device) if name is not None and functions.is_function(name) else name

    def read(self, data: str, data_dir: Path | None, split: str | None, count: int | None, seed: int) -> Samples:
        """Read samples: :func:`read_samples` with these columns."""
        columns = {"label": self.label, "text": self.text, "text_pair": self.text_pair, "image": self.image}
        return read_samples(data, data_dir, split, count, seed, **columns)

    def read_other(self, data: str | None, data_dir: Path | None, count: int | None, seed: int) -> Samples | None:
        """Read samples of another data set: :func:`read_other` with these columns."""
        columns = {"text": self.text, "text_pair": self.text_pair, "image": self.image}
        return read_other(data, data_dir, count, seed, **columns)


INPUTS = Inputs()
"""Default of a parameter of a command."""


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameters of a command that are :class:`Inputs` by its fields, which typer makes options."""
    own, types = inspect.signature(command, eval_str=True), get_type_hints(Inputs, include_extras=True)
    parameters, group = list[inspect.Parameter](), ""
    for name, parameter in own.parameters.items():
        if parameter.annotation is Inputs:
            group = name
            parameters += [
                parameter.replace(name=each.name, default=each.default, annotation=types[each.name])
                for each in fields(Inputs)
            ]
        else:
            parameters.append(parameter)

    @wraps(command)
    def run(**given: Any) -> None:
        given[group] = Inputs(**{each.name: given.pop(each.name) for each in fields(Inputs)})
        command(**given)

    changed: Any = run
    changed.__signature__ = own.replace(parameters=parameters)
    return run


def load_network(name: str, device: str | None = None, dtype: str | None = None, task: str | None = None) -> Adapter:
    """Load a network onto a device."""
    import hf_stitch

    place, options = check_place(device, dtype)
    typed = functions.is_function(name)
    adapter = functions.load(name, task, options) if typed else hf_stitch.load(name, task=task, **options)
    if place is not None:
        adapter.model.to(place)
    return adapter


def check_place(device: str | None, dtype: str | None) -> tuple[torch.device | None, dict[str, Any]]:
    """Check the values of ``--device`` and ``--dtype``."""
    import torch

    place = None
    if device is not None:
        try:
            place = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError, NotImplementedError) as error:  # by the build of torch
            reason = str(error).splitlines()[0]
            raise typer.BadParameter(
                f"this machine has no device {device!r} that torch can use: {reason}", param_hint="--device"
            ) from error
    if dtype is not None and not getattr(getattr(torch, dtype, None), "is_floating_point", False):
        raise typer.BadParameter(
            f"must be a floating-point dtype of torch (float32, float64, bfloat16, float16), got {dtype!r}",
            param_hint="--dtype",
        )
    return place, {} if dtype is None else {"dtype": dtype}


def check_test_size(size: float) -> float | int:
    """Return the size of the held-out part: a share, or a whole number of samples."""
    if size < 1:
        return size
    if not size.is_integer():
        raise typer.BadParameter(
            f"must be a share below 1 or a whole number of samples, got {size}", param_hint="--test-size"
        )
    return int(size)


def check_align(align: str, own: bool) -> dict[str, Any]:
    """Check the values of ``--align`` and ``--own``."""
    if align not in ("tokens", "prefix"):
        raise typer.BadParameter(f"must be one of tokens, prefix, got {align!r}", param_hint="--align")
    if own and align == "tokens":
        raise typer.BadParameter("needs --align prefix", param_hint="--own")
    return {"align": align, "own": own}


def check_report(path: Path | None) -> Path | None:
    """Check before any work that a report can be written."""
    if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise typer.BadParameter(f"the folder {path.parent} does not exist or cannot be written", param_hint="--report")
    return path


def check_pooling(pooling: str) -> Pooling:
    """Check the value of ``--pooling``."""
    from hf_stitch.representation import POOLINGS

    if pooling not in POOLINGS:
        raise typer.BadParameter(f"must be one of {', '.join(POOLINGS)}, got {pooling!r}", param_hint="--pooling")
    return cast("Pooling", pooling)


def read_samples(
    data: str, data_dir: Path | None, split: str | None, count: int | None, seed: int, **columns: str | None
) -> Samples:
    """Read the samples that the command line options select."""
    from hf_stitch.data import Samples, read_data

    return draw(Samples.of(read_data(data, data_dir=data_dir, split=split), **columns), count, seed, data)


def read_other(
    data: str | None, data_dir: Path | None, count: int | None, seed: int, **columns: str | None
) -> Samples | None:
    """Read samples of another data set."""
    from hf_stitch.data import Samples, read_data

    if data is None:
        return None
    from hf_stitch.registry import registries

    name, split = data, None
    source, _, place = data.partition(":")
    if not Path(data).exists() and ":" in (place if source in registries.data else data):
        name, _, split = data.rpartition(":")
    table = read_data(name, data_dir=data_dir, split=split)
    read = Samples.of(table, **{role: column for role, column in columns.items() if column in table.column_names})
    return read if count is None else draw(read, min(count, len(read)), seed, name)


def built(kind: str, names: list[str], argument: str | None = None) -> list[Any]:
    """Build methods from ``name:key=value,…``."""
    from hf_stitch.registry import registries

    try:
        return [registries[kind].build(name) for name in names]
    except (TypeError, ValueError) as error:  # the name, an option, or its value
        raise typer.BadParameter(str(error), param_hint=argument or f"--{kind[:-1]}") from error


def draw(samples: Samples, count: int | None, seed: int, data: str) -> Samples:
    """Draw some of the samples at random, stratified by class."""
    if count is not None and count > len(samples):
        raise ValueError(f"--max-samples must be at most {len(samples)}, the number of samples of {data}, got {count}")
    return samples if count in (None, len(samples)) else samples.split(count, seed)[1]
