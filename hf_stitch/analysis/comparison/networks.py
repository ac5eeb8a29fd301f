"""Results of :func:`hf_stitch.compare_all`: all layers of several networks, compared with each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from hf_stitch.analysis.comparison.atlas import WHOLE, SimilarityAtlas, pair_name
from hf_stitch.analysis.identification import Identification, identify_layers
from hf_stitch.analysis.resampling import not_rejected
from hf_stitch.printing import rounded
from hf_stitch.results import Result

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class NetworkAtlas(Result):
    """Similarity of all layers of several networks, returned by :func:`hf_stitch.compare_all`.

    Methods accept the name of a metric, with or without options; the default is the first metric.

    Attributes:
        atlas: Similarity of all pairs of layers of all networks; layers are named ``network/layer``.
        layers: Network -> its layers.
        p_values: Metric -> (2, layers, layers) float64: for the pairs of different networks (a before b), p-values of
            the differences from the most similar layer, by a jackknife over samples. First, of each layer of b from the
            best one for the same layer of a; second, with a and b exchanged. NaN if the corresponding layer is the
            best. Empty without ``compare_all(…, resamples=…)``.
        whole: Metric of weights -> (networks, networks) float64, the values of the networks as a whole; NaN for
            networks that are not comparable in all layers.

    Example:
        >>> values = {"linear_cka": np.array([[1.0, 0.4, 0.8, 0.3], [0.4, 1.0, 0.2, 0.9],
        ...                                   [0.8, 0.2, 1.0, 0.5], [0.3, 0.9, 0.5, 1.0]])}
        >>> names = ("a/0", "a/1", "b/0", "b/1")
        >>> flat = SimilarityAtlas(values, names, names, 100, "mean", {"linear_cka": "moments"})
        >>> found = NetworkAtlas(flat, {"a": ("0", "1"), "b": ("0", "1")})
        >>> found.between("a", "b")["linear_cka"].tolist()
        [[0.8, 0.3], [0.2, 0.9]]
        >>> round(found.similarities()[0, 1].item(), 2)
        0.85
    """

    page: ClassVar[str] = "hf_stitch.reports.similarity:networks_section"

    atlas: SimilarityAtlas
    layers: Mapping[str, tuple[str, ...]]
    p_values: Mapping[str, Array] = field(default_factory=dict)
    whole: Mapping[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the names of the layers."""
        names = tuple(f"{name}/{layer}" for name, layers in self.layers.items() for layer in layers)
        if not names == self.atlas.layers_a == self.atlas.layers_b:
            raise ValueError(f"the atlas must have the layers {', '.join(names)} on both sides")

    @property
    def networks(self) -> tuple[str, ...]:
        """Names of the networks."""
        return tuple(self.layers)

    def between(self, a: str, b: str) -> SimilarityAtlas:
        """Return the similarity of the layers of two networks, as from :func:`hf_stitch.compare`."""
        rows, columns = self._block(a), self._block(b)
        both = self.networks.index(a), self.networks.index(b)
        networks = self.atlas.recipe.get("a", {}).get("networks", {})
        recipe = {**self.atlas.recipe, "a": networks.get(a, {}), "b": networks.get(b, {})}
        undefined = {
            pair_name(metric, layer_a, layer_b): reason
            for metric in self.atlas.values
            for layer_a in (*self.layers[a], WHOLE)
            for layer_b in (*self.layers[b], WHOLE)
            if (reason := self.atlas.why(metric, f"{a}/{layer_a}", f"{b}/{layer_b}")) is not None
        }
        return replace(
            self.atlas,
            values={metric: values[rows, columns] for metric, values in self.atlas.values.items()},
            layers_a=self.layers[a],
            layers_b=self.layers[b],
            recipe=recipe,
            sizes={
                side: {layer: sizes[f"{name}/{layer}"] for layer in self.layers[name]}
                for side, name in (("a", a), ("b", b))
                if (sizes := self.atlas.sizes.get("a", {}))
            },
            undefined=undefined,
            whole={metric: float(values[both]) for metric, values in self.whole.items() if not np.isnan(values[both])},
        )

    def similarities(self, metric: str | None = None) -> Array:
        """Compute the similarity of each pair of networks.

        For each layer of one network, take the value of the most similar layer of the second network; average over the
        layers and both directions. Undefined pairs of layers are left out. A metric of weights has separate values for
        whole networks (:attr:`whole`).

        Returns:
            (networks, networks) float64, symmetric; distances if the metric is a distance. NaN for networks without a
            defined pair of layers.
        """
        label = self.atlas.label(metric)
        if label in self.whole:
            return self.whole[label].copy()
        values = self.atlas.values[label]
        blocks = [self._block(name) for name in self.networks]
        best = np.array([[self._best(values[a, b], metric) for b in blocks] for a in blocks])
        return (best + best.T) / 2

    def distances(self, metric: str | None = None) -> Array:
        """Compute a distance between each pair of networks, for a dendrogram or a map.

        Returns:
            (networks, networks) float64, 0 on the diagonal: :meth:`similarities` if the metric is a distance, otherwise
            the largest similarity minus the similarity.
        """
        distances = self.similarities(metric)
        if np.isnan(distances).any():
            a, b = (self.networks[place] for place in np.argwhere(np.isnan(distances))[0])
            if (label := self.atlas.label(metric)) in self.whole:
                reason = self.atlas.why(label, f"{a}/{WHOLE}", f"{b}/{WHOLE}")
                raise ValueError(f"{label} is undefined for the whole networks {a!r} and {b!r}: {reason}")
            raise ValueError(
                f"{self.atlas.label(metric)} is undefined for all pairs of layers of {a!r} and {b!r}; use another "
                "metric or other networks"
            )
        distances = distances if self._is_distance(metric) else distances.max() - distances
        np.fill_diagonal(distances, 0)
        return distances

    def identify(self, metric: str | None = None, *, level: float = 0.05) -> Identification:
        """Measure how often the most similar layer of another network is the corresponding layer.

        Layer i of one network corresponds to layer i of another. With ``compare_all(…, resamples=…)``, ties are
        corresponding layers that the samples do not distinguish from the most similar one; otherwise equal values.

        Args:
            metric: Name of the metric.
            level: Level of the tests of differences from the most similar layer, together for all candidates of a layer
                (Holm 1979).
        """
        label = self.atlas.label(metric)
        pairs = list(combinations(self.networks, 2))
        blocks = {(a, b): (self._block(a), self._block(b)) for a, b in pairs}
        as_good = None
        if label in self.p_values:
            p_values_of = {pair: self.p_values[label][:, rows, columns] for pair, (rows, columns) in blocks.items()}
            as_good = {
                pair: np.stack([not_rejected(p_values[0], level), not_rejected(p_values[1].T, level).T])
                for pair, p_values in p_values_of.items()
            }
        return identify_layers(
            {pair: self.atlas.values[label][block] for pair, block in blocks.items()},
            higher_is_better=not self._is_distance(metric), as_good=as_good, layers=next(iter(self.layers.values())),
        )  # fmt: skip

    def best_matches(self, metric: str | None = None) -> dict[str, str]:
        """Find the most similar layer of another network for each layer, named ``network/layer``."""
        label = self.atlas.label(metric)
        values = self.atlas.values[label].copy()
        for block in map(self._block, self.networks):
            values[block, block] = np.nan
        return replace(self.atlas, values={label: values}).best_matches(label)

    def headline(self, metric: str | None = None) -> str:
        """Return the main finding as a sentence: the most and least similar networks, and how many layers match."""
        label, similarities = self.atlas.label(metric), self.similarities(metric)
        pairs = [
            (similarities[a, b], f"{self.networks[a]} and {self.networks[b]} ({rounded(similarities[a, b])})")
            for a, b in combinations(range(len(self.networks)), 2)
            if not np.isnan(similarities[a, b])
        ]
        if not pairs:
            return f"{label} is undefined for all pairs of networks"
        pairs.sort(key=lambda pair: pair[0] if self._is_distance(metric) else -pair[0])
        text = f"The most similar networks by {label} are {pairs[0][1]}"
        text += f", the least similar {pairs[-1][1]}" if len(pairs) > 1 else ""
        if len({len(layers) for layers in self.layers.values()}) > 1 or len(self.layers[self.networks[0]]) < 2:
            return text
        identified = self.identify(metric)
        hits = sum(int(flags.sum()) for flags in identified.hits.values())
        defined = sum(int((counts > 0).sum()) for counts in identified.candidates.values())
        return text + (
            f"; {hits} of {defined} layers match the corresponding layer of another network, and "
            f"{identified.chance * defined:.3g} of {defined} are expected by chance"
        )

    def to_pandas(self) -> pandas.DataFrame:
        """Return the values in long format.

        Returns one row per metric and pair of layers, with the columns ``metric``, ``network_a``, ``layer_a``,
        ``network_b``, ``layer_b`` and ``value``, and ``undefined`` (the reason, or None) if a pair is undefined.
        """
        frame = self.atlas.to_pandas()
        for side in "ab":
            network_and_layer = [(name, layer) for name, layers in self.layers.items() for layer in layers]
            split_name = dict(zip(self.atlas.layers_a, network_and_layer, strict=True))
            frame[f"network_{side}"] = [split_name[name][0] for name in frame[f"layer_{side}"]]
            frame[f"layer_{side}"] = [split_name[name][1] for name in frame[f"layer_{side}"]]
        columns = ["metric", "network_a", "layer_a", "network_b", "layer_b", "value"]
        return frame[columns + [name for name in frame if name == "undefined"]]

    def plot(self, metric: str | None = None) -> Figure:
        """Plot all layers of all networks as a heat map, with a frame around best matches in other networks."""
        return self.atlas._heatmap(self.atlas.label(metric), self.best_matches(metric), "best match in another network")

    def __rich__(self) -> Table:
        """Return the table that ``rich`` prints: the similarity of each pair of networks."""
        from rich.table import Table
        from rich.text import Text

        metric = next(iter(self.atlas.values))
        compared = "whole networks" if metric in self.whole else "the most similar layers"
        table = Table("", title=f"{metric} of {compared}", title_justify="left")
        table.caption = self.atlas.basis
        if missing := int(np.isnan(self.atlas.values[metric]).sum()):
            table.caption += f"; undefined for {missing} of {self.atlas.values[metric].size} pairs of layers"
        for name in self.networks:
            table.add_column(Text(name))
        for name, row in zip(self.networks, self.similarities(), strict=True):
            table.add_row(Text(name), *map(rounded, row))
        return table

    def _block(self, network: str) -> slice:
        if network not in self.layers:
            raise KeyError(f"network must be one of {', '.join(self.networks)}, got {network!r}")
        start = sum(len(self.layers[name]) for name in self.networks[: self.networks.index(network)])
        return slice(start, start + len(self.layers[network]))

    def _is_distance(self, metric: str | None) -> bool:
        return self.atlas.label(metric) in self.atlas.distances

    def _best(self, values: Array, metric: str | None) -> float:
        """Return the mean of the best values of all rows; NaN if all values are NaN."""
        defined = values[~np.isnan(values).all(1)]
        best = np.nanmin if self._is_distance(metric) else np.nanmax
        return float(best(defined, axis=1).mean()) if len(defined) else np.nan
