"""``hf-stitch layers``: the cuts of a network, or the parents, recipe and scores of an artefact."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hf_stitch.cli.functions import is_function, shown
from hf_stitch.cli.options import NAMES, AsJson, Device, Dtype, Task, load_network
from hf_stitch.cli.output import Output
from hf_stitch.hub import download
from hf_stitch.reference import HUB_DEFAULT, ModelReference
from hf_stitch.storage.files import decoding

if TYPE_CHECKING:
    from hf_stitch.adapters import CutInfo
    from hf_stitch.analysis.evaluation import Evaluation
    from hf_stitch.artefacts import Description


def layers(
    model: Annotated[str, typer.Argument(help=f"Network: {NAMES}; or a stitcher or stitched model.")],
    task: Task = None,
    device: Device = None,
    dtype: Dtype = None,
    json: AsJson = False,
) -> None:
    """List the cuts of a network, with the layout and width of the activations.

    For a stitcher or a stitched model, show the parents, the recipe and the scores, without downloading weights;
    hf-stitch doctor lists the layers of a stitched model.
    """
    output = Output(json)
    if (folder := _artefact_folder(model)) is not None:
        from hf_stitch.artefacts import Description

        description = Description.read(folder)
        output.show(_description_table(model, description))
        if (evaluation := _evaluation(description)) is not None:
            output.show(evaluation)
        output.record(_artefact_record(description))
        return
    adapter, name = load_network(model, device, dtype, task), shown(model)
    cuts = list(map(adapter.cut_info, adapter.layers))
    if not cuts:
        raise ValueError(
            f"{model} cannot be cut between its blocks, because every layer is bypassed. Run hf-stitch doctor {model} "
            "for details"
        )
    output.show(_table(name, cuts))
    output.record({"model": name, "task": adapter.task, "layers": [_cut_record(cut) for cut in cuts]})


def _table(model: str, cuts: list[CutInfo]) -> Table:
    table = Table("layer", "layout", title=f"Cuts of {model}", title_justify="left")
    for column in ("width", "grid", "cost before"):
        table.add_column(column, justify="right")
    for column in ("status", "plan"):
        table.add_column(column)
    for cut in cuts:
        if cut.spec is None:
            table.add_row(cut.layer, *[""] * 4, cut.status, cut.reason)
            continue
        grid = "×".join(map(str, cut.spec.grid)) if cut.spec.grid else "–"
        prefix = f" +{cut.spec.prefix_tokens}" if cut.spec.prefix_tokens else ""
        cost = "–" if cut.cost is None else f"{cut.cost:.0%}"
        table.add_row(cut.layer, cut.spec.layout, str(cut.spec.width), grid + prefix, cost, cut.status, cut.plan or "–")
    return table


def _cut_record(cut: CutInfo) -> dict[str, Any]:
    return {key: value for key, value in asdict(cut).items() if value != ""}


def _artefact_folder(name: str) -> Path | None:
    """Return the folder of the record of a stitcher or a stitched model; ``None`` for a network."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if is_function(name):
            return None
        with suppress(ValueError, OSError):  # loading the network raises an error
            if (parsed := ModelReference.parse(name)).library == HUB_DEFAULT:
                folder = download(str(parsed.id), files=["stitcher.json", "config.json"], revision=parsed.revision)
    if (folder / "stitcher.json").is_file():
        return folder
    if not (config := folder / "config.json").is_file():
        return None
    with decoding(config):
        return folder if dict(loads(config.read_bytes())).get("model_type") == "hf_stitch" else None


def _artefact_record(artefact: Description) -> dict[str, Any]:
    """Return the record of a stitcher or a stitched model."""
    return {
        "kind": "stitched model" if artefact.whole else "stitcher",
        "source": {**artefact.source.to_dict(), "layer": artefact.source_layer},
        "target": {**artefact.target.to_dict(), "layer": artefact.target_layer},
        "stitch": artefact.stitch,
        "recipe": artefact.recipe,
        "scores": artefact.scores,
    }


def _evaluation(artefact: Description) -> Evaluation | None:
    """Return the saved scores in the order of a model card; a saved config sorts them by name."""
    from hf_stitch.analysis.evaluation import Evaluation
    from hf_stitch.artefacts.card import ordered
    from hf_stitch.artefacts.record import damaged

    if not artefact.scores.get("scores"):
        return None
    record = {key: artefact.scores[key] for key in ("task", "n", "data", "scores") if key in artefact.scores}
    try:
        evaluation = Evaluation.from_dict(record)
    except ValueError as error:
        raise damaged("config.json" if artefact.whole else "stitcher.json", error) from error
    return replace(evaluation, scores=ordered(vars(evaluation)))


def _description_table(artefact_name: str, artefact: Description) -> Table:
    from hf_stitch.artefacts.card import recipe_rows

    table = Table("entry", "value", title_justify="left")
    table.title = f"{artefact_name}: a {'stitched model' if artefact.whole else 'stitcher'}"
    rows = recipe_rows(artefact)
    for side, reference, layer in (
        ("source", artefact.source, artefact.source_layer), ("target", artefact.target, artefact.target_layer)
    ):  # fmt: skip
        name = reference.id or reference.summary or "a network outside the Hub"
        rows[side] = f"{name}{f' at {reference.revision}' if reference.revision else ''}, cut after {layer}"
    for name, value in rows.items():
        table.add_row(name, value.replace("`", ""))
    return table
