"""``hf-stitch layers``: the layers at which a network can be cut."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hf_stitch.cli.functions import shown
from hf_stitch.cli.options import NAMES, AsJson, Device, Dtype, Task, load_network
from hf_stitch.cli.output import Output

if TYPE_CHECKING:
    from hf_stitch.adapters import CutInfo


def layers(
    model: Annotated[str, typer.Argument(help=f"Network: {NAMES}.")],
    task: Task = None,
    device: Device = None,
    dtype: Dtype = None,
    json: AsJson = False,
) -> None:
    """List the layers at which a network can be cut, with the layout and width of the activations."""
    output = Output(json)
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
