"""Results of :func:`hf_stitch.audit`: accuracy of a stitched model, and distribution of its activations."""

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
    """Accuracy of a stitched model and distribution of its activations, returned by :func:`hf_stitch.audit`.

    Attributes:
        evaluation: The scores compared with baselines.
        min_relative_accuracy: Relative accuracy from which the stitched model counts as accurate.
        pooling: Pooling of the residual and of the distributions.
        residual: Part of the stitching layer (``body``, ``prefix``) -> ``‖T f − g‖² / ‖g‖²`` over all rows at the
            target cut (Balogh and Jelasity 2025, direct matching, structural; squared and relative as in their code).
            0 for the target's own activations, 1 for activations no better than zeros.
        distributions: Part (``body``; ``prefix`` if there are prefix tokens) -> comparison of stitched activations with
            the target's.
        control: Fingerprint of the control samples; ``None`` without a control.
        seed: Seed of the bootstrap and of the drawn rows.

    Example:
        >>> from hf_stitch.analysis import Score
        >>> rows = {"stitched": 0.8, "mean_only": 0.1, "target": 0.9, "chance": 0.1}
        >>> scores = {
        ...     name: {"relative_accuracy": Score(value, value - 0.02, value + 0.02)} for name, value in rows.items()
        ... }
        >>> near = Score(0.52, 0.48, 0.56)
        >>> distributions = {"body": Distribution(near, near, near, near)}
        >>> evaluation = Evaluation("image-classification", 1000, "sha256:0", scores)
        >>> Audit(evaluation, 0.8, "mean", {"body": 0.2}, distributions, None, 0).verdict
        'accurate and in distribution'
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
        """Name of the figure on which :attr:`is_accurate` is based."""
        figures = self.evaluation.scores["stitched"]
        return next(f for f in ("relative_accuracy", "relative_perplexity", "agreement") if f in figures)

    @property
    def is_accurate(self) -> bool:
        """Whether the figure reaches the threshold and its interval is better than the mean-only baseline and chance.

        For language models, the relative perplexity must be at most the inverse of the threshold.
        """
        scores = {who: row[self.figure] for who, row in self.evaluation.scores.items()}
        own, rivals = scores["stitched"], [scores[who].value for who in ("mean_only", "chance")]
        if self.figure == "relative_perplexity":
            return own.value <= 1 / self.min_relative_accuracy and own.high < min(rivals)
        return own.value >= self.min_relative_accuracy and own.low > max(rivals)

    @property
    def in_distribution(self) -> bool | None:
        """Whether all parts are in distribution; ``None`` if no part is out of distribution and one is undecided."""
        separated = [d.separated for d in self.distributions.values()]
        return False if True in separated else None if None in separated else True

    @property
    def worst(self) -> Distribution:
        """The distribution of the part with the highest separation."""
        return max(self.distributions.values(), key=lambda d: d.separation.value)

    @property
    def verdict(self) -> str:
        """One sentence without figures."""
        if self.in_distribution is None:
            why = (
                "the target's own activations of these samples differ from those of its training samples"
                if any(d.control is not None and d.control.high >= SEPARABLE for d in self.distributions.values())
                else "the interval is too wide"
            )
            first = "accurate" if self.is_accurate else "inaccurate"
            return f"{first}, undecided whether in distribution: {why}"
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
        """Return the verdict with its figures."""
        worst = self.worst
        side = f", {worst.side}" if worst.separated else ""
        control = "no control" if worst.control is None else f"control {worst.control}"
        return (
            f"{self.verdict} ({self.figure.replace('_', ' ')} {self.evaluation[self.figure]}; AUROC against the "
            f"target's own activations {worst.separation}{side}, {control}; relative residual "
            f"{self.residual['body']:.3f})"
        )

    def __rich__(self) -> Group:
        """Return the verdict and the tables that ``rich`` prints."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(
            "part", "raw", "compensated", "distance", "control", "residual",
            title=f"AUROC, stitched against target activations, pooling: {self.pooling}",
        )  # fmt: skip
        for part, found in self.distributions.items():
            scores = (found.raw, found.compensated, found.distance, found.control or "–")
            table.add_row(part, *(Text(str(score)) for score in scores), f"{self.residual[part]:.3f}")
        return Group(Text(self.verdict, style="bold"), self.evaluation.__rich__(), table)

    def to_pandas(self) -> pandas.DataFrame:
        """Return the AUROCs in long format.

        Returns:
            One row per part and AUROC, with the columns ``part``, ``auroc``, ``value``, ``low`` and ``high``.
        """
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
        """Plot the AUROCs with their intervals.

        Returns:
            The matplotlib figure.
        """
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
        return intervals(scores, label="AUROC, stitched against target activations")
