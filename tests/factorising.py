"""A rewrite for tests: linear layers become two, of which the first reduces the width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_stitch.adapters.rewriting import Rewrite


class Factorised(nn.Module):
    """The product of two matrices and a bias in place of a linear layer."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        like: dict[str, Any] = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.down = nn.Parameter(torch.empty(rank, linear.in_features, **like))
        self.up = nn.Parameter(torch.empty(linear.out_features, rank, **like))
        self.bias = linear.bias
        left, values, right = torch.linalg.svd(linear.weight.detach().float(), full_matrices=False)
        with torch.no_grad():
            self.down.copy_(right[:rank])
            self.up.copy_(left[:, :rank] * values[:rank])

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.linear(x, self.down), self.up, self.bias)


@dataclass(frozen=True)
class Factorise(Rewrite):
    """Factorises the linear layers whose names end with one of some texts."""

    name: ClassVar[str] = "factorise"
    rank: int
    ending: Sequence[str] = ("fc1", "fc2")

    def __post_init__(self) -> None:
        object.__setattr__(self, "ending", tuple(self.ending))

    def apply(self, model: nn.Module) -> None:
        found = [
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and name.endswith(tuple(self.ending))
        ]
        if not found:
            raise ValueError(f"the network has no linear layer with a name that ends with {' or '.join(self.ending)}")
        for name, module in found:
            model.set_submodule(name, Factorised(module, self.rank))
