"""Graph networks that the adapter can cut: networks of torch_geometric, and their wrapper with a fixed graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch_geometric import nn as geometric  # type: ignore[import-untyped]
from torch_geometric.nn.conv.gcn_conv import gcn_norm  # type: ignore[import-untyped]
from torch_geometric.nn.resolver import activation_resolver  # type: ignore[import-untyped]

from hf_stitch_graphs.graphs import Graph

Module = TypeVar("Module", bound=nn.Module)

CONVOLUTIONS: dict[str, Callable[[int], nn.Module]] = {
    "gat": lambda width: geometric.GATConv(width, width),
    "gcn": lambda width: geometric.GCNConv(width, width),
    "gin": lambda width: geometric.GINConv(nn.Linear(width, width)),
    "sage": lambda width: geometric.SAGEConv(width, width),
}
"""Kind -> convolution with equal input and output width."""
KINDS = (*CONVOLUTIONS, "gcn2")


class DeepGNN(nn.Module):
    """Network of a linear layer, many convolutions of equal width, and a linear layer.

    Moschella et al. (ICLR 2023) use these networks for their performance proxy. With ``gcn2`` it is GCNII (Chen et al.
    2020): each convolution also receives the output of the first layer, so that only the last convolution is not
    bypassed.

    Args:
        conv: Kind of the convolutions: ``gat``, ``gcn``, ``gcn2``, ``gin`` or ``sage``.
        in_channels: Number of features.
        hidden_channels: Width.
        num_layers: Number of convolutions.
        out_channels: Number of outputs.
        dropout: Probability of dropout before every layer.
        act: Name in torch_geometric of the activation after the first layer.
        conv_act: Activation after every convolution.
        alpha: Share of the first layer's output in each convolution (``gcn2`` only).
        theta: Strength of the weights of each convolution (``gcn2`` only).

    Example:
        >>> network = DeepGNN("gcn2", 5, 8, 4, out_channels=3)
        >>> network(torch.ones(2, 5), torch.tensor([[0, 1], [1, 0]])).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        conv: str,
        in_channels: int,
        hidden_channels: int,
        num_layers: int,
        out_channels: int,
        dropout: float = 0.0,
        act: str = "relu",
        conv_act: str = "relu",
        alpha: float = 0.1,
        theta: float = 0.5,
    ) -> None:
        super().__init__()
        if conv not in KINDS:
            raise ValueError(f"conv must be one of {', '.join(KINDS)}, got {conv!r}")
        self.has_residual = conv == "gcn2"
        self.dropout = nn.Dropout(dropout)
        self.first, self.act = nn.Linear(in_channels, hidden_channels), activation_resolver(act)
        self.convs = nn.ModuleList(
            geometric.GCN2Conv(hidden_channels, alpha, theta, layer + 1, normalize=False)
            if self.has_residual
            else CONVOLUTIONS[conv](hidden_channels)
            for layer in range(num_layers)
        )
        self.acts = nn.ModuleList(activation_resolver(conv_act) for _ in range(num_layers))
        self.last = nn.Linear(hidden_channels, out_channels)

    def embed(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return the activations after the last convolution, shape (nodes, hidden_channels)."""
        x = initial = self.act(self.first(self.dropout(x)))
        extra_arguments: tuple[Any, ...] = (edge_index,)
        if self.has_residual:
            extra_arguments = (initial, *gcn_norm(edge_index, num_nodes=len(x), add_self_loops=False, dtype=x.dtype))
        for conv, act in zip(self.convs, self.acts, strict=True):
            x = act(conv(self.dropout(x), *extra_arguments))
        return x

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return the outputs of the nodes of a graph.

        Args:
            x: Features, shape (nodes, in_channels).
            edge_index: Edges, shape (2, edges) int64.

        Returns:
            Tensor (nodes, out_channels).
        """
        output: Tensor = self.last(self.dropout(self.embed(x, edge_index)))
        return output


FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "DeepGNN": DeepGNN,
    "GAT": geometric.GAT,
    "GCN": geometric.GCN,
    "GIN": geometric.GIN,
    "GraphSAGE": geometric.GraphSAGE,
}
"""Name -> network class of :func:`create`."""
RECORD = "hf_stitch_blueprint"
"""Attribute of a network with the name of its class and its arguments."""


def create(name: str, **arguments: Any) -> nn.Module:
    """Create a network of torch_geometric that records its arguments, so that stitched models with it can be saved.

    Args:
        name: ``GCN``, ``GraphSAGE``, ``GIN`` or ``GAT`` of ``torch_geometric.nn``, or ``DeepGNN``.
        **arguments: Arguments of the class as JSON values, with activations and norms by name.

    Returns:
        The network with random weights.

    Raises:
        ValueError: If the class is unknown or does not accept the arguments.

    Example:
        >>> create("GCN", in_channels=5, hidden_channels=8, num_layers=2, out_channels=3)
        GCN(5, 3, num_layers=2)
    """
    if name not in FAMILIES:
        raise ValueError(f"name must be one of {', '.join(FAMILIES)}, got {name!r}")
    try:
        network = FAMILIES[name](**arguments)
    except TypeError as error:
        raise ValueError(f"{name} cannot be created: {error}") from error
    vars(network)[RECORD] = {"class": name, "arguments": arguments}
    return network


def record_of(network: nn.Module) -> dict[str, Any]:
    """Return the class and the arguments of a network.

    Args:
        network: A network from :func:`create`.

    Returns:
        ``class`` and ``arguments``.

    Raises:
        ValueError: If the network is not from :func:`create`.
    """
    class_name = type(network).__name__
    if not (record := vars(network).get(RECORD)):
        raise ValueError(
            f"this {class_name} cannot be rebuilt, because its arguments are unknown: create it with "
            f"hf_stitch_graphs.create({class_name!r}, …)"
        )
    return dict(record)


