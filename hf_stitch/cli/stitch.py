"""``hf-stitch stitch``: join two networks, score the result, save it."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_stitch.cli.options import AsJson, Count, Data, DataDir, Seed, Split, Task, read_samples
from hf_stitch.cli.output import Output, as_json
from hf_stitch.registry import registries

if TYPE_CHECKING:
    from hf_stitch.artefacts import StitchedModel
    from hf_stitch.matchers import Matcher


Matching = Annotated[list[str] | None, typer.Option(help="An option of the matcher, as rank=16; may be repeated.")]


def stitch(
    source: Annotated[
        str, typer.Argument(help="Gives the front half: a Hub id, timm/…, timm:name, or a local folder.")
    ],
    target: Annotated[str, typer.Argument(help="Gives the back half.")],
    data: Data,
    out: Annotated[
        Path, typer.Option(help="Folder for what is made; files of an earlier run are replaced.", file_okay=False)
    ],
    source_layer: Annotated[
        str, typer.Option(help="Where the source is cut (see hf-stitch layers); auto: the most similar layer.")
    ] = "auto",
    target_layer: Annotated[str, typer.Option(help="Where the target is cut; auto: the most similar layer.")] = "auto",
    matcher: Annotated[str, typer.Option(help="What finds the map; see hf-stitch list matchers.")] = "lstsq",
    option: Matching = None,
    pooling: Annotated[
        str, typer.Option(help="Pooling: which vectors are mapped: none, flatten, mean, cls or last.")
    ] = "none",
    data_dir: DataDir = None,
    split: Split = None,
    samples: Count = None,
    test_size: Annotated[float, typer.Option(help="Held out to score: a share below 1, or a number.", min=0.0)] = 0.2,
    seed: Seed = 0,
    task: Task = None,
    json: AsJson = False,
) -> None:
    """Join two networks by a fitted map, score the result beside its baselines, and save it."""
    output = Output(json)
    held_out = _test_size(test_size)
    check_pooling(pooling)
    fitted_by = matcher_of(matcher, option or [])
    out.mkdir(parents=True, exist_ok=True)
    read = read_samples(data, data_dir, split, samples, seed)

    import hf_stitch

    networks = [hf_stitch.load(name, task=task) for name in (source, target)]
    stitched = hf_stitch.stitch(networks[0], networks[1], read, source_layer=source_layer, target_layer=target_layer, matcher=fitted_by, pooling=pooling, test_size=held_out, seed=seed)  # fmt: skip
    saved = save(stitched, out)
    output.show(stitched.evaluation or f"{target} has no head that could be scored")
    output.show("saved " + ", ".join(map(str, saved.values())))
    output.record({
        "evaluation": stitched.evaluation.to_dict() if stitched.evaluation else None,
        "recipe": stitched.config.recipe,
        "saved": {what: str(path) for what, path in saved.items()},
    })  # fmt: skip


def save(stitched: StitchedModel, folder: Path) -> dict[str, Path]:
    """Save the whole model, the small artefact, and what was measured, each under its name in a folder.

    A model whose halves were trained has no small artefact: no network holds them.

    Returns:
        What was saved -> where.
    """
    saved = {"model": folder / "model"}
    stitched.save_pretrained(saved["model"])
    if not (stitched.has_changed("source") or stitched.has_changed("target")):
        saved["stitcher"] = folder / "stitcher"
        stitched.stitcher.save_pretrained(saved["stitcher"])
    if stitched.evaluation is not None:
        saved |= {"evaluation": folder / "evaluation.json", "plot": folder / "evaluation.png"}
        saved["evaluation"].write_text(as_json(stitched.evaluation.to_dict()) + "\n", encoding="utf-8")
        stitched.evaluation.plot().savefig(saved["plot"], dpi=150)
    return saved


def _test_size(size: float) -> float | int:
    if size < 1:
        return size
    if not size.is_integer():
        raise typer.BadParameter(f"a share is below 1 and a number whole, got {size}", param_hint="--test-size")
    return int(size)


def check_pooling(pooling: str) -> None:
    """Refuse what is no pooling."""
    from hf_stitch.representation import POOLINGS

    if pooling not in POOLINGS:
        raise typer.BadParameter(f"must be one of {', '.join(POOLINGS)}, got {pooling!r}", param_hint="--pooling")


def matcher_of(name: str, options: list[str]) -> Matcher:
    """The matcher; values are read as JSON (``0.1``, ``true``, ``null``), and as text where they are none."""
    values: dict[str, Any] = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not equals:
            raise typer.BadParameter(f"write key=value, got {option!r}", param_hint="--option")
        try:
            values[key] = json_.loads(text)
        except json_.JSONDecodeError:
            values[key] = text
    try:
        return registries.matchers.build(name, **values)
    except TypeError as error:  # an option that the matcher does not have, or one that it lacks
        raise typer.BadParameter(str(error), param_hint="--option") from error
