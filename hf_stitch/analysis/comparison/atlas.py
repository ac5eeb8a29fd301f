"""Results of :func:`hf_stitch.compare`: for each metric, a value for each pair of layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from hf_stitch.representation import Pooling
from hf_stitch.results import Result

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table


Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SimilarityAtlas(Result):
    """Similarity of each layer of a with each layer of b under one or more metrics, returned by :func:`compare`.

    Attributes:
        values: Metric -> (layers of a, layers of b) float64.
        layers_a: Names of the layers of a, the rows.
        layers_b: Names of the layers of b, the columns.
        n: Number of samples.
        pooling: The pooling.
        routes: Metric -> statistic it was computed from: ``moments``, ``grams``, ``features`` or ``minibatches``.
        distances: The metrics for which a lower value means more similar.
        recipe: Record for reproducing the comparison: both sides with hashes, data, metrics with options, batch size
            and versions.

    Raises:
        ValueError: If an option is out of its range.

    Example:
        >>> values = {"linear_cka": np.array([[0.9, 0.3], [0.2, 0.8]])}
        >>> routes = {"linear_cka": "moments"}
        >>> atlas = SimilarityAtlas(values, ("a0", "a1"), ("b0", "b1"), n=100, pooling="mean", routes=routes)
        >>> atlas["linear_cka"].shape
        (2, 2)
        >>> atlas.best_pair()
        ('a0', 'b0')
    """

    values: Mapping[str, Array]
    layers_a: tuple[str, ...]
    layers_b: tuple[str, ...]
    n: int
    pooling: Pooling
    routes: Mapping[str, str]
    distances: tuple[str, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the shapes of the values."""
        shape = (len(self.layers_a), len(self.layers_b))
        for metric, values in self.values.items():
            if values.shape != shape:
                raise ValueError(
                    f"values of {metric} must have the shape {shape}, (layers of a, layers of b), got {values.shape}"
                )

    def __getitem__(self, metric: str) -> Array:
        """Return the values of a metric, (layers of a, layers of b) float64, e.g. ``atlas["linear_cka"]``.

        Raises:
            KeyError: If the atlas does not contain the metric.
        """
        if metric not in self.values:
            raise KeyError(f"the atlas has no metric {metric!r}; it has {', '.join(self.values)}")
        return self.values[metric]

    def best_matches(self, metric: str | None = None, axis: Literal["a", "b"] = "a") -> dict[str, str]:
        """Find the most similar layer of the other side for each layer of one side.

        Args:
            metric: One of the metrics of the atlas; ``None`` uses the first.
            axis: The side whose layers are the keys of the result, ``"a"`` or ``"b"``.

        Returns:
            Layer of the side ``axis`` -> most similar layer of the other side.

        Raises:
            KeyError: If the atlas does not contain the metric.
            ValueError: If ``axis`` is not ``"a"`` or ``"b"``.

        Example:
            >>> atlas = SimilarityAtlas({"cka": np.eye(2)}, ("a0", "a1"), ("b0", "b1"), 9, "mean", {"cka": "moments"})
            >>> atlas.best_matches()
            {'a0': 'b0', 'a1': 'b1'}
        """
        if axis not in ("a", "b"):
            raise ValueError(f"axis must be 'a' or 'b', got {axis!r}")
        best = self._best(metric or next(iter(self.values)), axis)
        own, other = (self.layers_a, self.layers_b) if axis == "a" else (self.layers_b, self.layers_a)
        return {layer: other[place] for layer, place in zip(own, best, strict=True)}

    def best_pair(self, metric: str | None = None) -> tuple[str, str]:
        """Find the most similar pair of layers.

        Args:
            metric: One of the metrics of the atlas; ``None`` uses the first.

        Returns:
            The layer of a and the layer of b; the first pair in case of a tie.

        Raises:
            KeyError: If the atlas does not contain the metric.

        Example:
            >>> values = np.array([[0.2, 0.4], [0.9, 0.1]])
            >>> SimilarityAtlas({"cka": values}, ("a0", "a1"), ("b0", "b1"), 9, "mean", {"cka": "moments"}).best_pair()
            ('a1', 'b0')
        """
        name = metric or next(iter(self.values))
        place = self._best(name, "a")
        rows = np.arange(len(place))
        values = self[name][rows, place]
        a = int(values.argmin() if name in self.distances else values.argmax())
        return self.layers_a[a], self.layers_b[place[a]]

    def to_pandas(self) -> pandas.DataFrame:
        """Return the values in long format.

        Returns:
            One row per metric and pair of layers, with the columns ``metric``, ``layer_a``, ``layer_b`` and ``value``.
        """
        import pandas

        return pandas.DataFrame(
            [
                {"metric": metric, "layer_a": a, "layer_b": b, "value": float(values[i, j])}
                for metric, values in self.values.items()
                for i, a in enumerate(self.layers_a)
                for j, b in enumerate(self.layers_b)
            ]
        )

    def plot(self, metric: str | None = None) -> Figure:
        """Plot the values of a metric as a heat map, with a frame around the best match of each layer of a.

        Args:
            metric: One of the metrics of the atlas; ``None`` uses the first.

        Returns:
            The matplotlib figure.

        Raises:
            KeyError: If the atlas does not contain the metric.
        """
        from hf_stitch.plots import heatmap

        name = metric or next(iter(self.values))
        marked = np.zeros(self[name].shape, bool)
        marked[np.arange(len(self.layers_a)), self._best(name, "a")] = True
        title = f"{self.n} samples, pooling: {self.pooling}"
        return heatmap(self[name], self.layers_a, self.layers_b, title=title, label=name, marked=marked)

    def __rich__(self) -> Table:
        """Return the table that ``rich`` prints: the best match of each layer of a under each metric."""
        from rich.table import Table
        from rich.text import Text

        table = Table("layer of a", title=f"Best matches among {len(self.layers_b)} layers of b", title_justify="left")
        table.caption = f"{self.n} samples, pooling: {self.pooling}"
        best = {metric: self._best(metric, "a") for metric in self.values}
        for metric in self.values:
            table.add_column(Text(f"{metric} ({self.routes[metric]})"))
        for i, layer in enumerate(self.layers_a):
            cells = [f"{self.layers_b[best[m][i]]}  {values[i, best[m][i]]:.3f}" for m, values in self.values.items()]
            table.add_row(Text(layer), *map(Text, cells))
        return table

    def _best(self, metric: str, axis: str) -> NDArray[np.intp]:
        values = -self[metric] if metric in self.distances else self[metric]
        return values.argmax(1 if axis == "a" else 0)
