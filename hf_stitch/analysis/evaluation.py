"""Results of :func:`hf_stitch.evaluate`: scores of a stitched model and its baselines, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from hf_stitch.analysis.scoring import Score
from hf_stitch.data.overlap import held_out
from hf_stitch.results import Result

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table


@dataclass(frozen=True)
class Evaluation(Result):
    """Scores of a stitched model compared with baselines, returned by :func:`hf_stitch.evaluate`.

    Attributes:
        task: Task of the head that was scored; ``feature-extraction`` for a model without a head.
        n: Number of held-out samples.
        data: Fingerprint of the held-out samples.
        fitted_share: Share of the samples to which the stitching layer was fitted, found by their content; ``None`` if
            the model does not record them. Scores on these samples are too good.
        scores: Nested mapping, name of a predictor (``stitched``, ``identity``, ``mean_only``, ``source``, ``target``,
            ``chance``) -> name of a figure (``accuracy``, ``relative_accuracy``, …) -> :class:`Score`.
        left_out: Name of a predictor without scores -> reason.

    Example:
        >>> scores = {
        ...     "stitched": {"accuracy": Score(0.81, 0.78, 0.84)},
        ...     "chance": {"accuracy": Score(0.1, 0.08, 0.12)},
        ... }
        >>> evaluation = Evaluation("image-classification", 1000, "sha256:0", scores)
        >>> evaluation["accuracy"].value
        0.81
        >>> print(evaluation.scores["chance"]["accuracy"])
        0.100 [0.080, 0.120]
    """

    task: str
    n: int
    data: str
    scores: Mapping[str, Mapping[str, Score]] = field(default_factory=dict)
    fitted_share: float | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, figure: str) -> Score:
        """Return a figure of the stitched model, e.g. ``evaluation["relative_accuracy"]``."""
        return self.scores["stitched"][figure]

    def to_pandas(self) -> pandas.DataFrame:
        """Return the scores in long format.

        Returns:
            One row per predictor and figure, with the columns ``predictor``, ``figure``, ``value``, ``low``, ``high``.
        """
        import pandas

        return pandas.DataFrame(
            [
                {"predictor": who, "figure": what, **asdict(score)}
                for who, figures in self.scores.items()
                for what, score in figures.items()
            ]
        )

    def __rich__(self) -> Table:
        """Return the table that ``rich`` prints, one row per predictor."""
        from rich.table import Table
        from rich.text import Text

        figures = list(next(iter(self.scores.values())))
        table = Table(
            "predictor",
            *(f.replace("_", " ") for f in figures),
            title=f"{held_out(self.n, self.fitted_share)}, 95% intervals over samples",
        )
        if self.left_out:
            table.caption = "; ".join(f"no {who}: {why}" for who, why in self.left_out.items())
        for who, row in self.scores.items():
            table.add_row(
                who, *(Text(str(row[figure])) for figure in figures), style="bold" if who == "stitched" else ""
            )
        return table

    def plot(self, figure: str | None = None) -> Figure:
        """Plot one figure of every predictor with its interval.

        Args:
            figure: Name of the figure; ``None`` plots the first one.

        Returns:
            The matplotlib figure.
        """
        from hf_stitch.plots import intervals

        name = figure or next(iter(self.scores["stitched"]))
        return intervals(
            {who: (s[name].value, s[name].low, s[name].high) for who, s in self.scores.items()},
            label=name.replace("_", " "),
        )
