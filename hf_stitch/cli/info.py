"""``hf-stitch info``: the metadata of an artefact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hf_stitch.cli.functions import check_artefact
from hf_stitch.cli.options import AsJson
from hf_stitch.cli.output import Output

if TYPE_CHECKING:
    from hf_stitch.analysis.evaluation import Evaluation
    from hf_stitch.artefacts import Description


def info(
    place: Annotated[str, typer.Argument(metavar="ID_OR_FOLDER", help="A stitcher or stitched model.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.", show_default="main")] = None,
    json: AsJson = False,
) -> None:
    """Show the parents, recipe and scores of an artefact. No weights are downloaded."""
    from hf_stitch.artefacts import Description
    from hf_stitch.artefacts.artefact import folder_of

    output = Output(json)
    check_artefact(place, "ID_OR_FOLDER")
    found = Description.read(folder_of(place, ["stitcher.json", "config.json"], revision=revision))
    output.show(_table(place, found))
    if (evaluation := _evaluation(found)) is not None:
        output.show(evaluation)
    output.record(_record(found))


def _record(found: Description) -> dict[str, Any]:
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


def _table(place: str, found: Description) -> Table:
    from hf_stitch.data.overlap import FITTED

    record, (width, other) = _record(found), found.widths
    table = Table("entry", "value", title=f"{place}: a {record['kind']}", title_justify="left")
    for side in ("source", "target"):
        end = record[side]
        name = end["id"] or end["summary"] or "a network that is not on the Hub"
        table.add_row(side, name + (f" at {end['revision']}" if end.get("revision") else ""))
        table.add_row("", f"cut after {end['layer']}; weights {end.get('weights_hash') or 'unknown'}")
    fitted = _pairs(found.body.get("fitted") or {})
    table.add_row("stitching layer", f"{found.body['name']}, {width} → {other}; {fitted}".strip("; "))
    for row in _rows({key: value for key, value in found.recipe.items() if key != FITTED}):
        table.add_row(*row)
    return table


def _rows(values: Mapping[str, Any], indent: str = "") -> Iterator[tuple[str, str]]:
    """Yield a row for each value; records that a record contains follow it, indented."""
    for key, value in values.items():
        name = indent + key.replace("_", " ")
        if not isinstance(value, dict):
            yield name, _text(value)
            continue
        inner = {key: item for key, item in value.items() if isinstance(item, (dict, list)) and " = " in _text(item)}
        yield name, _pairs({key: item for key, item in value.items() if key not in inner})
        yield from _rows(inner, f"{indent}  ")


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {_text(value)}" for key, value in values.items())


def _text(value: Any) -> str:
    if isinstance(value, dict):
        if value.keys() == {"value", "low", "high"}:
            return "{value} [{low}, {high}]".format(**{name: _text(number) for name, number in value.items()})
        return _pairs(value)
    if isinstance(value, list):
        return ("; " if any(isinstance(item, dict) for item in value) else ", ").join(map(_text, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
