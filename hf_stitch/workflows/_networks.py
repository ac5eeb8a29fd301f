"""Checks of the networks that a workflow runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from torch import nn

from hf_stitch.adapters import Adapter
from hf_stitch.adapters.checks import layer_names
from hf_stitch.adapters.loading import Loadable
from hf_stitch.analysis.activations import Activations

T = TypeVar("T")


class Runnable(Loadable):
    """Networks that a job runs, which saved activations are not."""

    def hint(self, value: Any) -> str:
        """Say what to do with saved activations."""
        if isinstance(value, Activations):
            return (
                "a stitched model runs both networks. To fit a map of saved activations, use a matcher, for example "
                "hf_stitch.registries.matchers.build('ridge').fit(moments) with moments = hf_stitch.Moments(dx, "
                "dy).update(x, y); hf_stitch.compare takes Activations"
            )
        return super().hint(value)


Runs = Annotated[str | nn.Module | Adapter, Runnable()]
Named = str | Mapping[str, Any]
"""A method of a registry, by its name or its record."""


def named_networks(networks: Mapping[str, T] | Iterable[T]) -> dict[str, T]:
    """Return several networks by name."""
    if isinstance(networks, nn.Module):  # a Sequential is also a list
        raise TypeError(f"networks must be several networks, got a single {type(networks).__name__}; write [network]")
    named = dict(networks) if isinstance(networks, Mapping) else {str(i): each for i, each in enumerate(networks)}
    if not named:
        raise ValueError("networks must contain at least one network, got none")
    return named


def named_layers(
    names: Collection[str], layers: Mapping[str, Iterable[str]] | Iterable[str] | None
) -> dict[str, tuple[str, ...]]:
    """Return the layers of several networks, as far as they are given."""
    if layers is None:
        return {}
    if not isinstance(layers, Mapping):
        return dict.fromkeys(names, layer_names("layers", layers))
    if unknown := sorted(layers.keys() - names):
        raise ValueError(f"layers names {', '.join(unknown)}, but the networks are {', '.join(names)}")
    return {name: layer_names("layers", own) for name, own in layers.items()}
