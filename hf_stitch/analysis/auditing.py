"""The result of an audit: is a stitched model accurate, and are its representations such as the target has?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

from hf_stitch.analysis.distribution import SEPARABLE, Distribution
from hf_stitch.analysis.evaluation import Evaluation
from hf_stitch.representation import Pooling
from hf_stitch.results import Result

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.console import Group


@dataclass(frozen=True)
class Audit(Result):
    """What :func:`audit` found.

    Attributes:
        evaluation: The scores beside their baselines.
        min_relative_accuracy: Share of the target's accuracy from which the stitch counts as accurate.
        pooling: The pooling of the residual and of the distributions.
        residual: ``‖T f − g‖² / ‖g‖²`` over all rows at the target's cut (Balogh and Jelasity 2025, direct matching,
            structural; squared and relative as in their code) by part of the stitching layer: 0 the target's own
            representations; 1 no better than zeros.
        distributions: How stitched representations are told from the target's, by part (``body``; ``prefix`` where
            there are prefix tokens).
        control: Fingerprint of the samples of the control, ``None`` without one.
        seed: Of the bootstrap and of the rows drawn.
    """

    derived: ClassVar[tuple[str, ...]] = ("verdict",)

    evaluation: Evaluation
    min_relative_accuracy: float
    pooling: Pooling
    residual: Mapping[str, float]
    distributions: Mapping[str, Distribution]
    control: str | None
    seed: int

    @property
    def figure(self) -> str:
        """The figure that tells whether the stitch is accurate."""
        figures = self.evaluation.scores["stitched"]
        return next(f for f in ("relative_accuracy", "relative_perplexity", "agreement") if f in figures)

    @property
    def is_accurate(self) -> bool:
        """Whether it reaches the threshold, and with its whole interval is better than the mean alone and chance.

        Of language models, the relative perplexity must be at most the inverse of the threshold.
        """
        scores = {who: row[self.figure] for who, row in self.evaluation.scores.items()}
        own, rivals = scores["stitched"], [scores[who].value for who in ("mean_only", "chance")]
        if self.figure == "relative_perplexity":
            return own.value <= 1 / self.min_relative_accuracy and own.high < min(rivals)
        return own.value >= self.min_relative_accuracy and own.low > max(rivals)

    @property
    def in_distribution(self) -> bool | None:
        """Whether every part is; ``None`` if no part is out and one cannot be told."""
        separated = [d.separated for d in self.distributions.values()]
        return False if True in separated else None if None in separated else True

    @property
    def worst(self) -> Distribution:
        """Of the parts, the one told from the target's best."""
        return max(self.distributions.values(), key=lambda d: d.separation.value)

    @property
    def verdict(self) -> str:
        """One plain sentence, without figures."""
        if self.in_distribution is None:
            why = (
                "the target's own representations of these samples are told from those it was trained on"
                if any(d.control is not None and d.control.high >= SEPARABLE for d in self.distributions.values())
                else "the interval is too wide"
            )
            first = "accurate" if self.is_accurate else "inaccurate"
            return f"{first}, and whether in distribution cannot be told: {why}"
        if self.is_accurate:
            return (
                "accurate and in distribution"
                if self.in_distribution
                else "accurate but out of distribution: do not read this as similarity"
            )
        return (
            f"inaccurate, {'though in' if self.in_distribution else 'and out of'} distribution: no sign of similarity"
        )

    def __str__(self) -> str:
        """The sentence with its figures."""
        worst = self.worst
        side = f", {worst.side}" if worst.separated else ""
        control = "no control" if worst.control is None else f"control {worst.control}"
        return (
            f"{self.verdict} ({self.figure.replace('_', ' ')} {self.evaluation[self.figure]}; told from the target's "
            f"own with AUROC {worst.separation}{side}, {control}; relative residual "
            f"{self.residual['body']:.3f})"
        )

    def __rich__(self) -> Group:
        """The sentence and the tables that ``rich`` prints."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(
            "part", "raw", "compensated", "distance", "control", "residual",
            title=f"AUROC, stitched against the target's own, pooling: {self.pooling}",
        )  # fmt: skip
        for part, found in self.distributions.items():
            scores = (found.raw, found.compensated, found.distance, found.control or "–")
            table.add_row(part, *(Text(str(score)) for score in scores), f"{self.residual[part]:.3f}")
        return Group(Text(self.verdict, style="bold"), self.evaluation.__rich__(), table)

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each part and AUROC: ``part``, ``auroc``, ``value``, ``low``, ``high``."""
        import pandas

        return pandas.DataFrame(
            [
                {"part": part, "auroc": name, **score}
                for part, found in self.distributions.items()
                for name, score in asdict(found).items()
                if score is not None
            ]
        )

    def plot(self) -> Figure:
        """The AUROCs with their intervals."""
        from hf_stitch.plots import intervals

        several = len(self.distributions) > 1
        scores = {
            f"{part}: {name}" if several else name: (score.value, score.low, score.high)
            for part, found in self.distributions.items()
            for name, score in (
                ("raw", found.raw), ("compensated", found.compensated), ("distance", found.distance),
                ("control", found.control),
            )
            if score is not None
        }  # fmt: skip
        return intervals(scores, label="AUROC, stitched against the target's own")
