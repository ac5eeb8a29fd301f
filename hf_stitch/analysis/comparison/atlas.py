"""The result of a comparison: for every metric a value for each pair of layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from hf_stitch.analysis.comparison.routes import as_text
from hf_stitch.processes import Processes
from hf_stitch.representation import RowsPolicy

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure
    from rich.table import Table


Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SimilarityAtlas:
    """What :func:`compare` found: for every metric a value for each pair of layers.

    Attributes:
        values: By metric ``(layers of a, layers of b)``, float64.
        layers_a: What the rows are called.
        layers_b: What the columns are called.
        n: Number of samples.
        rows: The rows policy.
        routes: By metric, what it was computed from: ``moments``, ``grams``, ``features`` or ``minibatches``.
        distances: Those of the metrics of which less is more alike.
        recipe: What it takes to do it again: both sides with hashes, data, metrics with options, batch size, versions.
    """

    values: Mapping[str, Array]
    layers_a: tuple[str, ...]
    layers_b: tuple[str, ...]
    n: int
    rows: RowsPolicy
    routes: Mapping[str, str]
    distances: tuple[str, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, metric: str) -> Array:
        """The values of a metric: ``atlas["linear_cka"]``.

        Raises:
            KeyError: If the atlas has no such metric.
        """
        if metric not in self.values:
            raise KeyError(f"the atlas has no metric {metric!r}; it has {', '.join(self.values)}")
        return self.values[metric]

    def best_matches(self, metric: str | None = None, axis: Literal["a", "b"] = "a") -> dict[str, str]:
        """For each layer of one side the layer of the other that is most alike, by a metric (default: the first).

        Args:
            metric: One of the metrics of the atlas.
            axis: The side whose layers are looked up.

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

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each metric and pair of layers: ``metric``, ``layer_a``, ``layer_b``, ``value``."""
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
        """The values of a metric (default: the first) as a heat map; for each layer of a the best match is framed."""
        from hf_stitch.plots import heatmap

        name = metric or next(iter(self.values))
        marked = np.zeros(self[name].shape, bool)
        marked[np.arange(len(self.layers_a)), self._best(name, "a")] = True
        title = f"{self.n} samples, rows: {self.rows}"
        return heatmap(self[name], self.layers_a, self.layers_b, title=title, label=name, marked=marked)

    def save(self, folder: str | Path) -> None:
        """Write ``atlas.json`` and ``values.npz`` into a folder; of several processes, the first one does."""
        if Processes.of(None).rank:
            return
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        record = {
            "metrics": list(self.values), "layers_a": self.layers_a, "layers_b": self.layers_b, "n": self.n,
            "rows": self.rows, "routes": dict(self.routes), "distances": self.distances, "recipe": dict(self.recipe),
        }  # fmt: skip
        np.savez(folder / "values.npz", **{str(i): values for i, values in enumerate(self.values.values())})  # type: ignore[arg-type]
        (folder / "atlas.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> SimilarityAtlas:
        """Read what :meth:`save` wrote.

        Raises:
            FileNotFoundError: If there is no atlas in the folder.
            ValueError: If the files lack something, hold something else beside, or do not fit together.
        """
        folder = Path(folder)
        record = json.loads((folder / "atlas.json").read_text(encoding="utf-8"))
        names = {"metrics", "layers_a", "layers_b", "n", "rows", "routes", "distances", "recipe"}
        if record.keys() != names:
            raise ValueError(f"{folder / 'atlas.json'} must have the keys {sorted(names)}, got {sorted(record)}")
        metrics = record.pop("metrics")
        for key in ("layers_a", "layers_b", "distances"):
            record[key] = tuple(record[key])
        shape = (len(record["layers_a"]), len(record["layers_b"]))
        with np.load(folder / "values.npz") as arrays:
            values = {name: arrays[str(i)] for i, name in enumerate(metrics) if str(i) in arrays}
            if len(arrays) != len(metrics) or any(v.shape != shape or v.dtype != np.float64 for v in values.values()):
                raise ValueError(f"{folder / 'values.npz'} must hold {len(metrics)} float64 arrays of shape {shape}")
        return cls(values=values, **record)

    def __rich__(self) -> Table:
        """The table that ``rich`` prints: for each layer of a its best match, by every metric."""
        from rich.table import Table
        from rich.text import Text

        table = Table("layer of a", title=f"Best matches among {len(self.layers_b)} layers of b", title_justify="left")
        table.caption = f"{self.n} samples, rows: {self.rows}"
        best = {metric: self._best(metric, "a") for metric in self.values}
        for metric in self.values:
            table.add_column(Text(f"{metric} ({self.routes[metric]})"))
        for i, layer in enumerate(self.layers_a):
            cells = [f"{self.layers_b[best[m][i]]}  {values[i, best[m][i]]:.3f}" for m, values in self.values.items()]
            table.add_row(Text(layer), *map(Text, cells))
        return table

    def __str__(self) -> str:
        """The table as text."""
        return as_text(self)

    def _best(self, metric: str, axis: str) -> NDArray[np.intp]:
        values = -self[metric] if metric in self.distances else self[metric]
        return values.argmax(1 if axis == "a" else 0)
