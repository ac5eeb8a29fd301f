"""``hf-stitch swap``: replace the encoder of a trained head, using anchors only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_stitch.cli.functions import check_artefact
from hf_stitch.cli.options import (
    INPUTS,
    NAMES,
    AsJson,
    Data,
    DataDir,
    Inputs,
    Report,
    Seed,
    Split,
    Task,
    check_place,
    check_pooling,
    check_report,
    draw,
    grouped,
)
from hf_stitch.cli.output import Output, output_folder
from hf_stitch.cli.stitch import Matching, matcher_of, save

if TYPE_CHECKING:
    from hf_stitch.adapters import Adapter
    from hf_stitch.artefacts import StitchedModel
    from hf_stitch.data import Samples
    from hf_stitch.relative import AnchorSet


SELECTIONS = ("random", "stratified")
"""Selections of anchors that need nothing but the samples."""


@grouped
def swap(
    model: Annotated[
        str,
        typer.Argument(help="A saved stitched model or stitcher. With --target-layer: any network."),
    ],
    encoder: Annotated[str, typer.Argument(help=f"New encoder: {NAMES}.")],
    encoder_layer: Annotated[str, typer.Option(help="Cut of the new encoder. See hf-stitch layers.")],
    data: Data,
    out: Annotated[Path, typer.Option(help="Output folder. Existing files are overwritten.", file_okay=False)],
    target_layer: Annotated[str | None, typer.Option(help="Cut of the network, if it is not a stitched model.")] = None,
    anchors: Annotated[
        int | None,
        typer.Option(min=2, help="Number of anchors. Stitched models contain their own anchors. [default: 300]"),
    ] = None,
    selection: Annotated[
        str | None, typer.Option(help="Selection of the anchors: random, or stratified by label. [default: random]")
    ] = None,
    anchor_split: Annotated[
        str | None, typer.Option(help="Split of the anchors. [default: --split, without scoring on the anchors]")
    ] = None,
    pooling: Annotated[
        str | None, typer.Option(help="Pooling of activations to one vector per sample: mean, cls, last or flatten.")
    ] = None,
    matcher: Annotated[
        str, typer.Option(help="Matcher for an ordinary head. auto: procrustes or ridge, by held-out anchors.")
    ] = "auto",
    option: Matching = None,
    data_dir: DataDir = None,
    split: Split = None,
    max_samples: Annotated[
        int | None, typer.Option(min=1, help="Number of samples to score on, drawn at random. [default: all]")
    ] = None,
    inputs: Inputs = INPUTS,
    report: Report = None,
    seed: Seed = 0,
    task: Task = None,
    json: AsJson = False,
) -> None:
    """Replace the encoder of a trained head without training, score the result and save it."""
    output = Output(json)
    check_report(report)
    chosen_pooling = None if pooling is None else check_pooling(pooling)
    _check(target_layer, selection, {"--anchors": anchors, "--selection": selection, "--task": task})
    if option and matcher == "auto":
        raise typer.BadParameter("requires --matcher", param_hint="--option")
    found_by = matcher if matcher == "auto" else matcher_of(matcher, option or [])

    import hf_stitch.plots  # without matplotlib it fails here, before any work
    from hf_stitch.artefacts import StitchedModel
    from hf_stitch.relative import AnchorSet, select_anchors

    with output_folder(out):
        whole: StitchedModel | Adapter
        whole = _stitched(model, inputs) if target_layer is None else inputs.load(model, task)
        new = inputs.load(encoder)
        read = inputs.read(data, data_dir, split, None, seed)
        pool = read if anchor_split in (None, split) else inputs.read(data, data_dir, anchor_split, None, seed)
        if isinstance(whole, StitchedModel):
            known, chosen = _kept(whole, pool, new, encoder_layer, pooling)
        else:
            chosen = select_anchors(pool, anchors or 300, selection or "random", seed=seed)
            known = AnchorSet.of(chosen)
        scored = draw(_others(read, known, output), max_samples, seed, data)
        swapped = hf_stitch.swap(
            whole, new, chosen, encoder_layer=encoder_layer, target_layer=target_layer, pooling=chosen_pooling,
            matcher=found_by, data=scored, batch_size=inputs.batch_size, seed=seed,
        )  # fmt: skip
        saved = save(swapped, out)
    output.show(swapped.evaluation)
    output.show("saved " + ", ".join(map(str, saved.values())))
    output.report(swapped.evaluation, report)
    output.record({
        "evaluation": swapped.evaluation.to_dict(),
        "recipe": swapped.config.recipe,
        "saved": {name: str(path) for name, path in saved.items()},
    })  # fmt: skip


def _check(target_layer: str | None, selection: str | None, given: dict[str, Any]) -> None:
    """Check that a selection exists, and that options of whole networks are given for such only."""
    if target_layer is None and (idle := [name for name, value in given.items() if value is not None]):
        raise typer.BadParameter(
            "applies only to networks that are not stitched models, which need --target-layer", param_hint=idle[0]
        )
    if selection not in (None, *SELECTIONS):
        raise typer.BadParameter(f"must be one of {', '.join(SELECTIONS)}, got {selection!r}", param_hint="--selection")


def _others(read: Samples, anchors: AnchorSet, output: Output) -> Samples:
    """Return the samples that are no anchors, on which the model is scored."""
    places = set(anchors.among(read))
    if len(places) == len(read):
        raise ValueError(
            f"all {len(read)} samples are anchors, so that none is left to score on: take the anchors from another "
            "split (--anchor-split), or fewer (--anchors)"
        )
    if not places:
        return read
    output.show(
        f"{len(places)} of {len(read)} samples are anchors and left out of the scores; --anchor-split takes the "
        "anchors from another split"
    )
    return read.select(place for place in range(len(read)) if place not in places)


def _stitched(name: str, inputs: Inputs) -> StitchedModel:
    """Load a stitched model, or attach a stitcher to the networks that it names."""
    from hf_stitch.artefacts import StitchedModel, Stitcher

    check_artefact(name, "MODEL")
    place, options = check_place(inputs.device, inputs.dtype)
    if (Path(name) / "stitcher.json").is_file():
        found = Stitcher.from_pretrained(name).attach(**options)
    else:
        found = StitchedModel.from_pretrained(name, **options)
    return found if place is None else found.to(place)  # type: ignore[arg-type]


def _kept(
    model: StitchedModel, pool: Samples, new: Adapter, layer: str, pooling: Any
) -> tuple[AnchorSet, Samples | None]:
    """Return the anchors of a stitched model and their samples, or ``None`` if the samples are not needed."""
    from hf_stitch.relative import select_anchors

    if model.anchors is None:
        raise ValueError("this stitched model contains no anchors: pass its target network with --target-layer instead")
    if model.anchors.has(new, layer, pooling or model.stitch.pooling) and not model.has_changed("source"):
        return model.anchors, None
    return model.anchors, select_anchors(pool, len(model.anchors), "parallel", ids=model.anchors.ids)
