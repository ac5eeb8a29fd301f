"""``hf-stitch layers``: the layers at which a network can be cut; of an artefact, its parents, recipe and scores."""

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
    """List the layers at which a network can be cut, with the layout and width of the activations.

    Of a stitcher or a stitched model, show the parents, the recipe and the scores. No weights are downloaded; hf-stitch
    doctor lists the layers of a stitched model.
    """
    output = Output(json)
    if (folder := _artefact(model)) is not None:
        from hf_stitch.artefacts import Description

        described = Description.read(folder)
        output.show(_description(model, described))
        if (evaluation := _evaluation(described)) is not None:
            output.show(evaluation)
        output.record(_record_of(described))
        return
    adapter, name = load_network(model, device, dtype, task), shown(model)
    found = list(map(adapter.cut_info, adapter.layers))
    if not found:
        raise ValueError(
            f"{model} cannot be cut between its blocks: the whole computation passes through none of its layers. "
            f"Run hf-stitch doctor {model} for details"
        )
    output.show(_table(name, found))
    output.record({"model": name, "task": adapter.task, "layers": [_record(e) for e in found]})


def _table(model: str, found: list[CutInfo]) -> Table:
    table = Table("layer", "layout", title=f"Cuts of {model}", title_justify="left")
    for column in ("width", "grid", "cost before"):
        table.add_column(column, justify="right")
    for column in ("status", "plan"):
        table.add_column(column)
    for e in found:
        if e.spec is None:
            table.add_row(e.layer, *[""] * 4, e.status, e.reason)
            continue
        grid = "×".join(map(str, e.spec.grid)) if e.spec.grid else "–"
        prefix = f" +{e.spec.prefix_tokens}" if e.spec.prefix_tokens else ""
        cost = "–" if e.cost is None else f"{e.cost:.0%}"
        table.add_row(e.layer, e.spec.layout, str(e.spec.width), grid + prefix, cost, e.status, e.plan or "–")
    return table


def _record(e: CutInfo) -> dict[str, Any]:
    return {key: value for key, value in asdict(e).items() if value != ""}


def _artefact(name: str) -> Path | None:
    """Return the folder of a stitcher or a stitched model, as far as its record goes; ``None`` for a network."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if is_function(name):
            return None
        with suppress(ValueError, OSError):  # loading the network raises an error
            if (found := ModelReference.parse(name)).library == HUB_DEFAULT:
                folder = download(str(found.id), files=["stitcher.json", "config.json"], revision=found.revision)
    if (folder / "stitcher.json").is_file():
        return folder
    if not (config := folder / "config.json").is_file():
        return None
    with decoding(config):
        return folder if dict(loads(config.read_bytes())).get("model_type") == "hf_stitch" else None


def _record_of(found: Description) -> dict[str, Any]:
    """Return the same record for both kinds of artefacts."""
    return {
        "kind": "stitched model" if found.whole else "stitcher",
        "source": {**found.source.to_dict(), "layer": found.source_layer},
        "target": {**found.target.to_dict(), "layer": found.target_layer},
        "stitch": found.stitch,
        "recipe": found.recipe,
        "scores": found.scores,
    }


def _evaluation(found: Description) -> Evaluation | None:
    """Return the scores that the artefact was saved with, in the order of a card: a saved config is sorted by name."""
    from hf_stitch.analysis.evaluation import Evaluation
    from hf_stitch.artefacts.card import ordered
    from hf_stitch.artefacts.record import damaged

    if not found.scores.get("scores"):
        return None
    kept = {key: found.scores[key] for key in ("task", "n", "data", "scores") if key in found.scores}
    try:
        scored = Evaluation.from_dict(kept)
    except ValueError as error:
        raise damaged("config.json" if found.whole else "stitcher.json", error) from error
    return replace(scored, scores=ordered(vars(scored)))


def _description(place: str, found: Description) -> Table:
    from hf_stitch.artefacts.card import recipe_rows

    table = Table("entry", "value", title_justify="left")
    table.title = f"{place}: a {'stitched model' if found.whole else 'stitcher'}"
    rows = recipe_rows(found)
    for side, end, layer in (
        ("source", found.source, found.source_layer), ("target", found.target, found.target_layer)
    ):  # fmt: skip
        name = end.id or end.summary or "a network that is not on the Hub"
        rows[side] = f"{name}{f' at {end.revision}' if end.revision else ''}, cut after {layer}"
    for name, value in rows.items():
        table.add_row(name, value.replace("`", ""))
    return table
