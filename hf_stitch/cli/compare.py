"""``hf-stitch compare``: the similarity of every layer of one network to every layer of another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_stitch.cli.options import (
    INPUTS,
    NAMES,
    AsJson,
    CheckpointDir,
    Count,
    DataDir,
    Inputs,
    Planned,
    Report,
    Seed,
    Split,
    Task,
    check_pooling,
    check_report,
    grouped,
)
from hf_stitch.cli.output import Output, figure_name
from hf_stitch.registry import registries
from hf_stitch.storage.folders import replacing

if TYPE_CHECKING:
    from hf_stitch.analysis.comparison.atlas import SimilarityAtlas
    from hf_stitch.metrics import Metric


@grouped
def compare(
    a: Annotated[str, typer.Argument(help=f"First network: {NAMES}.")],
    b: Annotated[str, typer.Argument(help="Second network. Pass the same name to compare a network with itself.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="Data set: a Hub id, a local folder (of train.parquet, …, or one of images per class), or "
            "sklearn:digits. Leave it out if all metrics compare weights."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Output folder for values, recipe and figures. Existing files are overwritten.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="Metric, e.g. linear_cka or linear_cka:debiased=true. Repeatable. See hf-stitch list metrics."
        ),
    ] = None,
    pooling: Annotated[
        str, typer.Option(help="How activations become vectors: none, flatten, mean, cls or last.")
    ] = "mean",
    align: Annotated[
        str,
        typer.Option(help="With --pooling none, how rows of texts are matched: tokens, or offsets (pieces of text)."),
    ] = "tokens",
    layer_a: Annotated[list[str] | None, typer.Option(help="Layer of A. Repeatable. [default: all candidates]")] = None,
    layer_b: Annotated[list[str] | None, typer.Option(help="Layer of B. Repeatable. [default: all candidates]")] = None,
    data_dir: DataDir = None,
    split: Split = None,
    samples: Count = None,
    inputs: Inputs = INPUTS,
    report: Report = None,
    plan: Planned = False,
    checkpoint_dir: CheckpointDir = None,
    permutations: Annotated[
        int, typer.Option(min=0, help="Permutations for a test of the most similar pairs, e.g. 200. 0: no test.")
    ] = 0,
    seed: Seed = 0,
    task: Task = None,
    json: AsJson = False,
) -> None:
    """Compare every layer of one network with every layer of another, in one pass over the data or by weights alone."""
    output = Output(json)
    metrics = [_metric(text) for text in metric or ["linear_cka"]]
    if data is None and (run := [each.label for each in metrics if each.statistic != "weights"]):
        raise typer.BadParameter(f"{run[0]} compares activations of samples: name a data set", param_hint="--data")
    check_pooling(pooling)
    check_report(report)
    _check_align(align, pooling)
    if permutations and pooling == "none":
        raise typer.BadParameter(
            "needs one row per sample: use another --pooling than none", param_hint="--permutations"
        )

    import hf_stitch.plots  # without matplotlib it fails here, before any work
    from hf_stitch.processes import Processes

    first = inputs.load(a, task)
    second = first if b == a else inputs.load(b, task)
    read = None if data is None else inputs.read(data, data_dir, split, samples, seed)
    options: dict[str, Any] = {
        "metrics": metrics,
        "pooling": pooling,
        "align": align,
        "layers_a": layer_a or None,
        "layers_b": layer_b or None,
        "permutations": permutations,
        "seed": seed,
        "batch_size": inputs.batch_size,
    }
    if plan:
        planned = hf_stitch.plan(hf_stitch.compare, first, second, read, **options)
        output.show(planned)
        output.record(planned.to_dict())
        return
    atlas = hf_stitch.compare(first, second, read, checkpoint_dir=checkpoint_dir, **options)
    if Processes.of(None).rank:
        return
    saved = {} if out is None else save(atlas, out)
    output.show(atlas)
    if saved:
        output.show("saved " + ", ".join(map(str, saved.values())))
    output.report(atlas, report)
    output.record(_record(atlas, saved))


def _check_align(align: str, pooling: str) -> None:
    from hf_stitch.analysis.comparison.alignment import ALIGN

    if align not in ALIGN:
        raise typer.BadParameter(f"must be one of {', '.join(ALIGN)}, got {align!r}", param_hint="--align")
    if align == "offsets" and pooling != "none":
        raise typer.BadParameter("needs --pooling none, whose rows are tokens", param_hint="--align")


def save(atlas: SimilarityAtlas, folder: Path) -> dict[str, Path]:
    """Save a similarity atlas and one figure for each metric."""
    figures = {metric: figure_name(number, metric) for number, metric in enumerate(atlas.metrics, 1)}
    with replacing(folder) as fresh:
        atlas.save(fresh / "atlas.json")
        for metric, name in figures.items():
            atlas.plot(metric).savefig(fresh / name, dpi=150)
    return {key: folder / name for key, name in {"atlas": "atlas.json", **figures}.items()}


def _record(atlas: SimilarityAtlas, saved: dict[str, Path]) -> dict[str, Any]:
    return {
        "layers_a": atlas.layers_a,
        "layers_b": atlas.layers_b,
        "n": atlas.n,
        "pooling": atlas.pooling,
        "routes": dict(atlas.routes),
        "headlines": {metric: atlas.headline(metric) for metric in atlas.metrics},
        "values": {metric: values.tolist() for metric, values in atlas.values.items()},
        "whole": dict(atlas.whole),
        "weights": None if atlas.weights is None else _record(atlas.weights, {}),
        "undefined": dict(atlas.undefined),
        "best_matches": {metric: atlas.best_matches(metric) for metric in atlas.metrics},
        "p_values": {metric: test.p_values.tolist() for metric, test in atlas.tests.items()},
        "match_p_values": {metric: atlas.match_p_values(metric) for metric in atlas.tests},
        "recipe": dict(atlas.recipe),
        "saved": {name: str(path) for name, path in saved.items()},
    }


def _metric(text: str) -> Metric:
    """Build a metric from ``name:key=value,…``."""
    try:
        return registries.metrics.build(text)
    except (TypeError, ValueError) as error:  # the name, an option, or its value
        raise typer.BadParameter(str(error), param_hint="--metric") from error
