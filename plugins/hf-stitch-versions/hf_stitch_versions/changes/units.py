"""Layers of hidden units: units between two weights that nothing else reads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

NO_UNITS = re.compile(r"attn|attention|downsample|shortcut", re.IGNORECASE)
"""Names of weights without hidden units: attention heads tie their units, shortcuts bypass a block."""


@dataclass(frozen=True)
class Layer:
    """A layer of hidden units: rows of the weights before it, columns of the weight after it.

    ``reads`` and ``writes`` name the channels of these weights. Channels without a name (colours, pixels, positions,
    classes) have the same order in all networks.
    """

    block: str
    before: tuple[str, ...]
    after: str
    units: int
    reads: str = ""
    writes: str = ""

    def weights(self, weights: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the weights of the units, (units, channels, places in a kernel): before, then after."""
        before = [part for name in self.before for part in weights[name].split(self.units)]
        unit_weights = (*before, weights[self.after].transpose(0, 1))
        return [x.detach().cpu().float().reshape(*x.shape[:2], -1) for x in unit_weights]

    def own(self, weights: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the weights that count for this layer: without the last one if the next layer starts with it."""
        return self.weights(weights)[: -1 if self.writes.startswith("units") else None]


def layers(a: Mapping[str, Tensor], b: Mapping[str, Tensor], blocks: Sequence[str]) -> list[Layer]:
    """Find the layers of hidden units in each block, or along the whole network if blocks lack them."""
    shared = {name: x for name, x in a.items() if x.dim() in (2, 4) and x.shape[1] > 1 and name in b}
    names = [name for name, x in shared.items() if x.shape == b[name].shape and not NO_UNITS.search(name)]
    hidden_layers: list[Layer] = []
    for block in blocks:
        inside = [name for name in names if name.startswith(f"{block}.")]
        links = list(_along(a, inside, block))  # layers as wide as the input of the block may be its residual stream
        hidden_layers += [link for link in links if link.units != a[inside[0]].shape[1]] or links
    streams = {layer.units for layer in hidden_layers}.union(*(x.shape[:2] for x in list(shared.values())[:1]))
    return _named(a, hidden_layers, streams) if hidden_layers else _named(a, list(_along(a, names, "")), set())


def _along(a: Mapping[str, Tensor], names: Sequence[str], block: str) -> Iterator[Layer]:
    """Yield a layer where a weight reads as many units as the previous weight, or its gate, writes."""
    for i, after in enumerate(names[1:], 1):
        (outputs, inputs), units = a[names[i - 1]].shape[:2], a[after].shape[1]
        if outputs == units or (outputs == 2 * units and a[after].dim() == 2):
            gated = i > 1 and a[names[i - 2]].shape == a[names[i - 1]].shape and outputs != inputs
            yield Layer(block or names[i - 1].rpartition(".")[0], tuple(names[i - 1 - gated : i]), after, units)


def _named(a: Mapping[str, Tensor], hidden_layers: Sequence[Layer], streams: set[int]) -> list[Layer]:
    """Name the channels of layers: units of the adjacent layer, or a residual stream of one of these sizes."""
    units = {layer.before[-1]: f"units before {layer.after}" for layer in hidden_layers}
    units_read = {layer.after: f"units before {layer.after}" for layer in hidden_layers}

    def stream(size: int) -> str:
        return f"stream of {size}" if size in streams else ""

    return [
        replace(
            layer,
            reads=units_read.get(layer.before[0]) or stream(a[layer.before[0]].shape[1]),
            writes=units.get(layer.after) or stream(len(a[layer.after])),
        )
        for layer in hidden_layers
    ]
