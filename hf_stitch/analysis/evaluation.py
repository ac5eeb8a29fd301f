"""The result of an evaluation: figures of a stitched model and of its baselines, with intervals over samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from hf_stitch.analysis.scoring import Score
from hf_stitch.results import Result

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table


@dataclass(frozen=True)
class Evaluation(Result):
    """What :func:`evaluate` measured.

    Attributes:
        task: The head that was scored.
        n: Number of held-out samples.
        data: Fingerprint of these.
        scores: Name of a predictor (``stitched``, ``identity``, ``mean only``, ``target``, ``chance``) -> name of a
            figure -> score.
    """

    task: str
    n: int
    data: str
    scores: Mapping[str, Mapping[str, Score]] = field(default_factory=dict)

    def __getitem__(self, figure: str) -> Score:
        """A figure of the stitched model: ``evaluation["relative_accuracy"]``."""
        return self.scores["stitched"][figure]

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each predictor and figure: ``predictor``, ``figure``, ``value``, ``low``, ``high``."""
        import pandas

        return pandas.DataFrame(
            [
                {"predictor": who, "figure": what, **asdict(score)}
                for who, figures in self.scores.items()
                for what, score in figures.items()
            ]
        )

    def __rich__(self) -> Table:
        """The table that ``rich`` prints: a row for each predictor."""
        from rich.table import Table
        from rich.text import Text

        figures = list(next(iter(self.scores.values())))
        table = Table(
            "predictor",
            *(f.replace("_", " ") for f in figures),
            title=f"{self.n} held-out samples, 95% intervals over samples",
        )
        for who, row in self.scores.items():
            table.add_row(
                who, *(Text(str(row[figure])) for figure in figures), style="bold" if who == "stitched" else ""
            )
        return table

    def plot(self, figure: str | None = None) -> Figure:
        """A bar for each predictor with its interval; by default of the first figure."""
        from hf_stitch.plots import intervals

        name = figure or next(iter(self.scores["stitched"]))
        return intervals(
            {who: (s[name].value, s[name].low, s[name].high) for who, s in self.scores.items()},
            label=name.replace("_", " "),
        )
