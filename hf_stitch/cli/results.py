"""What the quickstart found: a result for each pair of layers and each matcher, as a table, as files, as a figure."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from hf_stitch.cli.output import as_json

if TYPE_CHECKING:
    from hf_stitch.analysis.evaluation import Evaluation
    from hf_stitch.analysis.scoring import Score
    from hf_stitch.artefacts import StitchedModel

BASELINES = ("mean_only", "chance")
"""What is shown beside the matchers; identity, the other baseline, is one of them."""


@dataclass(frozen=True)
class Result:
    """Two networks, joined and scored.

    Attributes:
        source: What the quickstart calls the network of the front half.
        source_layer: Its cut.
        target: What it calls the network of the back half.
        target_layer: Its cut.
        matcher: What found the map, with its options.
        stitched: The joined network.
        evaluation: Its scores, and those of its baselines.
    """

    source: str
    source_layer: str
    target: str
    target_layer: str
    matcher: str
    stitched: StitchedModel
    evaluation: Evaluation

    @property
    def pair(self) -> str:
        """For example ``cnn-0 → vit-0``."""
        return f"{self.source} → {self.target}"

    @property
    def layers(self) -> str:
        """Both layers, or the one name that both have."""
        return " → ".join(dict.fromkeys((self.source_layer, self.target_layer)))

    @property
    def place(self) -> tuple[str, str]:
        """What results of different matchers share."""
        return self.pair, self.layers

    def score(self, predictor: str = "stitched") -> Score:
        """The accuracy of a predictor, relative to the target's."""
        return self.evaluation.scores[predictor]["relative_accuracy"]

    def to_dict(self) -> dict[str, Any]:
        """All that was measured, as JSON values."""
        names = ("source", "source_layer", "target", "target_layer", "matcher")
        return {**{name: getattr(self, name) for name in names}, "evaluation": self.evaluation.to_dict()}

    def to_line(self) -> dict[str, Any]:
        """The figures that the table shows, in one flat line."""
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
    """A line for each pair of layers, in a section for each pair of networks; the best of each line in bold."""
    matchers = list(dict.fromkeys(r.matcher for r in results))
    n = results[0].evaluation.n
    shown = Table(
        "layers",
        *matchers,
        *BASELINES,
        title="Accuracy relative to the target alone, in %",
        title_justify="left",
        caption=f"95% intervals over {n} held-out images; in parentheses, the accuracy of the target alone",
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
    """Everything that was measured as JSON, a line for each result as CSV, and the figure.

    Returns:
        What was saved -> where.
    """
    names = {"results": "results.json", "table": "results.csv", "figure": "results.png"}
    saved = {what: folder / name for what, name in names.items()}
    saved["results"].write_text(as_json([r.to_dict() for r in results]) + "\n", encoding="utf-8")
    lines = [r.to_line() for r in results]
    with saved["table"].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    _draw(results, saved["figure"])
    return saved


def _draw(results: list[Result], path: Path) -> None:
    """The heat map: layers by matchers, the best matchers framed."""
    from hf_stitch.plots import heatmap

    matchers = list(dict.fromkeys(r.matcher for r in results))
    lines = [list(line) for _, line in groupby(results, key=lambda r: r.place)]
    values = [[r.score().value for r in line] for line in lines]
    figure = heatmap(
        values,
        [":  ".join(line[0].place) for line in lines],
        matchers,
        title="How well a network goes on from another",
        label="accuracy relative to the target alone",
        low=0.0,
        high=1.0,
        marked=[[value == max(line) for value in line] for line in values],
    )
    figure.savefig(path, dpi=150)


def _percent(score: Score, style: str) -> Text:
    """For example ``97 [95–99]``."""
    return Text(f"{100 * score.value:.0f} [{100 * score.low:.0f}–{100 * score.high:.0f}]", style)
