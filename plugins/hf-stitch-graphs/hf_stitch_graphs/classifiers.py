"""Networks for graph classification, and graphs as one padded tensor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch_geometric import nn as geometric  # type: ignore[import-untyped]

from hf_stitch_graphs.graphs import Graph

POOLS: dict[str, Callable[..., Tensor]] = {
    "add": geometric.global_add_pool,
    "max": geometric.global_max_pool,
    "mean": geometric.global_mean_pool,
}
"""Name -> pooling of the nodes of each graph."""


def dense(graphs: Sequence[Graph], nodes: int) -> Tensor:
    """Return graphs as one tensor with a row per graph, the input of a :class:`GraphClassifier`.

    Args:
        graphs: Graphs with equal numbers of features.
        nodes: Number of nodes of the largest graph. Smaller graphs are padded.

    Returns:
        Tensor (graphs, nodes, features + nodes + 1): the features of each node, its row of the adjacency matrix, and 1
        for nodes, 0 for padding.

    Raises:
        ValueError: If a graph has more nodes.

    Example:
        >>> graph = Graph(torch.ones(2, 3), torch.tensor([[0], [1]]))
        >>> dense([graph], 3)[0]
        tensor([[1., 1., 1., 0., 1., 0., 1.],
                [1., 1., 1., 0., 0., 0., 1.],
                [0., 0., 0., 0., 0., 0., 0.]])
    """
    if (largest := max(map(len, graphs))) > nodes:
        raise ValueError(f"nodes must be at least {largest}, the size of the largest graph, got {nodes}")
    features = graphs[0].x.shape[1]
    rows = graphs[0].x.new_zeros(len(graphs), nodes, features + nodes + 1)
    for row, graph in zip(rows, graphs, strict=True):
        row[: len(graph), :features] = graph.x
        row[graph.edge_index[0], features + graph.edge_index[1]] = 1
        row[: len(graph), -1] = 1
    return rows


class GraphEncoder(nn.Module):
    """Network of nodes with pooling of its outputs over each graph.

    Args:
        net: Network of torch_geometric with the arguments ``x`` (features) and ``edge_index`` (edges).
        features: Number of features of a node.
        pool: ``add``, ``max`` or ``mean``.
    """

    def __init__(self, net: nn.Module, features: int, pool: str) -> None:
        super().__init__()
        if pool not in POOLS:
            raise ValueError(f"pool must be one of {', '.join(POOLS)}, got {pool!r}")
        self.net, self.features, self.pool = net, features, pool

    def forward(self, graphs: Tensor) -> Tensor:
        """Return a vector for each graph.

        Args:
            graphs: Graphs from :func:`dense`.
        """
        nodes, is_node = graphs.shape[1], graphs[..., -1] > 0
        node_index = (is_node.flatten().cumsum(0) - 1).view(is_node.shape)
        adjacency = (graphs[..., self.features : -1] != 0) & is_node[:, :, None] & is_node[:, None, :]
        graph, source, target = adjacency.nonzero(as_tuple=True)
        edges = torch.stack([node_index[graph, source], node_index[graph, target]])
        outputs = self.net(graphs[..., : self.features][is_node], edges)
        batch = torch.arange(len(graphs), device=graphs.device)[:, None].expand(-1, nodes)[is_node]
        return POOLS[self.pool](outputs, batch, size=len(graphs))


class GraphClassifier(nn.Sequential):
    """Graph classifier: a network of nodes, pooling over each graph, and layers on the pooled vector.

    A sample is a graph as a tensor (:func:`dense`). The network can be cut after pooling and at later layers, but not
    between convolutions: such cuts would require the edges, which are part of the content.

    Args:
        net: Network of torch_geometric with the arguments ``x`` (features) and ``edge_index`` (edges).
        features: Number of features of a node.
        nodes: Number of nodes of the largest graph.
        width: Width of the network's outputs, and of the hidden layer.
        classes: Number of classes.
        pool: ``add``, ``max`` or ``mean``.

    Example:
        >>> from hf_stitch_graphs import create
        >>> network = create("GIN", in_channels=3, hidden_channels=8, num_layers=2)
        >>> classifier = GraphClassifier(network, features=3, nodes=4, width=8, classes=2)
        >>> classifier(dense([Graph(torch.ones(2, 3), torch.tensor([[0], [1]]))], 4)).shape
        torch.Size([1, 2])
    """

    def __init__(self, net: nn.Module, features: int, nodes: int, width: int, classes: int, pool: str = "mean") -> None:
        layers = {
            "pooled": GraphEncoder(net, features, pool), "hidden": nn.Linear(width, width), "act": nn.ReLU(),
            "logits": nn.Linear(width, classes),
        }  # fmt: skip
        super().__init__(OrderedDict(layers))
        self.arguments = {"features": features, "nodes": nodes, "width": width, "classes": classes, "pool": pool}
        self.shape = (nodes, features + nodes + 1)

    @property
    def encoder(self) -> GraphEncoder:
        """The network of nodes, with pooling."""
        encoder: GraphEncoder = self[0]  # type: ignore[assignment]
        return encoder

    def forward(self, graphs: Tensor) -> Tensor:
        """Return the logits of graphs.

        Args:
            graphs: Graphs from :func:`dense`.
        """
        logits: Tensor = super().forward(graphs)
        return logits
