"""Small atomized networks for the tests."""

from __future__ import annotations

import copy

import torch
from hf_stitch_filter_atoms import atomize
from torch import nn


def plain(seed: int = 0, width: int = 8) -> nn.Module:
    """A network of a 3×3, a grouped 5×3 and a 1×1 convolution."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, (5, 3), groups=2, stride=2), nn.ReLU(), nn.Conv2d(2 * width, 4, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    ).eval()  # fmt: skip


def pair(atoms: int | None = None, move: float = 0.5, seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """Two networks with equal coefficients and other atoms."""
    a = plain(seed)
    atomize(a, atoms)
    b = copy.deepcopy(a)
    with torch.no_grad():
        for name, parameter in b.named_parameters():
            if name.endswith("atoms"):
                parameter.add_(move * parameter.std(correction=0) * torch.randn_like(parameter))
    return a, b


def weight_cosines(a: nn.Module, b: nn.Module) -> dict[str, float]:
    """The cosine of the weights of each convolution, with atoms or without."""
    names = [name for name, module in a.named_modules() if isinstance(module, nn.Conv2d)]
    pairs = {name: [net.get_submodule(name).weight.detach().double().flatten() for net in (a, b)] for name in names}
    return {name: torch.cosine_similarity(*pair, 0).item() for name, pair in pairs.items()}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative distance of two tensors."""
    return ((a - b).norm() / b.norm()).item()
