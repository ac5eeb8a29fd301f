"""Graph networks of torch_geometric in hf-stitch; public names are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_stitch_graphs.adapter import TorchGeometricAdapter
    from hf_stitch_graphs.classifiers import GraphClassifier, dense
    from hf_stitch_graphs.graphs import Graph, read_planetoid
    from hf_stitch_graphs.networks import DeepGNN, NodeNetwork, create, on_graph

__all__ = [
    "DeepGNN",
    "Graph",
    "GraphClassifier",
    "NodeNetwork",
    "TorchGeometricAdapter",
    "create",
    "dense",
    "on_graph",
    "read_planetoid",
]

MODULES = {
    "Graph": "graphs",
    "GraphClassifier": "classifiers",
    "TorchGeometricAdapter": "adapter",
    "dense": "classifiers",
    "read_planetoid": "graphs",
}
"""Name -> module, if it is not ``networks``."""


def __getattr__(name: str) -> Any:
    """Import a name from its module on first use: hf-stitch imports the adapter for every live network."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES.get(name, 'networks')}"), name)
