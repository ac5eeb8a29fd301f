"""Small random graphs."""

from __future__ import annotations

import torch
from hf_stitch_graphs import Graph

FEATURES, CLASSES = 6, 3


def graph(nodes: int, seed: int = 0) -> Graph:
    """An undirected graph of some three edges per node."""
    random = torch.Generator().manual_seed(seed)
    edges = torch.randint(nodes, (2, 3 * nodes // 2), generator=random)
    x = torch.rand(nodes, FEATURES, generator=random)
    labels = torch.randint(CLASSES, (nodes,), generator=random)
    return Graph(x, torch.cat([edges, edges.flip(0)], 1).unique(dim=1), labels)
