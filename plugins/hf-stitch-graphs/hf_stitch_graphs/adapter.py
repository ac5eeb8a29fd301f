"""Adapter for networks of torch_geometric."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from hf_stitch.adapters import Adapter, Described, Interface, Library
from hf_stitch.adapters.examples import ExampleError, named

if TYPE_CHECKING:
    from hf_stitch_graphs.classifiers import GraphClassifier
    from hf_stitch_graphs.networks import NodeNetwork

SAMPLES = 2
"""Number of random samples to find and verify cuts with."""


class TorchGeometricAdapter(Library):
    """Adapter for networks of torch_geometric on the nodes of a graph (``NodeNetwork``) and on graphs.

    Samples are the features of nodes (from ``Graph.samples``) or graphs (from ``dense``). A layer is a cut if no data
    bypasses it: every convolution of GCN, GraphSAGE, GIN and GAT without jumping knowledge, and only the last
    convolution of GCNII.
    """

    name: ClassVar[str] = "pyg"

    def serves(self, model: Any) -> bool:
        """Return whether the model is a network of nodes or graphs, or a part of such a network.

        Args:
            model: Object of any type.
        """
        if "torch_geometric" not in sys.modules:  # then such a network cannot exist
            return False
        from torch_geometric.nn.models.basic_gnn import BasicGNN  # type: ignore[import-untyped]

        from hf_stitch_graphs.classifiers import GraphClassifier
        from hf_stitch_graphs.networks import DeepGNN, NodeNetwork

        return isinstance(model, (NodeNetwork, GraphClassifier, BasicGNN, DeepGNN))

    def describe(
        self, model: Any, example_inputs: Any = None, processor: Any = None, content: str | None = None
    ) -> Described:
        """Describe a network.

        Args:
            model: The network.
            example_inputs: At most four samples to find and verify cuts. ``None`` (default): random features.
            processor: Function from one raw sample to its tensor. ``None`` (default): samples are tensors.
            content: Unused, because the network has one argument.

        Raises:
            ExampleError: If the network lacks a graph.
        """
        from hf_stitch_graphs.classifiers import GraphClassifier
        from hf_stitch_graphs.networks import NodeNetwork

        if not isinstance(model, (NodeNetwork, GraphClassifier)):
            raise ExampleError(
                f"{type(model).__name__} also requires edges: pass hf_stitch_graphs.NodeNetwork(net, graph) for nodes "
                "as samples, or hf_stitch_graphs.GraphClassifier(net, …) for graphs",
                model,
            )
        dtype = next(model.parameters()).dtype
        example = torch.randn(SAMPLES, *model.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        inputs = named(model, example if example_inputs is None else example_inputs, {})
        (name,) = inputs
        interface = Interface((name,), "tensor", {name: model.shape}, {name: str(dtype).removeprefix("torch.")})
        return Described(model, interface, inputs, processor)

    def task(self, adapter: Adapter) -> str | None:
        """Return the image classification task: stitched models of such networks return a vector of logits per sample.

        Args:
            adapter: The adapter of the network.
        """
        return "image-classification"

    def blueprint(self, model: nn.Module) -> dict[str, Any]:
        """Return the class and the arguments of the network, and the size of its graphs.

        Args:
            model: The network.

        Raises:
            ValueError: If the network is not from ``hf_stitch_graphs.create``.
        """
        from hf_stitch_graphs.networks import NodeNetwork, record_of

        net: NodeNetwork | GraphClassifier = model  # type: ignore[assignment]
        if isinstance(net, NodeNetwork):
            return {"net": record_of(net.net), "graph": net.size}
        return {"net": record_of(net.encoder.net), "classifier": net.arguments}

    def build(self, blueprint: Mapping[str, Any]) -> nn.Module:
        """Construct a network from a :meth:`blueprint`, with a graph of the right size.

        Args:
            blueprint: The result of :meth:`blueprint`.

        Returns:
            The network without trained weights; features and edges of its graph are 0.
        """
        from hf_stitch_graphs.classifiers import GraphClassifier
        from hf_stitch_graphs.graphs import Graph
        from hf_stitch_graphs.networks import NodeNetwork, create

        net = create(blueprint["net"]["class"], **blueprint["net"]["arguments"])
        if "classifier" in blueprint:
            return GraphClassifier(net, **blueprint["classifier"]).eval()
        size = blueprint["graph"]
        x, edges = torch.zeros(size["nodes"], size["features"]), torch.zeros(2, size["edges"], dtype=torch.int64)
        return NodeNetwork(net, Graph(x, edges)).eval()
