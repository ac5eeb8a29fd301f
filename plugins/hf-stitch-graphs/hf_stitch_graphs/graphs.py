"""Graphs: features, edges and labels of nodes, and a reader of citation graphs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_geometric.utils import subgraph  # type: ignore[import-untyped]

from hf_stitch import Samples

SPLITS = ("train", "val", "test")
"""The masks of the public splits."""


@dataclass(frozen=True, eq=False)
class Graph:
    """Graph with nodes as samples.

    Attributes:
        x: Features of the nodes, shape (nodes, features).
        edge_index: Edges from the first row to the second, shape (2, edges) int64; undirected edges in both directions.
        y: Classes of the nodes, shape (nodes,) int64; -1 for nodes without a label. ``None`` without labels.
        masks: Name of a split -> its nodes, shape (nodes,) bool.
        ids: Ids of the nodes in the original graph, shape (nodes,) int64. ``None``: their positions.

    Raises:
        ValueError: If the shapes do not agree, or an edge refers to an unknown node.

    Example:
        >>> graph = Graph(torch.eye(3), torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), torch.tensor([0, 1, 0]))
        >>> graph
        Graph(nodes=3, features=3, edges=4)
        >>> graph.samples()
        Samples(3 x tensor, 2 classes)
    """

    x: Tensor
    edge_index: Tensor
    y: Tensor | None = None
    masks: dict[str, Tensor] = field(default_factory=dict)
    ids: Tensor | None = None

    def __post_init__(self) -> None:
        """Check the shapes."""
        nodes, edges = len(self.x), self.edge_index
        if self.x.dim() != 2 or edges.dim() != 2 or len(edges) != 2:
            raise ValueError(
                "x must have shape (nodes, features) and edge_index shape (2, edges), got "
                f"{tuple(self.x.shape)} and {tuple(edges.shape)}"
            )
        if edges.numel() and not 0 <= int(edges.min()) <= int(edges.max()) < nodes:
            raise ValueError(f"edges must be from 0 to {nodes - 1}, got {int(edges.min())} to {int(edges.max())}")
        for name, values in {"y": self.y, "ids": self.ids, **self.masks}.items():
            if values is not None and values.shape != (nodes,):
                raise ValueError(f"{name} must have one value per node ({nodes}), got shape {tuple(values.shape)}")

    def __repr__(self) -> str:
        """Return the sizes."""
        return f"Graph(nodes={len(self.x)}, features={self.x.shape[1]}, edges={self.edge_index.shape[1]})"

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self.x)

    def samples(self) -> Samples:
        """Return the nodes as samples: features with label and id, in the order of the graph."""
        ids = range(len(self)) if self.ids is None else self.ids.tolist()
        return Samples.of(self.x, id=list(ids), label=None if self.y is None else self.y.tolist())

    def normalized(self) -> Graph:
        """Return the graph with features that sum to 1 at each node, like ``NormalizeFeatures`` of torch_geometric.

        All-zero features stay zero.

        Example:
            >>> Graph(torch.tensor([[1.0, 3.0]]), torch.empty(2, 0, dtype=torch.int64)).normalized().x
            tensor([[0.2500, 0.7500]])
        """
        return replace(self, x=self.x / self.x.sum(1, keepdim=True).clamp_min(1))

    def induced(self, nodes: Tensor) -> Graph:
        """Return the induced subgraph of nodes, with only the edges between them.

        Subgraphs of training nodes and of held-out nodes are not connected (the inductive protocol).

        Args:
            nodes: Positions of the nodes, shape (n,) int64, or a mask, shape (nodes,) bool. Their order is preserved.

        Raises:
            ValueError: If a node is repeated.

        Example:
            >>> graph = Graph(torch.eye(3), torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]))
            >>> graph.induced(torch.tensor([2, 1])).edge_index
            tensor([[1, 0],
                    [0, 1]])
        """
        nodes = nodes.nonzero()[:, 0] if nodes.dtype == torch.bool else nodes
        if len(nodes.unique()) < len(nodes):
            raise ValueError("nodes must not be repeated")
        edges, _ = subgraph(nodes, self.edge_index, num_nodes=len(self))
        new_index = torch.empty(len(self), dtype=torch.int64).scatter(0, nodes, torch.arange(len(nodes)))
        return Graph(
            self.x[nodes],
            new_index[edges],
            None if self.y is None else self.y[nodes],
            {name: mask[nodes] for name, mask in self.masks.items()},
            nodes if self.ids is None else self.ids[nodes],
        )


def read_planetoid(folder: str | Path, name: str) -> Graph:
    """Read a citation graph of Planetoid (Yang, Cohen & Salakhutdinov 2016) from an ``.npz`` file, without downloads.

    Args:
        folder: Folder of the files.
        name: ``cora`` or ``citeseer``: ``<name>.npz`` has the arrays ``x_data``, ``x_indices``, ``x_indptr`` and
            ``x_shape`` (sparse features), ``edge_index``, ``y``, ``has_label`` and ``<split>_mask``.

    Returns:
        The graph with unchanged features. Nodes without a label have the class -1.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If features of nodes are missing, as in an incomplete copy of PubMed.
    """
    path = Path(folder).expanduser() / f"{name}.npz"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; expected one file per graph, e.g. cora.npz, citeseer.npz")
    with np.load(path, allow_pickle=False) as arrays:
        if "has_x" in arrays.files and not arrays["has_x"].all():
            missing = int((~arrays["has_x"]).sum())
            raise ValueError(f"{path} lacks the features of {missing:,} of {len(arrays['has_x']):,} nodes")
        nodes, width = arrays["x_shape"].tolist()
        rows = np.repeat(np.arange(nodes), np.diff(arrays["x_indptr"]))
        x = torch.zeros(nodes, width)
        x[torch.from_numpy(rows), torch.from_numpy(arrays["x_indices"]).long()] = torch.from_numpy(arrays["x_data"])
        y = np.where(arrays["has_label"], arrays["y"], -1)
        masks = {split: torch.from_numpy(arrays[f"{split}_mask"]) for split in SPLITS}
        return Graph(x, torch.from_numpy(arrays["edge_index"]).long(), torch.from_numpy(y).long(), masks)
