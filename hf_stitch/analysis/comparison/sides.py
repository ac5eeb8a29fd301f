"""The sides of a comparison: a network with its samples, several networks, or saved activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from torch import nn

from hf_stitch.adapters import Adapter
from hf_stitch.adapters.base import LayerCallback
from hf_stitch.data import Id, Samples
from hf_stitch.representation import Representation


class Side(Protocol):
    """Interface of one side of a comparison: activations of ordered samples, layer by layer."""

    @property
    def ids(self) -> Sequence[Id]:
        """The id of every sample, in order."""

    @property
    def layers(self) -> Sequence[str]:
        """The layers that are compared by default."""

    def run_with_callback(self, start: int, stop: int, layers: Sequence[str], callback: LayerCallback) -> None:
        """Call ``callback`` once per layer with the activations of the samples from ``start`` to ``stop``."""

    def describe(self) -> dict[str, Any]:
        """Return a record that identifies this side, as JSON values."""


class Reader:
    """Reader of raw samples. A batch that both sides request is read once."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples
        self.read = lru_cache(maxsize=1)(self._read)

    def _read(self, start: int, stop: int) -> list[Any]:
        (batch,) = self.samples.select(range(start, stop)).batches(stop - start)
        return batch.samples


class Network:
    """A network with its samples as one side of a comparison."""

    def __init__(self, adapter: Adapter, reader: Reader) -> None:
        self.adapter, self.reader = adapter, reader

    @property
    def ids(self) -> Sequence[Id]:
        """The id of every sample, in order."""
        return self.reader.samples.ids

    @property
    def layers(self) -> Sequence[str]:
        """The default layers of the network."""
        return self.adapter.candidates

    def run_with_callback(self, start: int, stop: int, layers: Sequence[str], callback: LayerCallback) -> None:
        """Run the network once on the samples from ``start`` to ``stop``."""
        self.adapter.run_with_callback(self.adapter.preprocess(self.reader.read(start, stop)), layers, callback)

    def describe(self) -> dict[str, Any]:
        """Return the reference with the hash of the weights, the class, and the fingerprint of the samples."""
        return {
            "reference": self.adapter.pinned.to_dict(),
            "class": type(self.adapter.model).__name__,
            "data": self.reader.samples.fingerprint,
        }


class Networks:
    """Several networks or saved activations as a single side, which is compared with itself.

    The layers are named ``network/layer``. Each network runs once per batch.
    """

    def __init__(self, sides: Mapping[str, Side], layers: Mapping[str, Sequence[str]] | None = None) -> None:
        self.sides = sides
        self._layers = {name: tuple((layers or {}).get(name) or side.layers) for name, side in sides.items()}

    @property
    def ids(self) -> Sequence[Id]:
        """The id of every sample, in order."""
        return next(iter(self.sides.values())).ids

    @property
    def layers(self) -> Sequence[str]:
        """The layers of all networks."""
        return [f"{name}/{layer}" for name, layers in self._layers.items() for layer in layers]

    @property
    def by_network(self) -> dict[str, tuple[str, ...]]:
        """The layers of each network."""
        return self._layers

    def run_with_callback(self, start: int, stop: int, layers: Sequence[str], callback: LayerCallback) -> None:
        """Run each network once on the samples from ``start`` to ``stop``."""
        wanted = set(layers)
        for name, side in self.sides.items():
            own = [layer for layer in self._layers[name] if f"{name}/{layer}" in wanted]

            def renamed(layer: str, representation: Representation, name: str = name) -> None:
                callback(f"{name}/{layer}", representation)

            if own:
                side.run_with_callback(start, stop, own, renamed)

    def describe(self) -> dict[str, Any]:
        """Return the records of all networks."""
        return {"networks": {name: side.describe() for name, side in self.sides.items()}}


def networks_of(side: Side) -> dict[str, nn.Module]:
    """Return the networks that run for a side, by what precedes their layers' names; none for saved activations."""
    if isinstance(side, Networks):
        parts = {name: networks_of(own) for name, own in side.sides.items()}
        return {f"{name}/{inner}": network for name, found in parts.items() for inner, network in found.items()}
    return {"": side.adapter.model} if isinstance(side, Network) else {}


def shares_of(side: Side) -> dict[str, float]:
    """Return the share of the parameters of its network that each module contains."""
    shares = {}
    for start, network in networks_of(side).items():
        whole = max(sum(weight.numel() for weight in network.parameters()), 1)
        for name, module in network.named_modules():
            shares[start + name] = sum(weight.numel() for weight in module.parameters()) / whole
    return shares
