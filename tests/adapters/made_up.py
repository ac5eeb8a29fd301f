"""A made-up family with an override for its example input and its blocks, which a trace does not find."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_stitch.adapters import Override
from hf_stitch.registry import registries


class MadeUp(nn.Module):
    """Two layers with a residual branch between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.second = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(self.second(x + self.branch(x)).relu())


@registries.overrides.register("MadeUp")
class ForMadeUp(Override):
    def example(self, model: nn.Module) -> dict[str, Tensor]:
        return {"x": torch.randn(2, 4)}

    def blocks(self, model: nn.Module) -> tuple[str, ...]:
        return ("first", "second")
