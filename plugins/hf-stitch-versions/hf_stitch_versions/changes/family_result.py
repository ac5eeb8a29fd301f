"""Result of :func:`diff_all`: distances between several versions of a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hf_stitch.results import Result
from hf_stitch_versions.changes.result import Estimate

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table

CONFIDENCE = 0.95
"""Confidence of intervals."""

ROUNDED = "bfloat16"
"""Name of the first network with rounded weights."""


@dataclass(frozen=True)
class Pair:
    """Distances between two networks.

    Attributes:
        a: The first network.
        b: The second network.
        weight_change: Norm of the difference of all weights, over the norm of the first network's weights. Weights of
            only one network count as change.
        cosine: Cosine of all weights, as one vector each.
        forth: Distance of the second network's outputs from the first, as an expectation over the first; ``None``
            without data.
        back: The same with the networks exchanged; ``None`` without data.
        agreement: Share of equal predictions; ``None`` without classes.
    """

    a: str
    b: str
    weight_change: float
    cosine: float
    forth: Estimate | None = None
    back: Estimate | None = None
    agreement: Estimate | None = None

    @property
    def distance(self) -> float:
        """Distance of the outputs, as mean of both directions; without data, distance of the weights."""
        return self.weight_change if not (self.forth and self.back) else (self.forth.value + self.back.value) / 2


@dataclass(frozen=True)
class Family(Result):
    """Distances between several versions of a network, returned by :func:`diff_all`.

    Attributes:
        networks: Names of the networks, in order.
        n: Number of samples; 0 without data.
        data: Fingerprint of the samples; ``None`` without data.
        measure: ``KL``, or ``squared difference`` for networks without classes; empty without data.
        what: The measure in words.
        pairs: All pairs, earlier networks first.
        rounding: The first network against itself with weights rounded to bfloat16: distances this small are noise.
        largest: Name of a network -> share of bootstrap resamples with the largest output distance at the step to it
            from the previous network. Empty without data, or with fewer than 20 samples.
        notes: Omissions and their reasons.
    """

    derived: ClassVar[tuple[str, ...]] = ("verdict", "tree")
    page: ClassVar[str] = "hf_stitch_versions.changes.family_page:section"

    networks: Sequence[str]
    n: int
    data: str | None
    measure: str
    what: str
    pairs: Sequence[Pair]
    rounding: Pair
    largest: Mapping[str, float]
    notes: Sequence[str]

    def between(self, a: str, b: str) -> Pair:
        """Return a pair, with the earlier network first.

        Args:
            a: Name of a network.
            b: Name of another network.

        Returns:
            Their distances.

        Raises:
            KeyError: If a name is unknown, or both are equal.
        """
        if (match := next((pair for pair in self.pairs if {pair.a, pair.b} == {a, b}), None)) is None:
            raise KeyError(f"{a!r} and {b!r} must be two of the networks: {', '.join(self.networks)}")
        return match

    @property
    def curve(self) -> dict[str, tuple[Pair, Pair]]:
        """Name of each network but the first -> its pairs with the first and with the previous one."""
        first, *rest = self.networks
        steps = zip(self.networks, rest, strict=False)
        return {name: (self.between(first, name), self.between(previous, name)) for previous, name in steps}

    def matrix(self, value: Callable[[Pair], float]) -> NDArray[np.float64]:
        """Return a value of all pairs as a symmetric matrix with 0 on its diagonal.

        Args:
            value: Function of a pair.

        Returns:
            (networks, networks) float64.
        """
        matrix = np.zeros((len(self.networks),) * 2)
        indices = {name: place for place, name in enumerate(self.networks)}
        for pair in self.pairs:
            matrix[indices[pair.a], indices[pair.b]] = matrix[indices[pair.b], indices[pair.a]] = value(pair)
        return matrix

    @property
    def linkage(self) -> NDArray[np.float64]:
        """Average linkage of the weight changes, in the format of ``scipy.cluster.hierarchy``."""
        from scipy.cluster.hierarchy import linkage
        from scipy.spatial.distance import squareform

        return np.asarray(linkage(squareform(self.matrix(lambda pair: pair.weight_change)), "average"))

    @property
    def tree(self) -> str:
        """The tree of :attr:`linkage` in the Newick format; the root is at half the largest distance."""
        from scipy.cluster.hierarchy import to_tree

        def text(node: Any, height: float) -> str:
            length = f":{height - node.dist / 2:.6g}"
            if node.is_leaf():
                return _quoted(self.networks[node.id]) + length
            return f"({text(node.left, node.dist / 2)},{text(node.right, node.dist / 2)}){length}"

        root: Any = to_tree(self.linkage)
        return text(root, root.dist / 2).rpartition(":")[0] + ";"

    @property
    def verdict(self) -> str:
        """Summary in a few sentences."""
        nearest = min(self.pairs, key=lambda pair: pair.distance)
        phrase = f" are nearest of {len(self.networks)}" if len(self.networks) > 2 else " are apart"
        sentences = [f"{nearest.a} and {nearest.b}{phrase}: {self._told(nearest)}."]
        if len(self.networks) > 2:
            steps = (step for _, step in self.curve.values())
            step = max(
                steps, key=lambda candidate: candidate.forth.value if candidate.forth else candidate.weight_change
            )
            certainty = f"; it is the largest in {self.largest[step.b]:.0%} of resamples" if self.largest else ""
            sentences.append(f"The largest step is from {step.a} to {step.b}: {self._told(step)}{certainty}.")
        sentences.append(f"Rounding {self.networks[0]} to {ROUNDED} changes {self._told(self.rounding)}.")
        return " ".join(sentences)

    def _told(self, pair: Pair) -> str:
        """Describe the distances between two networks."""
        weights = f"{pair.weight_change:.2g} of the norm of the weights"
        return f"{self.measure} {pair.forth}, {weights}" if pair.forth else weights

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row per pair and a last row for the rounding, with distances and intervals as columns."""
        import pandas

        measure, rows = self.measure.replace(" ", "_"), []
        for pair in (*self.pairs, self.rounding):
            row: dict[str, object] = {"a": pair.a, "b": pair.b}
            for name, estimate in (
                (measure, pair.forth),
                (f"{measure}_back", pair.back),
                ("agreement", pair.agreement),
            ):
                if estimate is not None:
                    row |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
            rows.append(row | {"weight_change": pair.weight_change, "cosine": pair.cosine})
        return pandas.DataFrame(rows)

    def __rich__(self) -> Table:
        """Return a table of the distances from the first and the previous network, under the verdict."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(self.verdict))
        for column in self.columns:
            table.add_column(Text(column), justify="left" if column == "network" else "right")
        for row in self.rows:
            table.add_row(*map(Text, row))
        table.caption = Text("\n".join(self.notes))
        return table

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the table as text."""
        outputs = [self.measure] * bool(self.n) + ["agreement"] * (self.rounding.agreement is not None)
        first, *more = [*outputs, "weights changed"]
        return ("network", f"{first} from the first", *more, f"{first} from the previous", *more)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Rows of the table as text: all networks but the first, and the rounded first one."""
        rows = [(name, *_cells(first), *_cells(previous)) for name, (first, previous) in self.curve.items()]
        noise = _cells(self.rounding)
        return [*rows, (f"{self.rounding.a} in {ROUNDED}", *noise, *[""] * len(noise))]

    def plot(self) -> Figure:
        """Plot heat maps of the distances: weights under their tree, and outputs in the same order.

        Returns:
            The matplotlib figure.
        """
        from scipy.cluster.hierarchy import dendrogram

        from hf_stitch.plots import heatmaps

        leaves = dendrogram(self.linkage, no_plot=True)["leaves"]
        names = [self.networks[leaf] for leaf in leaves]
        panels = {"change of the weights, %": self.matrix(lambda pair: 100 * pair.weight_change)}
        if self.n:
            with np.errstate(divide="ignore"):
                logs = np.log10(self.matrix(lambda pair: pair.distance))
            panels[f"log10 of {self.measure}"] = np.where(np.isfinite(logs), logs, np.nan)
        figure = heatmaps([
            {"values": values[np.ix_(leaves, leaves)], "row_labels": names, "column_labels": names, "label": label}
            for label, values in panels.items()
        ])  # fmt: skip
        figure.set_figheight(1.25 * figure.get_figheight())
        figure.set_layout_engine("constrained", rect=(0, 0, 1, 0.78))
        tree_axes = figure.subfigs[0].axes[0].inset_axes((0, 1.02, 1, 0.28))
        tree_axes.set_in_layout(False)
        tree_axes.set_axis_off()
        dendrogram(self.linkage, ax=tree_axes, no_labels=True, link_color_func=lambda node: "black")
        return figure


def _cells(pair: Pair) -> list[str]:
    """Return distances as text."""
    agreement = [] if pair.agreement is None else [f"{pair.agreement.value:.1%}"]
    return [*([str(pair.forth)] if pair.forth else []), *agreement, f"{pair.weight_change:.2g}"]


def _quoted(name: str) -> str:
    """Quote a name for the Newick format."""
    return name if name.replace("_", "").isalnum() else "'" + name.replace("'", "''") + "'"
