"""Results of :func:`hf_stitch.compare_all`: all layers of several networks, compared with each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hf_stitch.analysis.comparison.atlas import SimilarityAtlas
from hf_stitch.analysis.identification import Identification, identify_layers
from hf_stitch.results import Result

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class NetworkAtlas(Result):
    """Similarity of all layers of several networks, returned by :func:`hf_stitch.compare_all`.

    Attributes:
        atlas: Similarity of each layer of each network with all others; layers are named ``network/layer``.
        layers: Network -> its layers.

    Raises:
        ValueError: If the layers are not those of the atlas.

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

    atlas: SimilarityAtlas
    layers: Mapping[str, tuple[str, ...]]

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
        """Return the similarity of the layers of two networks, as :func:`hf_stitch.compare` of both does.

        Args:
            a: Name of the first network, whose layers are the rows.
            b: Name of the second network.

        Raises:
            KeyError: If there is no such network.
        """
        rows, columns = self._place(a), self._place(b)
        networks = self.atlas.recipe.get("a", {}).get("networks", {})
        recipe = {**self.atlas.recipe, "a": networks.get(a, {}), "b": networks.get(b, {})}
        return replace(
            self.atlas,
            values={metric: values[rows, columns] for metric, values in self.atlas.values.items()},
            layers_a=self.layers[a],
            layers_b=self.layers[b],
            recipe=recipe,
        )

    def similarities(self, metric: str | None = None) -> Array:
        """Compute the similarity of each pair of networks.

        It is the mean over the layers of one network of the value of the most similar layer of the other, averaged over
        both directions.

        Args:
            metric: One of the metrics of the atlas; ``None`` uses the first.

        Returns:
            (networks, networks) float64, symmetric; of distances, if the metric is a distance.

        Raises:
            KeyError: If the atlas does not contain the metric.
        """
        values = self.atlas.values[self.atlas.label(metric)]
        best = np.min if self._is_distance(metric) else np.max
        places = [self._place(name) for name in self.networks]
        found = [[best(values[a, b], axis=1).mean() for b in places] for a in places]
        return (np.array(found) + np.array(found).T) / 2

    def distances(self, metric: str | None = None) -> Array:
        """Compute a distance between each pair of networks, for a dendrogram or a map.

        Args:
            metric: One of the metrics of the atlas; ``None`` uses the first.

        Returns:
            (networks, networks) float64, 0 on the diagonal: :meth:`similarities` of a distance, and the largest value
            of a similarity minus its value otherwise.

        Raises:
            KeyError: If the atlas does not contain the metric.
        """
        found = self.similarities(metric)
        found = found if self._is_distance(metric) else found.max() - found
        np.fill_diagonal(found, 0)
        return found

    def identify(self, metric: str | None = None) -> Identification:
        """Measure how often the most similar layer of another network is the corresponding layer.

        Args:
            metric: One of the metrics of the atlas; ``None`` uses the first.

        Returns:
            The layer identification over all pairs of networks (:func:`hf_stitch.analysis.identify_layers`).

        Raises:
            KeyError: If the atlas does not contain the metric.
            ValueError: If the networks have different numbers of layers.
        """
        values = self.atlas.values[self.atlas.label(metric)]
        names = self.networks
        pairs = {(a, b): values[self._place(a), self._place(b)] for i, a in enumerate(names) for b in names[i + 1 :]}
        return identify_layers(
            pairs, higher_is_better=not self._is_distance(metric), layers=next(iter(self.layers.values()))
        )

    def to_pandas(self) -> pandas.DataFrame:
        """Return the values in long format.

        Returns:
            One row per metric and pair of layers, with the columns ``metric``, ``network_a``, ``layer_a``,
            ``network_b``, ``layer_b`` and ``value``.
        """
        frame = self.atlas.to_pandas()
        for side in "ab":
            parts = [(name, layer) for name, layers in self.layers.items() for layer in layers]
            place = dict(zip(self.atlas.layers_a, parts, strict=True))
            frame[f"network_{side}"] = [place[name][0] for name in frame[f"layer_{side}"]]
            frame[f"layer_{side}"] = [place[name][1] for name in frame[f"layer_{side}"]]
        return frame[["metric", "network_a", "layer_a", "network_b", "layer_b", "value"]]

    def plot(self, metric: str | None = None) -> Figure:
        """Plot all layers of all networks as a heat map, in blocks of networks.

        Args:
            metric: One of the metrics of the atlas; ``None`` uses the first.

        Returns:
            The matplotlib figure.

        Raises:
            KeyError: If the atlas does not contain the metric.
        """
        return self.atlas.plot(metric)

    def plot_dendrogram(self, metric: str | None = None) -> Figure:
        """Plot a dendrogram of the networks by :meth:`distances` (average linkage).

        Args:
            metric: One of the metrics of the atlas; ``None`` uses the first.

        Returns:
            The matplotlib figure.
        """
        from hf_stitch.plots import dendrogram

        return dendrogram(self.distances(metric), self.networks, label=self._label(metric))

    def plot_map(self, metric: str | None = None) -> Figure:
        """Plot the networks as points in the plane, so that their distances are close to :meth:`distances`.

        Args:
            metric: One of the metrics of the atlas; ``None`` uses the first.

        Returns:
            The matplotlib figure.
        """
        from hf_stitch.plots import distance_map

        return distance_map(self.distances(metric), self.networks, label=self._label(metric))

    def __rich__(self) -> Table:
        """Return the table that ``rich`` prints: the similarity of each pair of networks."""
        from rich.table import Table
        from rich.text import Text

        metric = next(iter(self.atlas.values))
        table = Table("", title=f"{metric} of the most similar layers", title_justify="left")
        table.caption = f"{self.atlas.n} samples, pooling: {self.atlas.pooling}"
        for name in self.networks:
            table.add_column(Text(name))
        for name, row in zip(self.networks, self.similarities(), strict=True):
            table.add_row(Text(name), *(f"{value:.3f}" for value in row))
        return table

    def _place(self, network: str) -> slice:
        if network not in self.layers:
            raise KeyError(f"there is no network {network!r}; there are {', '.join(self.networks)}")
        start = 0
        for name, layers in self.layers.items():
            if name == network:
                return slice(start, start + len(layers))
            start += len(layers)
        raise AssertionError(network)

    def _is_distance(self, metric: str | None) -> bool:
        return self.atlas.label(metric) in self.atlas.distances

    def _label(self, metric: str | None) -> str:
        return f"distance by {self.atlas.label(metric)}"
