"""Results of :func:`hf_stitch.compare`: for each metric, a value for each pair of layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from hf_stitch.analysis.comparison.asking import ROWS_OF, Rows
from hf_stitch.analysis.identification import Identification, identify_layers
from hf_stitch.analysis.permutation import MaximumTest
from hf_stitch.analysis.shown import ends_of, titles_of
from hf_stitch.options import checked, options_in
from hf_stitch.printing import rounded
from hf_stitch.results import Result

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.console import Group
    from rich.table import Table

Array = NDArray[np.float64]
Axis = Literal["a", "b"]

WHOLE = "whole network"
"""Stands for all layers of a network; no module has such a name."""


@dataclass(frozen=True)
class LayerSize:
    """Size of a layer."""

    width: int  # number of features
    share: float | None  # share of the parameters of the network that the layer contains, from 0 to 1


@dataclass(frozen=True, eq=False)
class SimilarityAtlas(Result):
    """Similarity of each layer of a with each layer of b under one or more metrics, returned by :func:`compare`.

    Methods accept the name of a metric, with or without options (:meth:`label`); the default is the first metric.

    Attributes:
        values: Metric -> (layers of a, layers of b) float64; NaN where the metric is undefined.
        layers_a: Names of the layers of a, the rows.
        layers_b: Names of the layers of b, the columns.
        n: Number of samples; None for metrics of weights.
        rows: Which vectors of a sample were rows, as in :func:`compare`; None for metrics of weights.
        routes: Metric -> statistic used to compute it: ``moments``, ``grams``, ``features``, ``minibatches`` or
            ``weights``.
        distances: Metrics with lower values for more similar layers.
        recipe: Record for reproducing the comparison: both sides with hashes, data, metrics with options, batch size
            and versions.
        ranges: Metric -> smallest and largest value that it can have.
        tests: Metric -> permutation test of the search for the most similar layers; empty without
            ``compare(…, permutations=…)``.
        undefined: Pair (``"metric: layer of a -> layer of b"``) -> reason why the metric is undefined: too few samples,
            a constant layer, different widths. Rankings leave such pairs out.
        whole: Metric of weights -> value of both networks as a whole, from all layers of the same name. Metrics that
            are undefined for any layer are left out.
        weights: Atlas of the metrics of weights in a comparison that also has metrics of activations, because their
            layers differ. All methods find its values too.
        sizes: Side (``a``, ``b``) -> layer -> its size; empty for metrics of weights.

    Example:
        >>> values = {"linear_cka": np.array([[0.9, 0.3], [0.2, 0.8]])}
        >>> routes = {"linear_cka": "moments"}
        >>> atlas = SimilarityAtlas(values, ("a0", "a1"), ("b0", "b1"), n=100, rows="mean", routes=routes)
        >>> atlas["linear_cka"].shape
        (2, 2)
        >>> atlas.best_pair()
        ('a0', 'b0')
    """

    page: ClassVar[str] = "hf_stitch.reports.similarity:layers_section"
    formerly: ClassVar[Mapping[str, Any]] = {"pooling": ("rows", ROWS_OF)}
    values: Mapping[str, Array]
    layers_a: tuple[str, ...]
    layers_b: tuple[str, ...]
    n: int | None
    rows: Rows | None
    routes: Mapping[str, str]
    distances: tuple[str, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    tests: Mapping[str, MaximumTest] = field(default_factory=dict)
    undefined: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, float] = field(default_factory=dict)
    weights: SimilarityAtlas | None = None
    sizes: Mapping[str, Mapping[str, LayerSize]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the shapes of the values."""
        shape = (len(self.layers_a), len(self.layers_b))
        for metric, values in self.values.items():
            if values.shape != shape:
                raise ValueError(
                    f"values of {metric} must have the shape {shape}, (layers of a, layers of b), got {values.shape}"
                )

    def __getitem__(self, metric: str) -> Array:
        """Return the values of a metric, (layers of a, layers of b) float64.

        ``atlas["linear_cka"]`` returns the only linear CKA of the atlas, with any options. Options distinguish several:
        ``atlas["linear_cka:debiased=True"]``.
        """
        atlas, label = self._of(metric)
        return atlas.values[label]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The labels of all metrics."""
        return (*self.values, *(self.weights.values if self.weights else ()))

    @checked
    def best_matches(self, metric: str | None = None, axis: Axis = "a") -> dict[str, str]:
        """Find the most similar layer of the other side for each layer of one side.

        Returns:
            Layer of the side ``axis`` -> most similar layer. Layers with an undefined metric for all candidates are
            left out.

        Example:
            >>> atlas = SimilarityAtlas({"cka": np.eye(2)}, ("a0", "a1"), ("b0", "b1"), 9, "mean", {"cka": "moments"})
            >>> atlas.best_matches()
            {'a0': 'b0', 'a1': 'b1'}
        """
        atlas, label = self._of(metric)
        layers, candidates = atlas._sides(axis)
        return {layers[row]: candidates[place] for row, place in atlas._best(label, axis).items()}

    def p_values(self, metric: str | None = None) -> Array:
        """Return the p-values of all pairs of layers, adjusted for the search over all pairs.

        Returns:
            (layers of a, layers of b) float64. If no pair is related, the smallest is at most p with probability p.
            NaN where the metric is undefined.
        """
        return self._test(self.label(metric)).p_values

    @checked
    def match_p_values(self, metric: str | None = None, axis: Axis = "a") -> dict[str, float]:
        """Return the p-values of the best matches, each adjusted for the search over all candidate layers."""
        label, (layers, _) = self.label(metric), self._sides(axis)
        test, best = self._test(label), self._best(label, axis)
        best_indices = np.array([best.get(index, 0) for index in range(len(layers))])
        p_values = test.match_p_values(best_indices, axis).tolist()
        return {layers[index]: p_values[index] for index in best}

    def best_pair(self, metric: str | None = None) -> tuple[str, str]:
        """Find the most similar pair of layers of a and b; the first one in case of a tie.

        Example:
            >>> values = np.array([[0.2, 0.4], [0.9, 0.1]])
            >>> SimilarityAtlas({"cka": values}, ("a0", "a1"), ("b0", "b1"), 9, "mean", {"cka": "moments"}).best_pair()
            ('a1', 'b0')
        """
        atlas, name = self._of(metric)
        best = atlas._best(name, "a")
        if not best:
            raise ValueError(f"{name} is undefined for all pairs of layers; see atlas.undefined")
        choose = min if name in atlas.distances else max
        a = choose(best, key=lambda layer: atlas.values[name][layer, best[layer]])
        return atlas.layers_a[a], atlas.layers_b[best[a]]

    def identify(self, metric: str | None = None) -> Identification:
        """Measure how often a layer and its most similar layer have the same name.

        Returns:
            The layer identification (:func:`hf_stitch.analysis.identify_layers`) over all layers of both sides; layers
            that one side lacks have the verdict ``undefined``. Equal values are ties.

        Example:
            >>> atlas = SimilarityAtlas({"cka": np.eye(2)}, ("l0", "l1"), ("l0", "l1"), 9, "mean", {"cka": "moments"})
            >>> atlas.identify().verdicts("a").tolist()
            [['hit', 'hit']]
        """
        atlas, label = self._of(metric)
        if (shared := len(set(atlas.layers_a) & set(atlas.layers_b))) < 2:
            raise ValueError(
                f"identify requires at least two layers of the same name in a and b, got {shared}; pass the values to "
                "identify_layers instead"
            )
        names = tuple(dict.fromkeys((*atlas.layers_a, *atlas.layers_b)))
        values = np.full((len(names), len(names)), np.nan)
        values[np.ix_(*([names.index(layer) for layer in side] for side in (atlas.layers_a, atlas.layers_b)))] = (
            atlas.values[label]
        )
        return identify_layers(values, higher_is_better=label not in atlas.distances, layers=names)

    def headline(self, metric: str | None = None) -> str:
        """Return the main finding as a sentence: how many layers match their namesake, or the most similar pair.

        Networks of different depths have no namesakes. The sentence then says how far the best matches are away in
        relative depth: 0 for the first layer of a network, 1 for its last layer.

        Example:
            >>> atlas = SimilarityAtlas({"cka": np.eye(2)}, ("l0", "l1"), ("l0", "l1"), 9, "mean", {"cka": "moments"})
            >>> atlas.headline()
            '2 of 2 layers of a match their namesake in b by cka; closest runner-up: l0 for l1, 0.000 after 1.000'
        """
        atlas, label = self._of(metric)
        values = atlas.values[label]
        if np.isnan(values).all():
            return f"{label} is undefined for all pairs of layers"
        if not atlas._namesakes:
            a, b = atlas.best_pair(label)
            value = values[atlas.layers_a.index(a), atlas.layers_b.index(b)]
            text = f"The most similar layers by {label} are {a} of a and {b} of b ({rounded(value)})"
            return text + atlas._depths(label)
        verdicts = dict(zip((test := atlas.identify(label)).layers, test.verdicts("a")[0].tolist(), strict=True))
        hits = [layer for layer in atlas.layers_a if verdicts[layer] == "hit"]
        defined = sum(verdict != "undefined" for verdict in verdicts.values())
        ties = sum(verdict == "tie" for verdict in verdicts.values())
        text = f"{len(hits)} of {defined} layers of a match their namesake in b by {label}"
        text += f" ({ties} tie{'s' * (ties > 1)})" if ties else ""
        orders = zip(atlas.layers_a, values, atlas._ranked(label), strict=True)
        close = [
            (
                abs(row[order[0]] - row[order[1]]),
                f"{atlas.layers_b[order[1]]} for {layer}, {rounded(row[order[1]])} after {rounded(row[order[0]])}",
            )
            for layer, row, order in orders
            if layer in hits and len(order) > 1
        ]
        return text + (f"; closest runner-up: {min(close)[1]}" if close else "")

    def why(self, metric: str, layer_a: str, layer_b: str) -> str | None:
        """Return why a metric is undefined for a pair of layers; None if it is defined."""
        atlas, label = self._of(metric)
        return atlas.undefined.get(pair_name(label, layer_a, layer_b))

    def to_pandas(self) -> pandas.DataFrame:
        """Return the values in long format.

        Returns one row per metric and pair of layers, with the columns ``metric``, ``layer_a``, ``layer_b`` and
        ``value``, ``p_value`` (:meth:`p_values`) if the atlas has a test, and ``undefined`` (the reason, or None) if a
        pair is undefined.
        """
        import pandas

        if self.weights is not None:
            return pandas.concat([replace(self, weights=None).to_pandas(), self.weights.to_pandas()], ignore_index=True)
        p_values = {metric: test.p_values for metric, test in self.tests.items()}
        return pandas.DataFrame(
            [
                {
                    "metric": metric, "layer_a": a, "layer_b": b, "value": float(values[i, j]),
                    **({"p_value": float(p_values[metric][i, j])} if metric in p_values else {}),
                    **({"undefined": self.why(metric, a, b)} if self.undefined else {}),
                }
                for metric, values in self.values.items()
                for i, a in enumerate(self.layers_a)
                for j, b in enumerate(self.layers_b)
            ]
        )  # fmt: skip

    def plot(
        self, metric: str | None = None, *, scale: Literal["data", "fixed"] = "data", max_p: float = 0.05
    ) -> Figure:
        """Plot the values of a metric as a heat map, with a frame around the best match of each layer of a.

        Undefined pairs are grey, with a dash.

        Args:
            metric: Name of the metric.
            scale: ``"data"`` for colours over the range of these values; ``"fixed"`` for colours over the possible
                range of the metric, so that figures can be compared (a distance without an upper bound begins at 0).
            max_p: If the atlas has a test, stars mark the pairs of layers with a p-value of at most ``max_p``
                (:meth:`p_values`), or all remaining pairs if these are fewer. The legend says which.
        """
        if scale not in ("fixed", "data"):
            raise ValueError(f"scale must be 'data' or 'fixed', got {scale!r}")
        atlas, name = self._of(metric)
        if atlas is not self:
            return atlas.plot(name, scale=scale)
        return self._heatmap(name, self.best_matches(name), "best match of each layer of a", scale, max_p)

    def _heatmap(
        self, name: str, best: Mapping[str, str], marks: str, scale: str = "data", max_p: float = 0.05
    ) -> Figure:
        """Plot the values of a metric with a frame around the matches ``best``, which the legend calls ``marks``."""
        from hf_stitch.plots import heatmap

        values, starred, stars = self.values[name], *self._stars(name, max_p)
        marked = np.array([[best.get(a) == b for b in self.layers_b] for a in self.layers_a])
        ends = self.ranges.get(name, (np.nan, np.nan))
        ends = ends if scale == "fixed" else ends_of(values, ends) or (np.nan, np.nan)
        low, high = (end if np.isfinite(end) else None for end in ends)
        title_a, title_b = self._titles
        return heatmap(
            values,
            self.layers_a,
            self.layers_b,
            row_title=title_a,
            column_title=title_b,
            title=self.basis,
            label=f"{name}\n{'lower' if name in self.distances else 'higher'} = more alike",
            low=low,
            high=high,
            marked=marked,
            marks=marks,
            starred=starred,
            stars=stars,
        )

    @property
    def basis(self) -> str:
        """Basis of the values: the samples and the rows, or the weights."""
        return "from weights, without samples" if self.n is None else f"{self.n} samples, rows: {self.rows}"

    def __rich__(self) -> Table | Group:
        """Return the table that ``rich`` prints: the best match of each layer of a under each metric."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        title = f"Best matches among {len(self.layers_b)} layers of b"
        if len(self.layers_b) == 1:
            title = "Match with the only layer of b"
        if self._namesakes:
            title = "\n".join(map(self.headline, self.values))
        table = Table("layer of a", title=Text(title), title_justify="left")
        caption = self.basis
        if self.distances:
            caption += "; ↓ lower = more alike"
        if self.tests:
            count = len(next(iter(self.tests.values())).maxima)
            caption += f"; p-values of the best match, adjusted for the search in b, from {count} permutations"
        caption += "".join(
            f"; {metric} of the whole networks: {rounded(value)}" for metric, value in self.whole.items()
        )
        table.caption = Text("; ".join([caption, *self._gaps()]))
        columns = {}
        for metric in self.values:
            direction = " ↓" if metric in self.distances else ""
            columns[f"{metric}{direction} ({self.routes[metric]})"] = self._cells(metric)
        if len(self.values) == 1:
            columns |= self._more_columns(next(iter(self.values)))
        for name in columns:
            table.add_column(Text(name))
        for layer, *cells in zip(self.layers_a, *columns.values(), strict=True):
            table.add_row(Text(layer), *map(Text, cells))
        return table if self.weights is None else Group(table, self.weights)

    def _gaps(self) -> Iterator[str]:
        """Report how many pairs are undefined for each metric, with the first reason."""
        for metric, values in self.values.items():
            missing = np.argwhere(np.isnan(values))
            if len(missing):
                a, b = self.layers_a[missing[0, 0]], self.layers_b[missing[0, 1]]
                reason = self.why(metric, a, b)
                yield f"{metric} is undefined for {len(missing)} of {values.size} pairs, first {a} -> {b}: {reason}"

    def _cells(self, metric: str) -> list[str]:
        """Return the best match of each layer of a with its value, and its p-value if the metric was tested.

        With several metrics, the value of the namesake follows if another layer matches.
        """
        cells, values = ["undefined"] * len(self.layers_a), self.values[metric]
        p_values = self.match_p_values(metric) if metric in self.tests else {}
        for i, j in self._best(metric, "a").items():
            layer, best = self.layers_a[i], self.layers_b[j]
            p_text = f"  p = {p_values[layer]:.3g}" if p_values else ""
            show_namesake = len(self.values) > 1 and layer != best and layer in self.layers_b
            namesake = f" ({layer} {rounded(values[i, self.layers_b.index(layer)])})" if show_namesake else ""
            cells[i] = f"{best}  {rounded(values[i, j])}{namesake}{p_text}"
        return cells

    def _more_columns(self, metric: str) -> dict[str, list[str]]:
        """Return the columns next to the best match of each layer of a: the runner-up and the namesake."""
        values, columns = self.values[metric], {}
        if len(self.layers_b) > 1:
            second = [order[1] if len(order) > 1 else None for order in self._ranked(metric)]
            columns["runner-up"] = [
                "" if j is None else f"{self.layers_b[j]}  {rounded(values[i, j])}" for i, j in enumerate(second)
            ]
        if self._namesakes:
            columns["namesake"] = [
                rounded(values[i, self.layers_b.index(layer)]) if layer in self.layers_b else ""
                for i, layer in enumerate(self.layers_a)
            ]
        return columns

    def _ranked(self, label: str) -> list[list[int]]:
        """Return the indices of the layers of b for each layer of a, the most similar first, without undefined ones."""
        better = -self.values[label] if label in self.distances else self.values[label]
        return [[int(j) for j in np.argsort(-row, kind="stable") if not np.isnan(row[j])] for row in better]

    @property
    def _namesakes(self) -> bool:
        """Whether a and b have equally many layers, and at least two of the same name."""
        return len(self.layers_a) == len(self.layers_b) and len(set(self.layers_a) & set(self.layers_b)) > 1

    def _depths(self, label: str) -> str:
        """Return how far best matches are away in relative depth, for sides with at least three layers."""
        best = self._best(label, "a")
        if min(self.values[label].shape) < 3 or not best:
            return ""
        of_a, of_b = (np.linspace(0, 1, size) for size in self.values[label].shape)
        rows = [*best]
        distance = np.abs(of_b[[*best.values()]] - of_a[rows]).mean()
        chance = np.abs(of_b[None] - of_a[rows, None]).mean()
        return f"; best matches are {distance:.2f} of the depth away on average (by chance {chance:.2f})"

    @property
    def _titles(self) -> tuple[str, str]:
        return titles_of(self.recipe.get("a") or {}, self.recipe.get("b") or {})

    def _stars(self, name: str, max_p: float) -> tuple[NDArray[np.bool_] | None, str]:
        """Return which pairs get a star (the fewer ones) and its meaning; ``None`` without a test."""
        if (test := self.tests.get(name)) is None:
            return None, ""
        significant = test.p_values <= max_p
        if significant.mean() > 0.5:
            return test.p_values > max_p, f"p > {max_p:g}: not beyond chance; the rest are"
        return significant, f"p ≤ {max_p:g}, adjusted for the search"

    def label(self, metric: str | None) -> str:
        """Return the label of a metric from its name, with or without options.

        Args:
            metric: Name of the metric, for example ``"linear_cka"``; ``None`` for the first of the atlas.
        """
        if metric is None:
            return next(iter(self.values))
        if metric in self.metrics:
            return metric
        name, options = options_in(metric)
        required_options = {f"{key}={value}" for key, value in options.items()}
        matching = []
        for label in self.metrics:
            metric_name, _, label_options = label.rstrip(")").partition("(")
            if metric_name == name and required_options <= set(label_options.split(", ")):
                matching.append(label)
        if len(matching) == 1:
            return matching[0]
        problem = ", which names several metrics" if matching else ""
        raise KeyError(f"metric must be one of {', '.join(self.metrics)}, got {metric!r}{problem}")

    def _of(self, metric: str | None) -> tuple[SimilarityAtlas, str]:
        """Return the atlas that contains a metric (this one or :attr:`weights`), and the label of the metric."""
        label = self.label(metric)
        return (self, label) if label in self.values or self.weights is None else (self.weights, label)

    def _test(self, label: str) -> MaximumTest:
        if label not in self.tests:
            raise ValueError("the atlas lacks a permutation test; run compare(…, permutations=200)")
        return self.tests[label]

    def _sides(self, axis: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (self.layers_a, self.layers_b) if axis == "a" else (self.layers_b, self.layers_a)

    def _best(self, label: str, axis: str) -> dict[int, int]:
        """Return the index of each layer of a side -> index of its best match, if defined."""
        values = self.values[label] if axis == "a" else self.values[label].T
        better = np.where(np.isnan(values), -np.inf, -values if label in self.distances else values)
        return {layer: int(row.argmax()) for layer, row in enumerate(better) if row.max() > -np.inf}


def pair_name(metric: str, layer_a: str, layer_b: str) -> str:
    """Return the key of a pair of layers in ``SimilarityAtlas.undefined``."""
    return f"{metric}: {layer_a} -> {layer_b}"
