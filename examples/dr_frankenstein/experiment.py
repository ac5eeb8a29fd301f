"""What the experiments share on the command line, and what they leave behind."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from hf_stitch.analysis.evaluation import Score


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the arguments that every experiment has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--preset", choices=("small", "paper", "test"), default="small", help="minutes, days or seconds")
    made.add_argument("--data-dir", help="local folder of the data sets; default: the Hub")
    made.add_argument(
        "--networks", type=Path, required=True, help="folder of base networks; those not there are trained"
    )
    made.add_argument("--out", type=Path, help="folder for figures as JSON and PNG")
    return made


def show(table: Table, name: str, record: Mapping[str, Any], pictures: Mapping[str, Figure], out: Path | None) -> None:
    """Print the table; write the record and the pictures, if there is a folder."""
    Console(width=140).print(table)
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(record, indent=2, default=vars) + "\n")
    for picture, figure in pictures.items():
        figure.savefig(out / f"{picture}.png", dpi=150)


def lines(series: Mapping[str, Sequence[Score]], places: Sequence[str], label: str, title: str) -> Figure:
    """A line with its band for each name, over named places."""
    figure = Figure(figsize=(max(5.0, 0.75 * len(places) + 2.0), 4.0), layout="constrained")
    axes = figure.add_subplot()
    for name, scores in series.items():
        (line,) = axes.plot(places, [score.value for score in scores], "o-", markersize=4, label=name)
        axes.fill_between(
            places, [s.low for s in scores], [s.high for s in scores], color=line.get_color(), alpha=0.2, linewidth=0
        )
    axes.set_ylabel(label)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title, fontsize="large")
    return figure
