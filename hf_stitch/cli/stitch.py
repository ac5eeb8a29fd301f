"""``hf-stitch stitch``: stitch two networks, score the result and save it."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_stitch.cli.options import (
    INPUTS,
    NAMES,
    AlignTexts,
    AsJson,
    Count,
    CutPooling,
    Data,
    DataDir,
    Inputs,
    Own,
    Planned,
    Report,
    Seed,
    Split,
    Task,
    TestSize,
    check_align,
    check_pooling,
    check_report,
    check_test_size,
    grouped,
)
from hf_stitch.cli.output import Output, as_json, output_folder
from hf_stitch.options import read_options
from hf_stitch.printing import warn
from hf_stitch.registry import UnknownNameError, registries
from hf_stitch.storage.folders import replacing

if TYPE_CHECKING:
    from hf_stitch.artefacts import StitchedModel
    from hf_stitch.matchers import Matcher


Matching = Annotated[list[str] | None, typer.Option(help="Option of the matcher, e.g. rank=16. Repeatable.")]


@grouped
def stitch(
    source: Annotated[str, typer.Argument(help=f"Network for the front half: {NAMES}.")],
    target: Annotated[str, typer.Argument(help="Network for the back half.")],
    data: Data,
    out: Annotated[
        Path | None,
        typer.Option(help="Output folder, required without --plan. Existing files are overwritten.", file_okay=False),
    ] = None,
    source_layer: Annotated[
        str, typer.Option(help="Cut of the source (see hf-stitch layers). auto: the most similar layer.")
    ] = "auto",
    target_layer: Annotated[str, typer.Option(help="Cut of the target. auto: the most similar layer.")] = "auto",
    matcher: Annotated[
        str, typer.Option(help="Matcher that fits the stitching layer. See hf-stitch list matchers.")
    ] = "lstsq",
    option: Matching = None,
    pooling: CutPooling = "none",
    align: AlignTexts = "tokens",
    own: Own = False,
    unpaired: Annotated[
        tuple[str, str] | None,
        typer.Option(
            help="Data of the source and of the target without partners, each as NAME or NAME:SPLIT and read "
            "whole, for the matchers seeded_refinement and unsupervised.",
        ),
    ] = None,
    data_dir: DataDir = None,
    split: Split = None,
    samples: Count = None,
    inputs: Inputs = INPUTS,
    test_size: TestSize = 0.2,
    report: Report = None,
    plan: Planned = False,
    seed: Seed = 0,
    task: Task = None,
    json: AsJson = False,
) -> None:
    """Stitch two networks, score the result compared with baselines, and save it."""
    output = Output(json)
    held_out = check_test_size(test_size)
    chosen = check_pooling(pooling)
    check_report(report)
    reading = check_align(align, own)
    if out is None and not plan:
        raise typer.BadParameter("is required without --plan", param_hint="--out")
    fitted_by = matcher_of(matcher, option or [])

    import hf_stitch.plots  # without matplotlib it fails here, before any work

    with nullcontext() if out is None or plan else output_folder(out):
        networks = [inputs.load(name, task) for name in (source, target)]
        read = inputs.read(data, data_dir, split, samples, seed)
        options: dict[str, Any] = {
            "source_layer": source_layer, "target_layer": target_layer, "matcher": fitted_by, "pooling": chosen,
            "test_size": held_out, "batch_size": inputs.batch_size, "seed": seed, **reading,
        }  # fmt: skip
        if unpaired is not None:
            options["unpaired"] = tuple(inputs.read_other(each, data_dir, None, seed) for each in unpaired)
        if plan:
            planned = hf_stitch.plan(hf_stitch.stitch, networks[0], networks[1], read, **options)
            output.show(planned)
            output.record(planned.to_dict())
            return
        stitched = hf_stitch.stitch(networks[0], networks[1], read, **options)
        assert out is not None
        saved = save(stitched, out)
    layers = {"source_layer": stitched.source.cut.layer, "target_layer": stitched.target.cut.layer}
    output.show(" → ".join(layers.values()))
    output.show(stitched.evaluation or f"not scored: {target} has no head")
    output.show("saved " + ", ".join(map(str, saved.values())))
    if stitched.evaluation:
        output.report(stitched.evaluation, report)
    output.record({
        **layers,
        "evaluation": stitched.evaluation.to_dict() if stitched.evaluation else None,
        "recipe": stitched.config.recipe,
        "saved": {name: str(path) for name, path in saved.items()},
    })  # fmt: skip


def save(stitched: StitchedModel, folder: Path) -> dict[str, Path]:
    """Save a stitched model, its stitcher and its scores in a folder.

    The model is left out, with a warning, if a half cannot be rebuilt from its record (user code), and the stitcher if
    the weights of either half were changed, because the parents do not contain them.
    """
    changed = stitched.has_changed("source") or stitched.has_changed("target")
    with replacing(folder, lambda _: ["evaluation.json", "evaluation.png"]):  # of another model
        shutil.rmtree(folder / "stitcher", ignore_errors=True)
    saved = {"model": folder / "model"}
    try:
        stitched.save_pretrained(saved["model"])
    except ValueError as error:
        if changed:
            raise
        shutil.rmtree(saved.pop("model"), ignore_errors=True)  # of another run
        warn(
            f"only the stitcher is saved, not the whole model, because {str(error).partition('. ')[0]}: "
            "hf-stitch evaluate takes the networks again, with --source and --target"
        )
    if not changed:
        saved["stitcher"] = folder / "stitcher"
        stitched.stitcher.save_pretrained(saved["stitcher"])
    if stitched.evaluation is not None:
        saved |= {"evaluation": folder / "evaluation.json", "plot": folder / "evaluation.png"}
        with replacing(folder) as fresh:
            text = as_json(stitched.evaluation.to_dict()) + "\n"
            (fresh / saved["evaluation"].name).write_text(text, encoding="utf-8")
            stitched.evaluation.plot().savefig(fresh / saved["plot"].name, dpi=150)
    return saved


def matcher_of(name: str, options: list[str]) -> Matcher:
    """Build a matcher from its name and command line options."""
    try:
        return registries.matchers.build(name, **read_options(options))
    except UnknownNameError as error:
        raise typer.BadParameter(str(error), param_hint="--matcher") from error
    except (TypeError, ValueError) as error:  # an option is written wrongly, unknown, missing or out of its range
        raise typer.BadParameter(str(error), param_hint="--option") from error
