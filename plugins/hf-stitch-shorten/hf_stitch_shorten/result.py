"""The answer: a shorter network, what was removed, and whether it is good enough."""

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
"""Names of predictors: the shortened network, the one without the same blocks and without a map, and the whole one."""

AGREEMENTS = ("agreement", "knn_overlap")
"""Figures that count equal outputs; then the first one stands for them."""

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
    """An interval of blocks, and the outputs without it.

    Attributes:
        before: Name of the block before it.
        blocks: Names of its blocks.
        value: Figure of the outputs without it, on samples that chose the interval.
        chosen: Whether it was removed.
    """

    before: str
    blocks: tuple[str, ...]
    value: float
    chosen: bool = False


@dataclass(frozen=True)
class Size:
    """What a network costs.

    Attributes:
        parameters: Number of its weights.
        forward: Seconds of a forward of one batch of test samples; the shortest of three.
        generation: Tokens that it generates per second, one text at a time; ``None`` if it generates none.
    """

    parameters: int
    forward: float
    generation: float | None


@dataclass(frozen=True)
class Shortened(Result):
    """A shorter network, returned by :func:`shorten`.

    Attributes:
        network: What was shortened.
        removed: Names of the removed blocks.
        matcher: Name of the map that makes up for them.
        task: What scores it.
        n: Number of test samples.
        data: Fingerprint of the test samples.
        rows: Number of rows that the maps were fitted on.
        figure: The figure that chose the blocks.
        scores: ``shortened``, ``dropped`` (the same blocks without a map) and, of networks with a head, ``full`` ->
            figure -> score on test samples; figures with the target compare with the outputs of the whole network.
        gain: By how much ``shortened`` is better than ``dropped`` in this figure, a paired difference; ``None`` if the
            matcher is ``drop``.
        bound: Least agreement that was asked for; ``None`` if none was.
        candidates: All intervals that were scored.
        size: ``full`` and ``shortened`` -> size and speed.
        error: Greatest difference between outputs of the plain network and of the mapped one, over the largest output.
        forwards: Forwards of a whole network per sample of the data without test samples: search and test, without
            what measures speed; counted by the layers that ran.
        notes: What to know.
        model: The shorter network; not in the saved result.
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
        """The figure that counts equal outputs, and its score."""
        row = self.scores[SHORTENED]
        return next(((name, row[name]) for name in AGREEMENTS if name in row), next(iter(row.items())))

    @property
    def verdict(self) -> str:
        """What came out, in a sentence."""
        name, score = self.agreement
        full, short = self.size[FULL], self.size[SHORTENED]
        text = (
            f"Without {listed(self.removed)}, {name.replace('_', ' ')} with the whole network is {score}; "
            f"{1 - short.parameters / full.parameters:.0%} fewer weights, a forward takes "
            f"{short.forward / full.forward:.2f} times as long"
        )
        if self.gain is not None:
            what = worded(self.figure)
            rows = self.scores[SHORTENED][self.figure].value, self.scores[DROPPED][self.figure].value
            text += f". {what[0].upper()}{what[1:]} is {rows[0]:.3g}, and {rows[1]:.3g} if the blocks are only dropped"
        why = (
            []
            if self.gain is None or self.gain.low > 0
            else [f"{self.matcher} is not better than dropping: {self.gain}"]
        )
        if self.bound is not None and not score.low >= self.bound:
            why.append(f"{name.replace('_', ' ')} may be below {self.bound:g}")
        return (
            f"{text}. {'Not accepted' if self.bound is not None else 'But'}: {'; '.join(why)}." if why else f"{text}."
        )

    @property
    def accepted(self) -> bool | None:
        """Whether the map is better than none and the agreement at least the bound, with confidence.

        Both are judged by the ends of their 95% intervals. ``None`` if there is no bound.
        """
        if self.bound is None:
            return None
        return self.agreement[1].low >= self.bound and (self.gain is None or self.gain.low > 0)

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the shorter network as an ordinary folder, with its processor and a card.

        transformers, timm and sentence-transformers load it without hf-stitch.

        Args:
            folder: The folder; files of an earlier save are replaced at once.

        Raises:
            ValueError: If the result was read from a file and has no network, or the network is a module of your own.
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
        """Return the table of the networks."""
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
        """Return a row for each interval: block before it, its blocks, their number, the figure, if it was chosen."""
        import pandas

        return pandas.DataFrame(
            [
                {
                    "before": each.before, "blocks": list(each.blocks), "removed": len(each.blocks),
                    self.figure: each.value, "chosen": each.chosen,
                }
                for each in self.candidates
            ]
        )  # fmt: skip

    def plot(self) -> Figure:
        """Plot the intervals: the figure against the block before them, a line for each number of removed blocks.

        Returns:
            The matplotlib figure.
        """
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        order = list(dict.fromkeys(each.before for each in self.candidates))
        for count in sorted({len(each.blocks) for each in self.candidates}):
            rows = [each for each in self.candidates if len(each.blocks) == count]
            places = [order.index(each.before) for each in rows]
            (line,) = axes.plot(places, [each.value for each in rows], "o-", label=f"{count} removed")
            for each, place in zip(rows, places, strict=True):
                if each.chosen:
                    axes.plot(place, each.value, "*", markersize=16, color=line.get_color())
        axes.set_xticks(range(len(order)), order, rotation=45, ha="right")
        axes.set(xlabel="the block before the removed ones", ylabel=worded(self.figure))
        axes.legend()
        return figure


def worded(figure: str) -> str:
    """Return the name of a figure in words."""
    return figure.replace("_", " ").replace("kl ", "KL ")


def runs_of(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Divide names of blocks into those that follow each other."""
    runs: list[list[str]] = []
    for name in names:
        parent, _, place = name.rpartition(".")
        before, _, last = runs[-1][-1].rpartition(".") if runs else ("", "", "")
        if runs and parent == before and int(place) == int(last) + 1:
            runs[-1].append(name)
        else:
            runs.append([name])
    return [tuple(each) for each in runs]


def listed(names: tuple[str, ...]) -> str:
    """Return names of blocks in short: the first and the last of those that follow each other."""
    runs = runs_of(names)
    return " and ".join(each[0] if len(each) == 1 else f"{each[0]} to {each[-1].rpartition('.')[2]}" for each in runs)
