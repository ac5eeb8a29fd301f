"""``hf-stitch grid``: stitch every layer of one network into every layer of another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_stitch.cli.options import (
    INPUTS,
    NAMES,
    AlignTexts,
    AsJson,
    AuxiliaryData,
    CheckpointDir,
    Count,
    CutPooling,
    Data,
    DataDir,
    Detectors,
    FarData,
    Inputs,
    Own,
    Planned,
    Report,
    Seed,
    Split,
    Task,
    TestSize,
    built,
    check_align,
    check_pooling,
    check_report,
    check_test_size,
    grouped,
)
from hf_stitch.cli.output import Output, figure_name
from hf_stitch.storage.folders import replacing

if TYPE_CHECKING:
    from hf_stitch.analysis.grid.result import StitchGrid


@grouped
def grid(
    source: Annotated[str, typer.Argument(help=f"Network for the front halves: {NAMES}.")],
    target: Annotated[str, typer.Argument(help="Network for the back halves.")],
    data: Data,
    out: Annotated[
        Path | None, typer.Option(help="Output folder for scores and figures. Existing files are overwritten.")
    ] = None,
    matcher: Annotated[
        list[str] | None,
        typer.Option(help="Matcher, e.g. lstsq or ridge:ridge=0.5. Repeatable. See hf-stitch list matchers."),
    ] = None,
    detector: Detectors = None,
    auxiliary_data: AuxiliaryData = None,
    far_data: FarData = None,
    pooling: CutPooling = "none",
    align: AlignTexts = "tokens",
    own: Own = False,
    source_layer: Annotated[
        list[str] | None, typer.Option(help="Cut of the source. Repeatable. [default: all]")
    ] = None,
    target_layer: Annotated[
        list[str] | None, typer.Option(help="Cut of the target. Repeatable. [default: all]")
    ] = None,
    data_dir: DataDir = None,
    split: Split = None,
    samples: Count = None,
    inputs: Inputs = INPUTS,
    test_size: TestSize = 0.2,
    checkpoint_dir: CheckpointDir = None,
    report: Report = None,
    plan: Planned = False,
    seed: Seed = 0,
    task: Task = None,
    json: AsJson = False,
) -> None:
    """Stitch every layer of one network into every layer of another, and score all stitches."""
    output = Output(json)
    held_out = check_test_size(test_size)
    chosen = check_pooling(pooling)
    check_report(report)
    options: dict[str, Any] = {
        "matchers": built("matchers", matcher or ["lstsq"]), "detectors": built("detectors", detector or []),
        "pooling": chosen, "layers_a": source_layer or None, "layers_b": target_layer or None,
        **check_align(align, own),
    }  # fmt: skip

    import hf_stitch.plots  # without matplotlib it fails here, before any work

    networks = [inputs.load(name, task) for name in (source, target)]
    read = inputs.read(data, data_dir, split, samples, seed)
    for name, other in (("auxiliary_data", auxiliary_data), ("far_data", far_data)):
        options[name] = inputs.read_other(other, data_dir, samples, seed)
    options |= {"test_size": held_out, "batch_size": inputs.batch_size, "seed": seed}
    if plan:
        planned = hf_stitch.plan(hf_stitch.stitch_grid, networks[0], networks[1], read, **options)
        output.show(planned)
        output.record(planned.to_dict())
        return
    found = hf_stitch.stitch_grid(networks[0], networks[1], read, checkpoint_dir=checkpoint_dir, **options)
    saved = {} if out is None else _save(found, out)
    output.show(found)
    if saved:
        output.show("saved " + ", ".join(map(str, saved.values())))
    output.report(found, report)
    output.record({**found.to_dict(), "saved": {name: str(path) for name, path in saved.items()}})


def _save(found: StitchGrid, folder: Path) -> dict[str, Path]:
    """Save the scores, a heat map of each figure of each matcher, and accuracy beside detectors."""
    figures = {
        figure_name(number, matcher, figure): (matcher, figure)
        for number, matcher in enumerate(found.matchers, 1)
        for figure in found.figures
    }
    sides = {
        figure_name(number, matcher): matcher
        for number, matcher in enumerate(found.matchers, 1)
        if found.detections  # whose AUROC is drawn beside the accuracy
    }
    with replacing(folder) as fresh:
        found.save(fresh / "grid.json")
        for name, (matcher, figure) in figures.items():
            found.plot(figure, matcher=matcher).savefig(fresh / name, dpi=150)
        for name, matcher in sides.items():
            found.plot(matcher=matcher).savefig(fresh / name, dpi=150)
    return {name: folder / name for name in ("grid.json", *figures, *sides)}
