"""Results of the quickstart for each pair of layers and each matcher, as a table, as files and as a figure."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from hf_stitch.cli.output import as_json
from hf_stitch.storage.folders import replacing

if TYPE_CHECKING:
    from hf_stitch.analysis.evaluation import Evaluation
    from hf_stitch.artefacts import StitchedModel
    from hf_stitch.scoring.measured import Score

BASELINES = ("mean_only", "chance")
"""Baselines in the table. The baseline ``identity`` is one of the matchers."""


@dataclass(frozen=True)
class Result:
    """A stitched network and its scores."""

    source: str  # name of the source network in the quickstart
    source_layer: str  # cut of the source
    target: str  # name of the target network in the quickstart
    target_layer: str  # cut of the target
    matcher: str  # name of the matcher and its options in the quickstart
    stitched: StitchedModel  # the stitched network
    evaluation: Evaluation  # scores of the stitched network and its baselines

    @property
    def pair(self) -> str:
        """Names of both networks, for example ``cnn-0 → vit-0``."""
        return f"{self.source} → {self.target}"

    @property
    def layers(self) -> str:
        """Names of both layers, or one name if they are equal."""
        return " → ".join(dict.fromkeys((self.source_layer, self.target_layer)))

    @property
    def place(self) -> tuple[str, str]:
        """The pair of networks and the pair of layers, shared by the results of all matchers."""
        return self.pair, self.layers

    def score(self, predictor: str = "stitched") -> Score:
        """Return the accuracy of a predictor relative to the target."""
        return self.evaluation.scores[predictor]["relative_accuracy"]

    def to_dict(self) -> dict[str, Any]:
        """Return all scores as JSON-like values."""
        names = ("source", "source_layer", "target", "target_layer", "matcher")
        return {**{name: getattr(self, name) for name in names}, "evaluation": self.evaluation.to_dict()}

    def to_line(self) -> dict[str, Any]:
        """Return the scores shown in the table as a flat record."""
        relative, alone = self.score(), self.evaluation.scores["target"]["accuracy"]
        return {
            **{key: value for key, value in self.to_dict().items() if key != "evaluation"},
            "accuracy": self.evaluation["accuracy"].value,
            "target_accuracy": alone.value,
            "relative_accuracy": relative.value,
            "low": relative.low,
            "high": relative.high,
            **{who.replace(" ", "_"): self.score(who).value for who in BASELINES},
        }


def table(results: list[Result]) -> Table:
    """Build the table of results, with one row for each pair of layers and the best matcher in bold."""
    matchers = list(dict.fromkeys(r.matcher for r in results))
    n = results[0].evaluation.n
    shown = Table(
        "layers",
        *matchers,
        *BASELINES,
        title="Accuracy relative to the target alone, in %",
        title_justify="left",
        caption=f"95% intervals over {n} held-out images. In parentheses: the accuracy of the target alone",
        caption_justify="left",
    )
    for column in shown.columns[1:]:
        column.justify = "right"
    for pair, of_pair in groupby(results, key=lambda r: r.pair):
        section = list(of_pair)
        alone = section[0].evaluation.scores["target"]["accuracy"].value
        shown.add_section()
        shown.add_row(Text.assemble((pair, "bold"), (f"  ({alone:.1%})", "dim")))
        for layers, of_layers in groupby(section, key=lambda r: r.layers):
            line = list(of_layers)
            best = max(r.score().value for r in line)
            cells = [_percent(r.score(), "bold" if r.score().value == best else "") for r in line]
            shown.add_row(Text(f"  {layers}"), *cells, *(_percent(line[0].score(b), "dim") for b in BASELINES))
    return shown


def save(results: list[Result], folder: Path) -> dict[str, Path]:
    """Save all scores as JSON, one row for each result as CSV, and the figure."""
    names = {"results": "results.json", "table": "results.csv", "figure": "results.png"}
    lines = [r.to_line() for r in results]
    with replacing(folder) as fresh:
        (fresh / names["results"]).write_text(as_json([r.to_dict() for r in results]) + "\n", encoding="utf-8")
        with (fresh / names["table"]).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)
        _draw(results, fresh / names["figure"])
    return {kind: folder / name for kind, name in names.items()}


def _draw(results: list[Result], path: Path) -> None:
    """Draw a heat map of layers by matchers with the best matchers framed."""
    from hf_stitch.plots import heatmap

    matchers = list(dict.fromkeys(r.matcher for r in results))
    lines = [list(line) for _, line in groupby(results, key=lambda r: r.place)]
    values = [[r.score().value for r in line] for line in lines]
    figure = heatmap(
        values,
        [":  ".join(line[0].place) for line in lines],
        matchers,
        title="Accuracy of stitched networks",
        label="accuracy relative to the target alone",
        low=0.0,
        high=1.0,
        marked=[[value == max(line) for value in line] for line in values],
        marks="best matcher of each pair of layers",
        row_title="networks and layers",
        column_title="matcher",
    )
    figure.savefig(path, dpi=150)


def _percent(score: Score, style: str) -> Text:
    """Format a score in percent, for example ``97 [95–99]``."""
    return Text(f"{100 * score.value:.0f} [{100 * score.low:.0f}–{100 * score.high:.0f}]", style)