class Rows(nn.Module):
    """Identity on the features of all nodes, with a check that they match the graph in order.

    Args:
        graph: The graph.
    """

    marks: Tensor

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.register_buffer("marks", _marks(graph.x))

    def forward(self, x: Tensor) -> Tensor:
        """Return the features.

        Raises:
            ValueError: If the rows are not all nodes of the graph in order. Up to four rows are not checked.
        """
        nodes = len(self.marks)
        if len(x) > TRIAL and len(x) != nodes:
            raise ValueError(
                f"a batch must contain all {nodes} nodes of the graph in order, got {len(x)}: set batch_size={nodes} "
                "and pass all of graph.samples(), or use on_graph(network, graph.induced(nodes)) for a subset"
            )
        if len(x) == nodes:
            spread = self.marks.std().nan_to_num() + self.marks.abs().max() / 100
            if not bool(((_marks(x) - self.marks).abs() <= TOLERANCE * spread + 1e-6).all()):
                raise ValueError(
                    "rows of a batch must be the features of the network's graph in order: pass graph.samples(), or "
                    "use on_graph(network, graph) for a different graph"
                )
        return x


TRIAL = 4
"""Maximum number of rows of a trial batch."""
TOLERANCE = 0.1
"""Tolerance for rounding error of features, in standard deviations of their projection."""


def _marks(x: Tensor) -> Tensor:
    """Project the features of each node on one random direction."""
    direction = torch.randn(x.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (x.detach().double() @ direction.to(x.device)).float()


class NodeNetwork(nn.Module):
    """Network of the nodes of one graph, with the edges as part of the network.

    The input is the features of all nodes, a row per node in the order of the graph: a sample is a node, and a batch is
    the whole graph. Missing or reordered rows raise an error. Batches of up to four rows are trial batches, which
    hf-stitch runs to determine shapes: they run on a ring instead of the graph.

    Args:
        net: Network of torch_geometric with the arguments ``x`` (features) and ``edge_index`` (edges).
        graph: The graph with more than four nodes.

    Raises:
        ValueError: If the graph has too few nodes.

    Example:
        >>> ring = torch.arange(6)
        >>> graph = Graph(torch.eye(6), torch.stack([ring, ring.roll(1)]))
        >>> network = NodeNetwork(create("GCN", in_channels=6, hidden_channels=8, num_layers=2, out_channels=3), graph)
        >>> network(graph.x).shape
        torch.Size([6, 3])
    """

    edge_index: Tensor

    def __init__(self, net: nn.Module, graph: Graph) -> None:
        super().__init__()
        _check_size(graph)
        self.shape = (graph.x.shape[1],)
        self.rows, self.net = Rows(graph), net
        self.register_buffer("edge_index", graph.edge_index.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of all nodes.

        Args:
            x: Features, shape (nodes, features).

        Returns:
            The output of the network for each node.
        """
        edges = self.edge_index if len(x) > TRIAL else _ring(len(x), x.device)
        output: Tensor = self.net(self.rows(x), edges)
        return output

    @property
    def size(self) -> dict[str, int]:
        """Numbers of nodes, features and edges of the graph."""
        return {"nodes": len(self.rows.marks), "features": self.shape[0], "edges": self.edge_index.shape[1]}


def _ring(nodes: int, device: torch.device) -> Tensor:
    """Return the edges of a ring in both directions; an empty tensor for a single node."""
    positions = torch.arange(nodes, device=device)
    one_way = torch.stack([positions, positions.roll(1)])[:, : nodes if nodes > 1 else 0]
    return torch.cat([one_way, one_way.flip(0)], 1)


def _check_size(graph: Graph) -> None:
    if len(graph) <= TRIAL:
        raise ValueError(f"the graph must have more than {TRIAL} nodes, got {len(graph)}")


def on_graph(model: Module, graph: Graph) -> Module:
    """Copy networks of nodes to a different graph.

    Use this to score networks trained on the graph of training nodes on the separate graph of held-out nodes
    (:meth:`Graph.induced`).

    Args:
        model: A network of nodes, or a stitched model of two such networks. It is not changed.
        graph: The new graph, with the same number of features.

    Returns:
        A copy with the same weights.

    Raises:
        ValueError: If the model does not contain a network of nodes, the number of features differs, or the graph has
            too few nodes.

    Example:
        >>> ring = torch.arange(6)
        >>> graph = Graph(torch.eye(6), torch.stack([ring, ring.roll(1)]))
        >>> network = NodeNetwork(create("GCN", in_channels=6, hidden_channels=8, num_layers=2, out_channels=3), graph)
        >>> some = graph.induced(torch.arange(5))
        >>> on_graph(network, some)(some.x).shape
        torch.Size([5, 3])
    """
    _check_size(graph)
    copied = copy.deepcopy(model)
    networks = [module for module in copied.modules() if isinstance(module, NodeNetwork)]
    if not networks:
        raise ValueError(f"{type(model).__name__} must contain a NodeNetwork: create it with NodeNetwork(net, graph)")
    for network in networks:
        if network.shape != graph.x.shape[1:]:
            raise ValueError(f"the graph must have {network.shape[0]} features, got {graph.x.shape[1]}")
        network.edge_index = graph.edge_index.to(network.edge_index.device, copy=True)
        if isinstance(network.rows, Rows):  # the back half of a cut does not have it
            network.rows.marks = _marks(graph.x).to(network.rows.marks)
    return copied
