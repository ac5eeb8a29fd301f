"""Rows and networks for the matchers that take rows without partners."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, ReLU, Sequential

import hf_stitch

CUT: dict[str, Any] = {"source_layer": "1", "target_layer": "1", "task": "image-classification", "progress": False}


def clustered(n: int = 800, width: int = 16, clusters: int = 12, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows in clusters, other rows of the same clusters after an orthogonal map, and the map."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(clusters, width, generator=g)
    x, y = (
        centres[torch.randint(clusters, (n,), generator=g)] + 0.2 * torch.randn(n, width, generator=g) for _ in "xy"
    )
    turn = torch.linalg.qr(torch.randn(width, width, generator=g)).Q
    return x, y @ turn, turn


def networks() -> tuple[Any, Any, Tensor]:
    """Two networks whose hidden units are those of each other in another order, and points in clusters."""
    torch.manual_seed(0)
    nets = [Sequential(Linear(6, 16), ReLU(), Linear(16, 3)).eval() for _ in "ab"]
    order = torch.randperm(16)
    with torch.no_grad():
        nets[1][0].weight.copy_(nets[0][0].weight[order])
        nets[1][0].bias.copy_(nets[0][0].bias[order])
        nets[1][2].weight.copy_(nets[0][2].weight[:, order])
        nets[1][2].bias.copy_(nets[0][2].bias)
    a, b = (hf_stitch.load(net, example_inputs=torch.randn(2, 6)) for net in nets)
    return a, b, clustered(900, 6)[0] * 2
