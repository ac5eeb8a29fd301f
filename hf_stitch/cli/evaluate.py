"""``hf-stitch evaluate``: score a saved stitched model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import AsJson, Count, Data, DataDir, Seed, Split, read_samples
from .output import Output

if TYPE_CHECKING:
    from ..models import StitchedModel


def evaluate(
    model: Annotated[str, typer.Argument(metavar="FOLDER", help="A saved stitched model (or its Hub id), or a saved stitcher.")],
    data: Data,
    data_dir: DataDir = None,
    split: Split = None,
    samples: Count = None,
    target: Annotated[str | None, typer.Option(help="The whole target network. [default: the one that the model names]")] = None,
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Score a saved stitched model beside its baselines, on samples that its map was not fitted on."""
    output = Output(json)
    read = read_samples(data, data_dir, split, samples, seed)
    stitched = _load(model)

    import hf_stitch

    if read.fingerprint == (stitched.config.recipe or {}).get("data"):
        typer.secho("warning: the map was fitted on part of these samples; score it on others", fg="yellow", err=True)
    evaluation = hf_stitch.evaluate(stitched, read, target=hf_stitch.load(target) if target else None, seed=seed)
    output.say(evaluation)
    output.record(evaluation.to_dict())


def _load(name: str) -> StitchedModel:
    import hf_stitch

    if (Path(name) / "stitcher.json").is_file():
        return hf_stitch.Stitcher.from_pretrained(name).attach()
    return hf_stitch.StitchedModel.from_pretrained(name)
