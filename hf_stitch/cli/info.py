"""``hf-stitch info``: what an artefact says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hf_stitch.cli.options import AsJson
from hf_stitch.cli.output import Output

if TYPE_CHECKING:
    from hf_stitch.analysis.evaluation import Evaluation
    from hf_stitch.stitches import Stitch, StitchingLayer


def info(
    place: Annotated[str, typer.Argument(metavar="ID_OR_FOLDER", help="A stitcher or stitched model.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub. [default: main]")] = None,
    json: AsJson = False,
) -> None:
    """Show what an artefact joins, how its map was found and how well it does; no weights are downloaded."""
    from hf_stitch import hub

    output = Output(json)
    folder = Path(place)
    if not folder.is_dir():
        folder = hub.download(place, files=["stitcher.json", "config.json"], revision=revision)
    record, layer, evaluation = _record(folder)
    output.say(_table(place, record, layer.body))
    if evaluation is not None:
        output.say(evaluation)
    output.record(record)


def _record(folder: Path) -> tuple[dict[str, Any], StitchingLayer, Evaluation | None]:
    """What either artefact says, in one form; its stitch, without weights; its scores, if it has any."""
    from hf_stitch.analysis.evaluation import Evaluation
    from hf_stitch.artefacts.files import read_config
    from hf_stitch.artefacts.record import check_counts, damaged, known_forms, read_record
    from hf_stitch.artefacts.skeleton import weightless
    from hf_stitch.cli.artefacts import is_stitcher
    from hf_stitch.registry import PluginError
    from hf_stitch.stitches import StitchingLayer

    small = is_stitcher(folder)
    path = folder / ("stitcher.json" if small else "config.json")
    said = read_record(path) if small else read_config(folder).to_dict()
    check_counts(said, str(path))
    try:
        ends = {
            side: {**said[side]["endpoint"], "layer": said[side]["layer"] if small else said[side]["cut"]["layer"]}
            for side in ("source", "target")
        }
        record = {
            "kind": "stitcher" if small else "stitched model",
            **ends,
            "stitch": said["stitch"],
            "recipe": said["recipe"] or {},
            "scores": said["scores"] or {},
        }
        with weightless():
            layer = StitchingLayer.from_dict(known_forms(said["stitch"], f"the stitch of {path}"))
        if not record["scores"].get("scores"):
            return record, layer, None
        scores = {key: record["scores"][key] for key in ("task", "n", "data", "scores")}
        return record, layer, Evaluation.from_dict(scores)
    except PluginError:
        raise
    except Exception as error:
        raise damaged(path, error) from error


def _table(place: str, record: dict[str, Any], body: Stitch) -> Table:
    table = Table("", "", title=f"{place}: a {record['kind']}", title_justify="left", show_header=False)
    for side in ("source", "target"):
        end = record[side]
        name = end["id"] or "a network that is not on the Hub"
        table.add_row(side, name + (f" at {end['revision']}" if end.get("revision") else ""))
        table.add_row("", f"cut behind {end['layer']}; weights {end.get('weights_hash') or 'unknown'}")
    recipe = dict(record["recipe"])
    table.add_row("map", f"{body.name}, {body.in_features} → {body.out_features}; {_pairs(body.fitted)}".strip("; "))
    matcher = dict(recipe.pop("matcher", None) or {})
    table.add_row("matcher", f"{matcher.pop('name', 'unknown')} {_pairs(matcher)}".strip())
    for key, value in recipe.items():
        table.add_row(key.replace("_", " "), _pairs(value) if isinstance(value, dict) else str(value))
    return table


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} = {value:.6g}" if isinstance(value, float) else f"{key} = {value}" for key, value in values.items()
    )
