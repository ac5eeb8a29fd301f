"""``hf-stitch bench``: which metrics predict how much representations differ in function."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_stitch.cli.functions import shown
from hf_stitch.cli.options import (
    INPUTS,
    NAMES,
    AsJson,
    Count,
    Data,
    DataDir,
    Inputs,
    Report,
    Seed,
    Split,
    Task,
    TestSize,
    built,
    check_pooling,
    check_report,
    check_test_size,
    grouped,
)
from hf_stitch.cli.output import Output
from hf_stitch.storage.folders import replacing

if TYPE_CHECKING:
    from hf_stitch_studies.benching.result import Bench


@grouped
def bench(
    metric: Annotated[
        list[str], typer.Argument(help="Metrics, e.g. procrustes linear_cka:debiased=true. See hf-stitch list metrics.")
    ],
    network: Annotated[
        list[str],
        typer.Option(help=f"Network: {NAMES}. Repeat for at least three."),
    ],
    data: Data,
    out: Annotated[
        Path | None, typer.Option(help="Output folder for scores and the figure. Existing files are overwritten.")
    ] = None,
    matcher: Annotated[
        list[str] | None,
        typer.Option(help="Matcher, scored by the error of its stitches. Repeatable. See hf-stitch list matchers."),
    ] = None,
    functional: Annotated[
        list[str] | None,
        typer.Option(help="Matcher, scored by the accuracy of stitched models, for specificity. Repeatable."),
    ] = None,
    layer: Annotated[
        list[str] | None, typer.Option(help="Layer of all networks. Repeatable. [default: all candidates]")
    ] = None,
    sensitivity_layer: Annotated[
        list[str] | None, typer.Option(help="Layer that is approximated at lower ranks. Repeatable. [default: all]")
    ] = None,
    rank: Annotated[
        list[int] | None, typer.Option(min=1, help="Rank of approximations. Repeatable. [default: by width]")
    ] = None,
    references: Annotated[int, typer.Option(min=2, help="Number of references.")] = 10,
    pooling: Annotated[str, typer.Option(help="How activations become vectors: mean, cls, last or flatten.")] = "mean",
    data_dir: DataDir = None,
    split: Split = None,
    samples: Count = None,
    inputs: Inputs = INPUTS,
    report: Report = None,
    test_size: TestSize = 0.2,
    seed: Seed = 0,
    task: Task = None,
    json: AsJson = False,
) -> None:
    """Measure which metrics predict how much representations of several networks differ in function."""
    output = Output(json)
    check_report(report)
    held_out = check_test_size(test_size)
    options: dict[str, Any] = {
        "metrics": built("metrics", metric, "METRIC"), "matchers": built("matchers", matcher or []),
        "functional": built("matchers", functional or [], "--functional"), "layers": layer or None,
        "sensitivity_layers": sensitivity_layer or None, "ranks": rank or None, "pooling": check_pooling(pooling),
    }  # fmt: skip
    if len(set(network)) < max(len(network), 3):
        raise typer.BadParameter(
            f"name at least three different networks, each once, got {', '.join(network)}", param_hint="--network"
        )

    import hf_stitch.plots  # noqa: F401  # without matplotlib it fails here, before any work
    from hf_stitch_studies import bench as run

    networks = {shown(name): inputs.load(name, task) for name in network}
    read = inputs.read(data, data_dir, split, samples, seed)
    found = run(
        networks, read, test_size=held_out, references=references, batch_size=inputs.batch_size, seed=seed, **options
    )
    saved = {} if out is None else _save(found, out)
    output.show(found)
    if saved:
        output.show("saved " + ", ".join(map(str, saved.values())))
    output.report(found, report)
    output.record({**found.to_dict(), "saved": {name: str(path) for name, path in saved.items()}})


def _save(found: Bench, folder: Path) -> dict[str, Path]:
    """Save the scores, and the figure of τ with its intervals."""
    with replacing(folder) as fresh:
        found.save(fresh / "bench.json")
        found.plot().savefig(fresh / "bench.png", dpi=150)
    return {name: folder / name for name in ("bench.json", "bench.png")}
