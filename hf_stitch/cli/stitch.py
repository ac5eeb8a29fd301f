"""``hf-stitch stitch`` and ``hf-stitch swap``: commands that create, score and save a stitched model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hf_stitch.cli.artefacts import attach
from hf_stitch.cli.options import draw, load_network
from hf_stitch.cli.output import Output, json_of
from hf_stitch.cli.verbs import Job, command
from hf_stitch.printing import warn
from hf_stitch.storage.files import replacing

if TYPE_CHECKING:
    from hf_stitch.adapters import Adapter
    from hf_stitch.artefacts import StitchedModel
    from hf_stitch.data import Samples
    from hf_stitch.relative import AnchorSet


@command("hf_stitch.workflows._stitch:stitch")
def stitch(job: Job) -> None:
    """Stitch two networks, and save the stitched model with its scores."""
    with job.folder(required=True):
        stitched = job.run()
        layers = {"source_layer": stitched.source.cut.layer, "target_layer": stitched.target.cut.layer}
        job.output.show(" → ".join(layers.values()))
        finish(job, stitched, layers)


@command("hf_stitch.workflows._swap:swap")
def swap(
    job: Job,
    anchors: Annotated[
        int | None,
        typer.Option(min=2, help="Number of anchors. Stitched models contain their own anchors.", show_default="300"),
    ] = None,
    selection: Annotated[
        Literal["random", "stratified"] | None, typer.Option(help="Selection of the anchors.", show_default="random")
    ] = None,
    anchor_split: Annotated[
        str | None, typer.Option(help="Split of the anchors.", show_default="--split, without scoring on the anchors")
    ] = None,
) -> None:
    """Swap the encoder, with anchors for networks that are not stitched models."""
    passed, shared = job.given, job.shared
    if "part" in passed:
        values = {"--anchors": anchors, "--selection": selection, "--anchor-split": anchor_split}
        values |= {f"--{n.replace('_', '-')}": passed.get(n) for n in ("pooling", "baselines", "paired_data")}
        if idle := [name for name, value in values.items() if value is not None]:
            raise typer.BadParameter("does not apply with --part, which reads --data", param_hint=idle[0])
        _exchange(job)
        return
    whole_network = {"--anchors": anchors, "--selection": selection, "--task": shared.task}
    if "target_layer" not in passed and (idle := [name for name, value in whole_network.items() if value is not None]):
        raise typer.BadParameter(
            "requires --target-layer and a network that is not a stitched model", param_hint=idle[0]
        )

    for name in ("data", "encoder_layer"):
        if name not in passed:
            raise typer.BadParameter("is required", param_hint=f"--{name.replace('_', '-')}")

    from hf_stitch.relative import AnchorSet, select_anchors

    with job.folder(required=True):
        is_whole = "target_layer" in passed
        model: Any = shared.load(passed["model"]) if is_whole else attach(passed["model"], shared, "MODEL", {})
        encoder = load_network(passed["encoder"], shared.device, shared.dtype)
        samples = shared.read(shared.split, None, job.seed)
        pool = samples if anchor_split in (None, shared.split) else shared.read(anchor_split, None, job.seed)
        drawn: Samples | None
        if is_whole:
            selected = select_anchors(pool, anchors or 300, selection or "random", seed=job.seed)
            anchor_set, drawn = AnchorSet.of(selected), selected
        else:
            anchor_set, drawn = _stored_anchors(model, pool, encoder, passed["encoder_layer"], passed.get("pooling"))
        scored = draw(_without_anchors(samples, anchor_set, job.output), shared.max_samples, job.seed, str(shared.data))
        finish(job, job.run(model=model, encoder=encoder, anchors=drawn, data=scored), {})


def _exchange(job: Job) -> None:
    shared = job.shared
    if shared.data is None:
        raise typer.BadParameter("is required", param_hint="--data")
    with job.folder(required=True):
        networks = {name: shared.load(job.given[name]) for name in ("model", "encoder")}
        exchanged = job.run(**networks, anchors=shared.read(shared.split, shared.max_samples, job.seed), data=None)
        assert shared.out is not None
        exchanged.save_pretrained(shared.out / "model")
        job.finish(exchanged, "exchanged.json", {"exchanged.png": {}}, model=str(shared.out / "model"))


def _without_anchors(samples: Samples, anchors: AnchorSet, output: Output) -> Samples:
    """Return the samples that are not anchors, to score the model."""
    indices = set(anchors.among(samples))
    if len(indices) == len(samples):
        raise ValueError(
            f"all {len(samples)} samples are anchors: select the anchors from another split (--anchor-split), or fewer "
            "anchors (--anchors)"
        )
    if not indices:
        return samples
    output.show(
        f"{len(indices)} of {len(samples)} samples are anchors and left out of the scores; --anchor-split selects "
        "anchors from another split"
    )
    return samples.select(index for index in range(len(samples)) if index not in indices)


def _stored_anchors(
    model: StitchedModel, pool: Samples, encoder: Adapter, layer: str, pooling: Any
) -> tuple[AnchorSet, Samples | None]:
    """Return the anchors of a stitched model and their samples, or ``None`` if the samples are not needed."""
    from hf_stitch.relative import select_anchors

    if model.anchors is None:
        raise ValueError("this stitched model lacks anchors; pass its target network with --target-layer instead")
    if model.anchors.has(encoder, layer, pooling or model.stitch.pooling) and not model.has_changed("source"):
        return model.anchors, None
    return model.anchors, select_anchors(pool, len(model.anchors), "parallel", ids=model.anchors.ids)


def finish(job: Job, stitched: StitchedModel, record: dict[str, str]) -> None:
    """Save a stitched model, and show its scores."""
    evaluation = stitched.evaluation
    paths = save(stitched, job.shared.out or Path())
    job.output.show(evaluation or "not scored: the target does not have a head")
    record = {**record, "evaluation": evaluation and evaluation.to_dict(), "recipe": stitched.config.recipe}
    job.report(evaluation, paths, record)


def save(stitched: StitchedModel, folder: Path) -> dict[str, Path]:
    """Save a stitched model, its stitcher and its scores in a folder.

    The model is left out, with a warning, if a half cannot be rebuilt from its record (user code). The stitcher is left
    out if the weights of a half were changed, because the parents do not contain them.
    """
    changed = stitched.has_changed("source") or stitched.has_changed("target")
    with replacing(folder, lambda _: ["evaluation.json", "evaluation.png"]):  # of another model
        shutil.rmtree(folder / "stitcher", ignore_errors=True)
    paths = {"model": folder / "model"}
    try:
        stitched.save_pretrained(paths["model"])
    except ValueError as error:
        if changed:
            raise
        shutil.rmtree(paths.pop("model"), ignore_errors=True)  # of another run
        warn(
            f"only the stitcher is saved, not the whole model, because {str(error).partition('. ')[0]}: pass the "
            "networks to hf-stitch evaluate again, with --source and --target"
        )
    if not changed:
        paths["stitcher"] = folder / "stitcher"
        stitched.stitcher.save_pretrained(paths["stitcher"])
    if stitched.evaluation is not None:
        paths |= {"evaluation": folder / "evaluation.json", "plot": folder / "evaluation.png"}
        with replacing(folder) as fresh:
            text = json_of(stitched.evaluation.to_dict()) + "\n"
            (fresh / paths["evaluation"].name).write_text(text, encoding="utf-8")
            stitched.evaluation.plot().savefig(fresh / paths["plot"].name, dpi=150)
    return paths
