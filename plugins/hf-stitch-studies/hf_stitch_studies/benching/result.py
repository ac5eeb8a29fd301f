"""Result of :func:`hf_stitch_studies.bench`: which distances predict functional differences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from hf_stitch.representation import Pooling
from hf_stitch.results import Result
from hf_stitch.scoring.measured import Score
from hf_stitch_studies.benching.correlation import TESTS, BenchGroup, BenchScore, Test, bench_score

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table


@dataclass(frozen=True, eq=False)
class Bench(Result):
    """Scores of distances as predictors of functional differences, returned by :func:`hf_stitch_studies.bench`.

    Attributes:
        groups: Representations with their probing accuracies and distances: one group for each layer of the
            sensitivity test, and one for the specificity test.
        kinds: Method -> ``metric``, ``matcher, structural``, ``matcher, functional``, ``given``, ``baseline`` or
            ``reliability``.
        networks: Names of the networks.
        layers: Names of the layers of the first network.
        pooling: The pooling.
        n: Number of test samples used for accuracies and distances.
        own_network: Whether references are also compared with representations of the same network.
        undefined: Method -> reason for undefined distances -> number of pairs, over all references.
        recipe: Record for reproducing the bench.

    Raises:
        ValueError: If a group contains a method without a kind.

    Example:
        >>> import numpy as np
        >>> gap, none = np.array([[0.0, 0.1, 0.2, 0.3, 0.4, 0.5]] * 2), np.zeros((2, 6))
        >>> accuracy, distances = 0.9 - gap[0], {"d": 1 - gap, "depth only": none, "rank only": none}
        >>> group = BenchGroup(
        ...     "specificity", "", tuple("abcabc"), tuple("000111"), (2,) * 6, accuracy, accuracy, (0, 1), distances
        ... )
        >>> kinds = {"d": "metric", "depth only": "baseline", "rank only": "baseline"}
        >>> bench = Bench((group,), kinds, ("a", "b", "c"), ("0", "1"), "mean", 50)
        >>> bench.scores["specificity"]["d"].tau.value
        -1.0
    """

    derived: ClassVar[tuple[str, ...]] = ("scores",)

    groups: tuple[BenchGroup, ...]
    kinds: Mapping[str, str]
    networks: tuple[str, ...]
    layers: tuple[str, ...]
    pooling: Pooling
    n: int
    own_network: bool = False
    undefined: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the methods."""
        if unknown := sorted({name for group in self.groups for name in group.distances} - self.kinds.keys()):
            raise ValueError(f"kinds must contain all methods, got none for {', '.join(unknown)}")

    @cached_property
    def scores(self) -> Mapping[Test, Mapping[str, BenchScore]]:
        """Test -> method -> correlations, in the order of ``kinds``."""
        scores: dict[Test, dict[str, BenchScore]] = {}
        for test in TESTS:
            if groups := [group for group in self.groups if group.test == test]:
                scores[test] = {
                    method: bench_score(groups, method, self.networks, own_network=self.own_network)
                    for method in self.kinds
                    if method in groups[0].distances
                }
        return scores

    def to_pandas(self) -> pandas.DataFrame:
        """Return the scores as a data frame.

        Returns:
            One row per test and method, with the columns ``test``, ``method``, ``kind``, ``tau``, ``tau_low``,
            ``tau_high``, ``rho``, ``rho_low``, ``rho_high``, ``spread_low``, ``spread_high``, ``pairs``, ``undefined``,
            ``beats`` and, for each baseline, the difference ``beyond_<baseline>`` with its interval.
        """
        import pandas

        lines = []
        for test, scores in self.scores.items():
            for method, score in scores.items():
                intervals = {"tau": score.tau, "rho": score.rho}
                intervals |= {f"beyond_{name.replace(' ', '_')}": interval for name, interval in score.beyond.items()}
                line: dict[str, Any] = {"test": test, "method": method, "kind": self.kinds[method]}
                for name, interval in intervals.items():
                    line |= {name: interval.value, f"{name}_low": interval.low, f"{name}_high": interval.high}
                line |= dict(zip(("spread_low", "spread_high"), score.spread, strict=True))
                lines.append(line | {"pairs": score.pairs, "undefined": score.undefined, "beats": score.beats})
        return pandas.DataFrame(lines)

    def pairs(self) -> pandas.DataFrame:
        """Return the correlated pairs: distances from the references, and differences in probing accuracy.

        Returns:
            One row per method, reference and compared representation, with the columns ``test``, ``method``,
            ``reference_network``, ``reference_layer``, ``network``, ``layer``, ``rank``, ``gap`` (the absolute
            difference in probing accuracy) and ``distance`` (NaN where undefined).
        """
        import pandas

        return pandas.DataFrame(
            [
                {
                    "test": group.test, "method": method, "reference_network": group.networks[reference],
                    "reference_layer": group.layers[reference], "network": group.networks[index],
                    "layer": group.layers[index], "rank": group.ranks[index], "gap": group.gaps[number, index],
                    "distance": distances[number, index],
                }
                for group in self.groups
                for method, distances in group.distances.items()
                for number, reference in enumerate(group.references)
                for index in group.compared(number, own_network=self.own_network).nonzero()[0]
            ]
        )  # fmt: skip

    def plot(self) -> Figure:
        """Plot Kendall's τ of every method with its interval, both tests side by side.

        Returns:
            The matplotlib figure.
        """
        from hf_stitch.plots import interval_panels

        panels: dict[str, dict[str, tuple[float, float, float]]] = {
            test: {method: (score.tau.value, score.tau.low, score.tau.high) for method, score in scores.items()}
            for test, scores in self.scores.items()
        }
        return interval_panels(panels, "Kendall's τ between distance and difference in probing accuracy")

    def __rich__(self) -> Table:
        """Return the table that ``rich`` prints, one section per test."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(
            "method", "Kendall's τ", "Spearman's ρ", "τ of references", "beats", "pairs", box=box.SIMPLE,
            title="does the distance predict the difference in probing accuracy?", title_justify="left",
        )  # fmt: skip
        for column in table.columns[1:]:
            column.no_wrap = True
        for test, scores in self.scores.items():
            table.add_section()
            table.add_row(Text(test, "bold"))
            for method, score in scores.items():
                beats = {True: "yes", False: "no", None: ""}[score.beats]
                spread = "" if math.isnan(score.spread[0]) else "{:.2f} to {:.2f}".format(*score.spread)
                pairs = f"{score.pairs - score.undefined} of {score.pairs}" if score.undefined else str(score.pairs)
                cells = (f"  {method}", _format_score(score.tau), _format_score(score.rho), spread, beats, pairs)
                table.add_row(*map(Text, cells))
        table.caption_justify = "left"
        table.caption = (
            f"{len(self.networks)} networks, {self.n} test samples, pooling: {self.pooling}. 95% intervals: jackknife "
            "over networks, omitted if τ is undefined without one network. beats: the interval of the difference in τ "
            "from every defined baseline, on the same pairs, lies above 0."
        )
        for method, reasons in self.undefined.items():
            reason, count = max(reasons.items(), key=lambda item: item[1])
            table.caption += f"\n{method}: {sum(reasons.values())} pairs are undefined; {count} of them: {reason}"
        return table


def _format_score(score: Score) -> str:
    if math.isnan(score.value):
        return "–"
    return f"{score.value:.2f}" + ("" if math.isnan(score.low) else f" [{score.low:.2f}, {score.high:.2f}]")
