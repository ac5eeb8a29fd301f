"""``hf-stitch swap``: replace the encoder of a trained head, using anchors only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_stitch.cli.options import (
    AsJson,
    BatchSize,
    Data,
    DataDir,
    Device,
    Dtype,
    Image,
    Label,
    Seed,
    Split,
    Task,
    Text,
    TextPair,
    check_place,
    draw,
    load_network,
    read_samples,
)
from hf_stitch.cli.output import Output
from hf_stitch.cli.stitch import Matching, check_pooling, matcher_of, save

if TYPE_CHECKING:
    from hf_stitch.adapters import Adapter
    from hf_stitch.artefacts import StitchedModel
    from hf_stitch.data import Samples
    from hf_stitch.relative import AnchorSet


SELECTIONS = ("random", "stratified")
"""Selections of anchors that need nothing but the samples."""


def swap(
    model: Annotated[
        str,
        typer.Argument(help="A saved stitched model or stitcher. With --target-layer: any network."),
    ],
    encoder: Annotated[str, typer.Argument(help="New encoder: a Hub id, timm/…, timm:name, or a local folder.")],
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
        str | None, typer.Option(help="Matcher for an ordinary head. [default: procrustes with scale]")
    ] = None,
    option: Matching = None,
    data_dir: DataDir = None,
    split: Split = None,
    max_samples: Annotated[
        int | None, typer.Option(min=1, help="Number of samples to score on, drawn at random. [default: all]")
    ] = None,
    label: Label = None,
    text: Text = None,
    text_pair: TextPair = None,
    image: Image = None,
    batch_size: BatchSize = 64,
    device: Device = None,
    dtype: Dtype = None,
    seed: Seed = 0,
    task: Task = None,
    json: AsJson = False,
) -> None:
    """Replace the encoder of a trained head without training, score the result and save it."""
    output = Output(json)
    chosen_pooling = None if pooling is None else check_pooling(pooling)
    given = {"--anchors": anchors, "--selection": selection, "--task": task}
    if target_layer is None and (idle := [name for name, value in given.items() if value is not None]):
        raise typer.BadParameter(
            "applies only to networks that are not stitched models, which need --target-layer", param_hint=idle[0]
        )
    if selection not in (None, *SELECTIONS):
        raise typer.BadParameter(f"must be one of {', '.join(SELECTIONS)}, got {selection!r}", param_hint="--selection")
    if option and matcher is None:
        raise typer.BadParameter("requires --matcher", param_hint="--option")
    found_by = None if matcher is None else matcher_of(matcher, option or [])
    out.mkdir(parents=True, exist_ok=True)
    columns = {"label": label, "text": text, "text_pair": text_pair, "image": image}

    import hf_stitch.plots  # without matplotlib it fails here, before any work
    from hf_stitch.artefacts import StitchedModel
    from hf_stitch.relative import AnchorSet, select_anchors

    whole: StitchedModel | Adapter
    whole = _stitched(model, device, dtype) if target_layer is None else load_network(model, device, dtype, task)
    new = load_network(encoder, device, dtype)
    read = read_samples(data, data_dir, split, None, seed, **columns)
    pool = read if anchor_split in (None, split) else read_samples(data, data_dir, anchor_split, None, seed, **columns)
    if isinstance(whole, StitchedModel):
        known, chosen = _kept(whole, pool, new, encoder_layer, pooling)
    else:
        chosen = select_anchors(pool, anchors or 300, selection or "random", seed=seed)
        known = AnchorSet.of(chosen)
    places = set(known.among(read))
    if len(places) == len(read):
        raise ValueError(
            f"all {len(read)} samples are anchors, so that none is left to score on: take the anchors from another "
            "split (--anchor-split), or fewer (--anchors)"
        )
    if places:
        output.show(
            f"{len(places)} of {len(read)} samples are anchors and left out of the scores; --anchor-split takes the "
            "anchors from another split"
        )
        read = read.select(place for place in range(len(read)) if place not in places)
    swapped = hf_stitch.swap(
        whole, new, chosen, encoder_layer=encoder_layer, target_layer=target_layer, pooling=chosen_pooling,
        matcher=found_by, data=draw(read, max_samples, seed, data), batch_size=batch_size, seed=seed,
    )  # fmt: skip
    saved = save(swapped, out)
    output.show(swapped.evaluation)
    output.show("saved " + ", ".join(map(str, saved.values())))
    output.record({
        "evaluation": swapped.evaluation.to_dict(),
        "recipe": swapped.config.recipe,
        "saved": {name: str(path) for name, path in saved.items()},
    })  # fmt: skip


def _stitched(name: str, device: str | None, dtype: str | None) -> StitchedModel:
    """Load a stitched model, or attach a stitcher to the networks that it names."""
    from hf_stitch.artefacts import StitchedModel, Stitcher

    place, options = check_place(device, dtype)
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
