"""``hf-stitch evaluate``: score a saved stitched model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from hf_stitch.cli import functions
from hf_stitch.cli.options import (
    INPUTS,
    AsJson,
    AuxiliaryData,
    Count,
    Data,
    DataDir,
    Detectors,
    FarData,
    Inputs,
    Planned,
    Report,
    Seed,
    Split,
    built,
    check_place,
    check_report,
    grouped,
)
from hf_stitch.cli.output import Output

if TYPE_CHECKING:
    from hf_stitch.adapters import Adapter
    from hf_stitch.analysis import Audit, Evaluation, Plan
    from hf_stitch.artefacts import StitchedModel

Given: TypeAlias = "Adapter | str | None"
"""A network of an artefact that the command line names, loaded if it is one of a file."""


@grouped
def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="FOLDER", help="A saved stitched model (or its Hub id), or a saved stitcher.")
    ],
    data: Data,
    data_dir: DataDir = None,
    split: Split = None,
    samples: Count = None,
    source: Annotated[
        str | None,
        typer.Option(help="Folder, Hub id or file.py:function of the source, for a stitcher, or to score it alone."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Local folder or file.py:function of the target, if it is not on the Hub.")
    ] = None,
    audit: Annotated[
        bool, typer.Option("--audit", help="Also test whether the target gets hidden states like its own.")
    ] = False,
    train_split: Annotated[
        str | None, typer.Option(help="With --audit: the split that the target was trained on, to fit the detectors.")
    ] = None,
    detector: Detectors = None,
    auxiliary_data: AuxiliaryData = None,
    far_data: FarData = None,
    max_dose: Annotated[
        float | None,
        typer.Option(
            help="With --audit: relative residual of noise above which states are out of distribution.", min=0.0
        ),
    ] = None,
    inputs: Inputs = INPUTS,
    report: Report = None,
    examples: Annotated[
        int, typer.Option(min=0, help="With --report: samples on which model and target differ most, for the page.")
    ] = 0,
    plan: Planned = False,
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Score a saved stitched model and its baselines on held-out samples."""
    _check_audited(
        audit, train_split=train_split, detector=detector, auxiliary_data=auxiliary_data, far_data=far_data,
        max_dose=max_dose,
    )  # fmt: skip
    chosen = None if detector is None else built("detectors", detector)
    output = Output(json)
    check_report(report)
    if examples and (audit or report is None):
        raise typer.BadParameter("requires --report, and no --audit", param_hint="--examples")
    whole: dict[str, Any] = {"source": inputs.given(source), "target": inputs.given(target)}
    stitched = _load(model, inputs, **whole)
    read = inputs.read(data, data_dir, split, samples, seed)

    import hf_stitch

    start: Callable[..., Any] = hf_stitch.plan if plan else lambda job, *args, **given: job(*args, **given)
    found: Audit | Evaluation | Plan
    if stitched.parents:
        whole = {}
    if audit:
        train = None if train_split is None else inputs.read(data, data_dir, train_split, samples, seed)
        given: dict[str, Any] = {"detectors": chosen, "max_dose": max_dose}
        auxiliary, far = (inputs.read_other(other, data_dir, samples, seed) for other in (auxiliary_data, far_data))
        found = start(
            hf_stitch.audit, stitched, read, train_data=train, auxiliary_data=auxiliary, far_data=far,
            batch_size=inputs.batch_size, seed=seed, **whole,
            **{name: value for name, value in given.items() if value is not None},
        )  # fmt: skip
    else:
        found = start(
            hf_stitch.evaluate, stitched, read, batch_size=inputs.batch_size, seed=seed, examples=examples, **whole
        )
    output.show(found)
    output.report(found, report)
    output.record(found.to_dict())


def _check_audited(audit: bool, **options: Any) -> None:
    """Check that options of audits are given with ``--audit`` only."""
    for name, value in options.items():
        if value is not None and not audit:
            raise typer.BadParameter("requires --audit", param_hint=f"--{name.replace('_', '-')}")


def _load(name: str, inputs: Inputs, source: Given, target: Given) -> StitchedModel:
    """Load the stitched model, with the parents that the artefact does not name from local folders or files."""
    import hf_stitch

    functions.check_artefact(name, "FOLDER")
    place, options = check_place(inputs.device, inputs.dtype)
    if (Path(name) / "stitcher.json").is_file():
        stitcher = hf_stitch.Stitcher.from_pretrained(name)
        _require("--source", source or stitcher.source.id)
        _require("--target", target or stitcher.target.id)
        stitched = stitcher.attach(source, target, **options)
    else:
        stitched = hf_stitch.StitchedModel.from_pretrained(name, **options)
        _require("--target", target or (stitched.config.target or {})["reference"]["id"])
    return stitched if place is None else stitched.to(place)  # type: ignore[arg-type]


def _require(option: str, network: Given) -> None:
    if network is None or (isinstance(network, str) and functions.is_function(network)):
        raise typer.BadParameter(
            "is required: this network came from a local folder or a file of code, which artefacts neither record nor "
            "run; name it again",
            param_hint=option,
        )
