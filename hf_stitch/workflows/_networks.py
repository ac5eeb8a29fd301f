"""Checks of the networks that a workflow runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from hf_stitch.adapters.naming import layer_names
from hf_stitch.analysis.activations import Activations
from hf_stitch.registry import check_name

T = TypeVar("T")


def check_runs(**networks: Any) -> None:
    """Check that none of the arguments is saved activations, which no half of a network can be taken from."""
    for name, given in networks.items():
        if isinstance(given, Activations):
            raise TypeError(
                f"{name} must be a network, got Activations: a stitched model runs both networks. To fit a map of "
                "saved activations, use a matcher, for example hf_stitch.matchers.Ridge().fit(moments) with "
                "moments = hf_stitch.Moments(dx, dy).update(x, y); hf_stitch.compare takes Activations"
            )


def named_networks(networks: Mapping[str, T] | Sequence[T]) -> dict[str, T]:
    """Return several networks by name."""
    if not isinstance(networks, Iterable) or isinstance(networks, str | nn.Module):
        shown = repr(networks) if isinstance(networks, str) else type(networks).__name__
        raise TypeError(f"networks must be a list of networks, or a dict of names and networks, got {shown} alone")
    if not networks:
        raise ValueError("networks must contain at least one network, got none")
    if isinstance(networks, Mapping):
        check_name(**{f"name {place} of networks": name for place, name in enumerate(networks)})
    return dict(networks) if isinstance(networks, Mapping) else {str(i): each for i, each in enumerate(networks)}


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
