"""Result of :func:`shorten`: a shorter network, its removed blocks, and its scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hf_stitch import Adapter
from hf_stitch.results import Result
from hf_stitch.scoring.measured import Score
from hf_stitch_shorten.folder import front_matter, save_network

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table

SHORTENED, DROPPED, FULL = "shortened", "dropped", "full"
"""Names of networks: with a map, with the same blocks only dropped, and the whole network."""

AGREEMENTS = ("agreement", "knn_overlap")
"""Metrics that count equal outputs, most preferred first."""

CARD = """{metadata}
# {title}

{network} without {removed}, shortened by [hf-stitch](https://github.com/hf-stitch/hf-stitch) without training.

{verdict}

| network | {figures} |
|---|{rules}|
{rows}

{fitted} Scores are on {n} test samples, with 95% intervals over them.

{notes}
"""


@dataclass(frozen=True)
class Candidate:
    """Interval of blocks, and the metric without it.

    Attributes:
        before: Name of the block before it.
        blocks: Names of its blocks.
        value: Metric of the outputs without it, on the samples that chose the interval.
        chosen: Whether it was removed.
    """

    before: str
    blocks: tuple[str, ...]
    value: float
    chosen: bool = False


@dataclass(frozen=True)
class Size:
    """Size and speed of a network.

    Attributes:
        parameters: Number of its weights.
        forward: Seconds per forward pass of one batch of test samples; the shortest of three.
        generation: Generated tokens per second, one text at a time; ``None`` if it cannot generate.
    """

    parameters: int
    forward: float
    generation: float | None


@dataclass(frozen=True)
class Shortened(Result):
    """Shorter network, returned by :func:`shorten`.

    Attributes:
        network: The original network.
        removed: Names of the removed blocks.
        matcher: Name of the map that compensates for them.
        task: Task that scores it.
        n: Number of test samples.
        data: Fingerprint of the test samples.
        rows: Number of rows used for fitting the maps.
        figure: Metric that chose the blocks.
        scores: ``shortened``, ``dropped`` (the same blocks without a map) and, for networks with a head, ``full`` ->
            metric -> score on test samples; metrics with the target compare with the outputs of the whole network.
        gain: Improvement of ``shortened`` over ``dropped`` in this metric, as a paired difference; ``None`` for the
            matcher ``drop``.
        bound: Minimum agreement, from ``max_loss``; ``None`` without ``max_loss``.
        candidates: All scored intervals.
        size: ``full`` and ``shortened`` -> size and speed.
        error: Largest difference between the outputs of the rebuilt and the mapped network, over the largest output.
        forwards: Forward passes of a whole network per sample (test samples not counted) for search and test, without
            speed measurements; counted by the layers that ran.
        notes: Remarks on the result.
        model: The shorter network; not saved with the result.
    """

    page: ClassVar[str] = "hf_stitch_shorten.page:section"
    derived: ClassVar[tuple[str, ...]] = ("verdict", "accepted")

    network: str
    removed: tuple[str, ...]
    matcher: str
    task: str
    n: int
    data: str
    rows: int
    figure: str
    scores: Mapping[str, Mapping[str, Score]]
    gain: Score | None
    bound: float | None
    candidates: tuple[Candidate, ...]
    size: Mapping[str, Size]
    error: float
    forwards: float
    notes: tuple[str, ...]
    model: Adapter | None = field(default=None, compare=False, repr=False, metadata={"saved": False})

    @property
    def agreement(self) -> tuple[str, Score]:
        """The metric that counts equal outputs, and its score."""
        row = self.scores[SHORTENED]
        return next(((name, row[name]) for name in AGREEMENTS if name in row), next(iter(row.items())))

    @property
    def verdict(self) -> str:
        """Summary in a few sentences."""
        name, score = self.agreement
        full, short = self.size[FULL], self.size[SHORTENED]
        text = (
            f"Without {listed(self.removed)}, {name.replace('_', ' ')} with the whole network is {score}; "
            f"{1 - short.parameters / full.parameters:.0%} fewer weights, a forward pass "
            f"takes {short.forward / full.forward:.2f} times as long"
        )
        if self.gain is not None:
            metric_name = worded(self.figure)
            rows = self.scores[SHORTENED][self.figure].value, self.scores[DROPPED][self.figure].value
            text += f". {metric_name[0].upper()}{metric_name[1:]} is {rows[0]:.3g}, and {rows[1]:.3g} with the blocks "
            text += "only dropped"
        reasons = (
            [] if self.gain is None or self.gain.low > 0 else [f"no gain of {self.matcher} over dropping: {self.gain}"]
        )
        if self.bound is not None and not score.low >= self.bound:
            reasons.append(f"{name.replace('_', ' ')} may be below {self.bound:g}")
        return (
            f"{text}. {'Not accepted' if self.bound is not None else 'But'}: {'; '.join(reasons)}."
            if reasons
            else f"{text}."
        )

    @property
    def accepted(self) -> bool | None:
        """Whether, with confidence, the map improves the network and the agreement reaches the bound.

        Both are judged by the ends of their 95% intervals. ``None`` without a bound.
        """
        if self.bound is None:
            return None
        return self.agreement[1].low >= self.bound and (self.gain is None or self.gain.low > 0)

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the shorter network as an ordinary folder, with its processor and a card.

        transformers, timm and sentence-transformers load it without hf-stitch.

        Args:
            folder: The folder; files of an earlier save are replaced atomically.

        Raises:
            ValueError: If the result was loaded from a file, without the network, or the network is a custom module.
        """
        save_network(self.model, Path(folder), self._card())

    def _card(self) -> str:
        figures = list(self.scores[SHORTENED])
        rows = [
            f"| {who} | " + " | ".join(str(row.get(name, "–")) for name in figures) + " |"
            for who, row in self.scores.items()
        ]
        fitted = "" if self.gain is None else f"The map ({self.matcher}) was fitted on {self.rows} rows."
        return CARD.format(
            metadata=front_matter(self.model, self.network),
            title=f"Shortened: {len(self.removed)} blocks removed", network=self.network,
            removed=listed(self.removed), verdict=self.verdict,
            figures=" | ".join(map(worded, figures)), rules="|".join("---" for _ in figures),
            rows="\n".join(rows), fitted=fitted, n=self.n, notes="\n".join(f"- {note}" for note in self.notes),
        )  # fmt: skip

    def __rich__(self) -> Table:
        """Return a table of the networks and their scores."""
        from rich.table import Table
        from rich.text import Text

        figures = list(self.scores[SHORTENED])
        table = Table(
            "network", *map(worded, figures), title=f"{self.n} test samples, 95% intervals",
            caption="\n".join((self.verdict, *self.notes)), caption_justify="left",
        )  # fmt: skip
        for who, row in self.scores.items():
            cells = (Text(str(row.get(name, "–")).replace(" [", "\n[")) for name in figures)
            table.add_row(who, *cells, style="bold" if who == SHORTENED else "")
        return table

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row per interval: block before it, its blocks, their number, the metric, whether it was chosen."""
        import pandas

        return pandas.DataFrame(
            [
                {
                    "before": candidate.before, "blocks": list(candidate.blocks), "removed": len(candidate.blocks),
                    self.figure: candidate.value, "chosen": candidate.chosen,
                }
                for candidate in self.candidates
            ]
        )  # fmt: skip

    def plot(self) -> Figure:
        """Plot the metric of the intervals against the block before them, with one line per number of removed blocks.

        Returns:
            The matplotlib figure.
        """
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        order = list(dict.fromkeys(candidate.before for candidate in self.candidates))
        for count in sorted({len(candidate.blocks) for candidate in self.candidates}):
            rows = [candidate for candidate in self.candidates if len(candidate.blocks) == count]
            places = [order.index(candidate.before) for candidate in rows]
            (line,) = axes.plot(places, [candidate.value for candidate in rows], "o-", label=f"{count} removed")
            for candidate, place in zip(rows, places, strict=True):
                if candidate.chosen:
                    axes.plot(place, candidate.value, "*", markersize=16, color=line.get_color())
        axes.set_xticks(range(len(order)), order, rotation=45, ha="right")
        axes.set(xlabel="block before the removed blocks", ylabel=worded(self.figure))
        axes.legend()
        return figure


def worded(figure: str) -> str:
    """Return the name of a metric in words."""
    return figure.replace("_", " ").replace("kl ", "KL ")


def runs_of(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Group names of blocks into runs of consecutive blocks."""
    runs: list[list[str]] = []
    for name in names:
        parent, _, place = name.rpartition(".")
        before, _, last = runs[-1][-1].rpartition(".") if runs else ("", "", "")
        if runs and parent == before and int(place) == int(last) + 1:
            runs[-1].append(name)
        else:
            runs.append([name])
    return [tuple(run) for run in runs]


def listed(names: tuple[str, ...]) -> str:
    """Return names of blocks in short form: the first and the last of consecutive blocks."""
    runs = runs_of(names)
    return " and ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1].rpartition('.')[2]}" for run in runs)
